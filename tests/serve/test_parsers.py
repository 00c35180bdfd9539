"""Tool calls and reasoning in a model's text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.serve.tool_parsers import (
    FAMILIES,
    ReasoningParser,
    ToolParser,
    family_of,
)

ARGUMENTS = {"city": "Zürich {[\"'", "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = {"name": "weather", "arguments": ARGUMENTS}
CALLS = {
    "hermes": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "llama3": json.dumps({"name": "weather", "parameters": ARGUMENTS}),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
TWO = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "llama3": CALLS["llama3"] + "; " + CALLS["llama3"],
    "deepseek": (
        "<｜tool▁calls▁begin｜>"
        + f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>" * 2
        + "<｜tool▁calls▁end｜>"
    ),
}
BROKEN = {
    "hermes": "see <tool_call>{not json}</tool_call> there <tool_call>{",
    "llama3": '{"name": "weather", "parameters": {"city": ',
    "deepseek": "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜> and <｜tool▁calls▁begin｜>",
}


def parsed(family: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolParser(FAMILIES[family])
    parts = [*map(parser.feed, pieces), parser.finish()]
    calls = [(c.name, json.loads(c.arguments)) for p in parts for c in p.calls]
    return "".join(p.content for p in parts), calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({p % (len(text) + 1) for p in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


PLACES = st.lists(st.integers(0, 1000), max_size=30)


@pytest.mark.parametrize("family", FAMILIES)
@given(places=PLACES)
def test_calls_in_pieces(family, places):
    wanted = ("weather", ARGUMENTS)
    assert parsed(family, cut(CALLS[family], places)) == ("", [wanted])
    assert parsed(family, cut(TWO[family], places)) == ("", [wanted, wanted])
    if family != "llama3":  # whose calls are whole answers
        before = "I look it up. "
        assert parsed(family, cut(before + CALLS[family], places)) == (before, [wanted])


@pytest.mark.parametrize("family", FAMILIES)
@given(places=PLACES)
def test_what_is_no_call_is_content_to_the_last_character(family, places):
    for text in (BROKEN[family], "no call < at all", "<tool", " \n plain", ""):
        assert parsed(family, cut(text, places)) == (text, [])


@given(places=PLACES, begun=st.booleans())
def test_reasoning_in_pieces(places, begun):
    text = ("" if begun else "<think>\n") + "first a < b </thin then\n</think>\n\nThe answer."
    parser = ReasoningParser(begun)
    parts = [*map(parser.feed, cut(text, places)), parser.finish()]
    assert "".join(r for r, _ in parts).strip() == "first a < b </thin then"
    assert "".join(c for _, c in parts).strip() == "The answer."


@given(places=PLACES)
def test_an_answer_without_reasoning(places):
    parser = ReasoningParser(begun=False)
    text = "<thanks> for asking"
    parts = [*map(parser.feed, cut(text, places)), parser.finish()]
    assert ("".join(r for r, _ in parts), "".join(c for _, c in parts)) == ("", text)


def test_the_family_is_told_by_the_template():
    assert family_of("... <tool_call> ...") == "hermes"
    assert family_of("{{ '<｜tool▁calls▁begin｜>' }}") == "deepseek"
    assert family_of("<|python_tag|>") == "llama3"
    assert family_of("{{ messages }}") is None
