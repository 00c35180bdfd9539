"""Chat rendering: against transformers' texts, keywords, content parts, tool calls, limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from chat_cases import CALL, CHATML, FUNCTIONS, PARTS, RENDERINGS, USER

from deepinfer_jax.text import template_renderer
from deepinfer_jax.text.chat_template import ChatTemplate
from deepinfer_jax.text.tool_schema import function_schema

EXPECTED = json.loads(
    (Path(__file__).parents[1] / "golden" / "chat.json").read_text(encoding="utf-8")
)
HELLO = [{"role": "user", "content": "hi"}]


def render(template: str, messages: object = HELLO, **options) -> str:
    return ChatTemplate(template, "t").render(messages, **options)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_become_the_schemas_of_transformers(function) -> None:
    schema = function_schema(function)
    assert schema == EXPECTED["schemas"][function.__name__]
    assert json.dumps(schema) == json.dumps(EXPECTED["schemas"][function.__name__])  # the order too


@pytest.mark.parametrize("name", RENDERINGS)
def test_texts_are_those_of_transformers(name: str) -> None:
    options = dict(RENDERINGS[name])
    template, messages = options.pop("template"), options.pop("messages")
    special = {k: options.pop(k) for k in ("bos_token", "eos_token") if k in options}
    text = render(template, messages, special_tokens=special, **options)
    assert text == EXPECTED["texts"][name]


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = json.dumps(messages)
    render(CHATML, messages)
    render(CHATML, [USER, {"role": "assistant", "content": "a"}], continue_final_message=True)
    assert json.dumps(messages) == before


def test_a_keyword_must_be_read_by_the_template() -> None:
    template = "{% if not date is defined %}{% set date = 'x' %}{% endif %}{{ date }}"
    assert render(template, date="1 May") == "1 May"
    assert render(template) == "x"
    with pytest.raises(ValueError, match=r"does not read the keyword\(s\) \['dat'\].*\['date'\]"):
        render(template, dat="1 May")


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    """An object where the template wants one, the text itself where it prints it."""
    text = '{"city":  "Oslo"}'
    call = {"type": "function", "function": {"name": "weather", "arguments": text}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    start = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert render(start + "{{ a | tojson }}", messages) == '{"city": "Oslo"}'
    assert render(start + "{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", messages) == (
        "city=Oslo"
    )
    assert render(start + "{{ a }}|{{ 'x' + a + 'y' }}|{{ a ~ '' }}", messages) == (
        f"{text}|x{text}y|{text}"
    )
    call["function"]["arguments"] = ""
    assert render(start + "{{ a | tojson }}", messages) == "{}"
    for bad, match in (("{", "is not valid JSON"), ("5", "must be a JSON object")):
        call["function"]["arguments"] = bad
        where = r"messages\[0\]\.tool_calls\[0\]\.function\.arguments "
        with pytest.raises(ValueError, match=where + match):
            render(CHATML, messages)


def test_text_parts_reach_templates_of_both_kinds() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    messages = [{"role": "user", "content": parts}]
    special = {"bos_token": "", "eos_token": ""}
    assert render(PARTS, messages, special_tokens=special) == "user: [a][b][c]"
    loop = "{% for p in messages[0]['content'] %}{{ p['text'] }};{% endfor %}"
    assert render(loop, messages) == "a;b;c;"
    assigned = "{% set c = messages[0].content %}{% for p in c %}{{ p.text }};{% endfor %}"
    assert render(assigned, messages) == "a;b;c;"
    assert render("{{ messages[0].content[0].text }}", messages) == "a"
    flat = "{% for t in tools or [] %}{% endfor %}{{ messages[0].content }}"
    assert render(flat, messages) == "a\nb\nc"
    string_only = "{{ messages[0].content if messages[0].content is string else 'lost' }}"
    assert render(string_only, messages) == "a\nb\nc"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ([{"content": "x"}], r"messages\[0\] must be a mapping with a 'role'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has type 'image_u"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must have its text"),
        ([{"role": "user", "content": [1]}], r"content\[0\] must be text or a mapping"),
        ([{"role": "user", "content": "a", "x": object()}], r"messages\[0\]\.x must be plain"),
        ([{"role": "user", "content": "a", "x": {1: 2}}], "has the key 1"),
        ([{"role": "a", "tool_calls": "x"}], r"messages\[0\]\.tool_calls must be a list"),
    ],
)
def test_bad_messages_are_named(messages, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        render("", messages)


def test_messages_may_be_objects() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str
        name: str | None = None

    assert render("{{ messages[0] }}", [Message("user", "hi")]) == (
        "{'role': 'user', 'content': 'hi'}"
    )
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than"):
        render("", [{"role": "user", "content": "", "x": deep}])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of the two"),
        ({"continue_final_message": "thoughts"}, "no 'thoughts' to continue"),
        ({"continue_final_message": True}, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        render("{{ messages[0].content | upper }}", **options)


def _no_docstring(x: int): ...


def _no_hint(x):
    """A tool."""


def _no_description(x: int):
    """A tool."""


def _custom_type(x: Path):
    """A tool.

    Args:
        x: Something
    """


@pytest.mark.parametrize(
    ("tool", "match"),
    [
        (_no_docstring, "_no_docstring has no docstring"),
        (_no_hint, "_no_hint has no type hint for 'x'"),
        (_no_description, "does not describe 'x'"),
        (_custom_type, "_custom_type, parameter 'x'.*no JSON schema"),
        (3, r"tools\[0\] must be a JSON schema or a function"),
    ],
)
def test_bad_tools_are_named(tool, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        render(CHATML, tools=[tool])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "longer",
        ),
        ("{{ 2**100000000 }}", "longer"),
    ],
)
def test_time_is_limited(source: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "WALL_SECONDS", 0.3)
    with pytest.raises(ValueError, match=match):
        render(source)
    monkeypatch.setattr(template_renderer, "WALL_SECONDS", 30.0)
    assert render("next") == "next"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ 'x' * 10**10 }}", "MiB"),
        ("{{ 'a' | center(10**10) }}", "MiB"),
        ("{{ '%9999999999d' % 1 }}", "MiB"),
        (
            "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
            "more than 67108864 characters",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deep"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too deep"),
        ("{{ " + "[" * 100000 + "]" * 100000 + " }}", "too deep"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "too deep"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[5].role.x }}", "no element 5"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ strftime_now('\\ud800') }}", "surrogates"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
        ("{% generation %}a", "line 1"),
    ],
)
def test_what_a_template_does_wrong_is_one_kind_of_error(source: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        render(source)
    assert str(error.value).startswith("t: ")
    assert render("{{ messages[0].content }}") == "hi"


def test_names_set_in_a_generation_block_stay_there() -> None:
    template = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert render(template) == "1False"
