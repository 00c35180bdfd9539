"""The incremental detokenizer against `tokenizers`' decode of the whole sequence."""

from __future__ import annotations

import json

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.detokenizer import IncrementalDetokenizer, token_text
from deepinfer_jax.text.stop_strings import StopMatcher
from deepinfer_jax.text.tokenizer import Tokenizer

BYTES = Tokenizer(tiny.byte_level((" the", " sea", "é", "海", "👩‍🚀", "\n\n")))
PIECES = Tokenizer(tiny.sentencepiece())
META = Tokenizer(tiny.metaspace())
WORDS = Tokenizer(tiny.wordpiece())
TEXTS = ["plain ascii", "naïve café", "日本語のテキスト", "👩‍🚀🇯🇵 emoji 👍🏽", "mixed 海 é 👍 end"]


def run(tokenizer, ids, prompt=(), **options) -> tuple[str, list[str]]:
    detok = IncrementalDetokenizer(tokenizer, prompt, **options)
    parts = [detok.push([i]) for i in ids]
    parts.append(detok.finish())
    assert detok.text == "".join(parts)
    return detok.text, parts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=60), st.booleans())
def test_byte_level_equals_full_decode_of_any_ids(ids, skip):
    assert run(BYTES, ids, skip_special_tokens=skip)[0] == BYTES.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(1, 7), max_size=20))
def test_byte_level_round_trip_in_pieces_of_any_size(text, sizes):
    ids = BYTES.encode(text)
    detok, start, parts = IncrementalDetokenizer(BYTES, BYTES.encode("prompt")), 0, []
    for size in [*sizes, len(ids)]:
        parts.append(detok.push(ids[start : start + size]))
        start += size
        assert "\ufffd" not in parts[-1] or "\ufffd" in text
    assert "".join(parts) + detok.finish() == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_appears_once_its_last_byte_is_there(text):
    ids = [tiny.byte_id(BYTES.backend, b) for b in text.encode()]
    detok, shown = IncrementalDetokenizer(BYTES), ""
    for n, i in enumerate(ids, 1):
        shown += detok.push([i])
        assert shown == text.encode()[:n].decode("utf-8", "ignore")


def test_incomplete_character_is_held_and_flushed_as_replacement():
    ids = [tiny.byte_id(BYTES.backend, b) for b in "👍".encode()[:3]]
    text, parts = run(BYTES, ids)
    assert parts == ["", "", "", "\ufffd"]
    assert text == BYTES.decode(ids) == "\ufffd"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_the_prompt_never_shows_even_when_cut_inside_a_character(tokenizer):
    tail = "👍".encode()
    ids = [
        tokenizer.token_to_id(f"<0x{b:02X}>")
        if tokenizer is PIECES
        else tiny.byte_id(BYTES.backend, b)
        for b in tail
    ]
    assert run(tokenizer, ids[2:], prompt=ids[:2])[0] == "\ufffd\ufffd"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*range(3, 12), 3 + 0xE6, 3 + 0xB5, 3 + 0xB7, 3 + 0x41, *range(259, 265)]),
        max_size=40,
    )
)
def test_pieces_equal_full_decode_where_byte_runs_are_well_formed(ids):
    full = PIECES.decode(ids)
    text = run(PIECES, ids)[0]
    if "\ufffd" not in full:
        assert text == full
    assert len(text) >= len(full.replace("\ufffd", ""))


def test_pieces_malformed_bytes_before_a_piece():
    ids = [3 + 0xF0, 3 + 0x9F, PIECES.token_to_id("▁sea")]
    assert run(PIECES, ids)[0] == PIECES.decode(ids) == "\ufffd\ufffd sea"


def test_leading_space_is_kept_after_a_prompt_and_stripped_without_one():
    ids = [PIECES.token_to_id("▁the"), PIECES.token_to_id("▁sea")]
    assert run(PIECES, ids)[0] == PIECES.decode(ids) == "the sea"
    assert run(PIECES, ids, prompt=[PIECES.token_to_id("<s>")])[0] == "the sea"
    assert run(PIECES, ids, prompt=[PIECES.token_to_id("s")])[0] == " the sea"


def test_metaspace_and_wordpiece():
    ids = [1, 2, 3]
    assert run(META, ids)[0] == META.decode(ids) == "the seas"
    assert run(META, ids, prompt=[3])[0] == " the seas"
    ids = [1, 2, 4, 2, 3, 5]
    assert run(WORDS, ids)[0] == WORDS.decode(ids) == "the seaside seas ."
    assert run(WORDS, ids * 5)[0] == WORDS.decode(ids * 5)
    assert run(WORDS, [3, 1], prompt=[2])[0] == "s the"


def test_special_tokens_are_skipped_or_shown():
    ids = [*BYTES.encode("a"), BYTES.token_to_id("<|im_end|>"), *BYTES.encode("b")]
    assert run(BYTES, ids)[0] == "ab"
    assert run(BYTES, ids, skip_special_tokens=False)[0] == "a<|im_end|>b"


class CountingTokenizer:
    """Counts the pieces looked up; a whole-sequence decode is refused."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner, self.lookups = inner, 0
        self.special_ids, self.decoder_spec = inner.special_ids, inner.decoder_spec

    def id_to_token(self, token_id: int) -> str | None:
        self.lookups += 1
        return self._inner.id_to_token(token_id)

    def decode(self, *args):
        raise AssertionError("decoded a sequence again")


@pytest.mark.parametrize("fragment", [b"\xf0\x9f\x91", b"\xff", b"ok"])
def test_work_is_linear_in_the_number_of_tokens(fragment):
    counting = CountingTokenizer(BYTES)
    ids = [tiny.byte_id(BYTES.backend, b) for b in fragment] * 1000
    detok = IncrementalDetokenizer(counting, stop=["never in there", "ok" * 40 + "!"])
    for i in ids:
        detok.push([i])
    detok.finish()
    assert counting.lookups == len(ids)
    assert detok.text == BYTES.decode(ids)


def test_window_decoder_never_holds_more_than_four_tokens():
    backend = tiny.byte_level()
    spec = {
        "type": "Sequence",
        "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}, {"type": "CTC"}],
    }
    tokenizer = Tokenizer(backend)
    tokenizer.__dict__["decoder_spec"] = spec  # not a known combination: the window is used
    ids = [tiny.byte_id(backend, 0xFF)] * 50
    text, parts = run(tokenizer, ids)
    assert text == "\ufffd" * 50
    assert max(len(p) for p in parts) <= 4


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "matched"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("aaab", ["aab"], "a", "aab"),
        ("abababc", ["ababc"], "ab", "ababc"),
        ("xEN and END", ["END"], "xEN and ", "END"),
        ("abc", ["b", "ab"], "a", "b"),
        ("abc", ["ab", "b"], "", "ab"),
        ("abcd", ["bcd", "bc"], "a", "bc"),
        ("no stop here", ["xyz"], "no stop here", None),
        ("ends with a prefix EN", ["END"], "ends with a prefix EN", None),
        ("日本語。終", ["。"], "日本語", "。"),
    ],
)
def test_stop_strings_whatever_the_pieces(text, stop, expected, matched, include):
    expected = expected + (matched or "") if include else expected
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stop, include_stop=include)
        shown = (
            "".join(matcher.feed(text[i : i + size]) for i in range(0, len(text), size))
            + matcher.flush()
        )
        assert (shown, matcher.matched) == (expected, matched)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_shown_ever_needs_to_be_taken_back(text, stop):
    ends = [(text.find(s) + len(s), i) for i, s in enumerate(stop) if s in text]
    matcher, shown = StopMatcher(stop), ""
    for char in text:
        shown += matcher.feed(char)
    shown += matcher.flush()
    if not ends:
        assert (shown, matcher.matched) == (text, None)
        return
    end, index = min(ends)
    assert (shown, matcher.matched) == (text[: end - len(stop[index])], stop[index])


def test_prefix_of_a_stop_string_is_held_back_and_no_more():
    matcher = StopMatcher(["<end>"])
    assert [matcher.feed(p) for p in ("hello <", "en", "x", "<<e", "nd", ">tail")] == [
        "hello ",
        "",
        "<enx",
        "<",
        "",
        "",
    ]
    assert matcher.matched == "<end>"


def test_stop_inside_a_group_of_tokens_says_where_to_cut():
    ids = BYTES.encode("ab STOP cd")
    detok = IncrementalDetokenizer(BYTES, stop=["STOP"])
    assert detok.push(ids) == "ab "
    assert (detok.stop_reason, detok.num_tokens) == ("STOP", len(BYTES.encode("ab STOP")))
    assert detok.push(BYTES.encode("more")) == "" and detok.finish() == ""


def test_min_tokens_passes_stop_strings_through():
    detok = IncrementalDetokenizer(BYTES, stop=["x"], min_tokens=3)
    assert detok.push(BYTES.encode("xaxa")) == "xa"
    assert (detok.stop_reason, detok.num_tokens) == ("x", 3)


def test_stop_token_text_is_left_out_unless_asked_for():
    for include, expected in ((False, "ab"), (True, "abc")):
        detok = IncrementalDetokenizer(BYTES, include_stop_str_in_output=include)
        assert detok.push(BYTES.encode("abc"), last_is_stop_token=True) == expected
        assert detok.num_tokens == 3


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.integers(0, 60), st.sampled_from([BYTES, PIECES, META, WORDS]))
def test_state_moves_to_another_process_at_any_token(text, cut, tokenizer):
    ids = tokenizer.encode(text)

    def make():
        return IncrementalDetokenizer(tokenizer, ids[:3], stop=["ab", "é!"], min_tokens=2)

    whole, first = make(), make()
    expected = "".join(whole.push([i]) for i in ids) + whole.finish()
    shown = "".join(first.push([i]) for i in ids[:cut])
    second = IncrementalDetokenizer.from_state_dict(
        tokenizer, json.loads(json.dumps(first.state_dict()))
    )
    shown += "".join(second.push([i]) for i in ids[cut:]) + second.finish()
    assert shown == expected == second.text
    assert (second.stop_reason, second.num_tokens) == (whole.stop_reason, whole.num_tokens)


def test_take_text_returns_what_is_new_also_after_a_move():
    detok = IncrementalDetokenizer(BYTES)
    assert detok.take_text() == ""
    detok.push(BYTES.encode("ab"))
    detok.push(BYTES.encode("c"))
    assert (detok.take_text(), detok.take_text(), detok.text) == ("abc", "", "abc")
    detok.push(BYTES.encode("de"))
    moved = IncrementalDetokenizer.from_state_dict(BYTES, detok.state_dict())
    moved.push(BYTES.encode("f"))
    assert (moved.take_text(), moved.text) == ("def", "abcdef")


def test_for_request_takes_the_sampling_parameters():
    params = SamplingParams(stop="b", include_stop_str_in_output=True)
    detok = IncrementalDetokenizer.for_request(BYTES, [], params)
    assert detok.push(BYTES.encode("abc")) == "ab"


def test_token_text_of_single_tokens():
    assert token_text(BYTES, BYTES.token_to_id("Ġthe")) == " the"
    assert token_text(BYTES, tiny.byte_id(BYTES.backend, 0xF0)) == "\ufffd"
    assert token_text(PIECES, PIECES.token_to_id("▁sea")) == " sea"
    assert token_text(PIECES, 3 + 0xF0) == "\ufffd"
    assert token_text(WORDS, 1) == "the"
    assert token_text(BYTES, 10**6) is None
