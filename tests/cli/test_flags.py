"""Flags made from dataclass fields."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from deepinfer_jax.flags import add_dataclass_flags, dataclass_values, field_docs
from deepinfer_jax.sampling_params import SamplingParams


class Colour(enum.IntEnum):
    RED = 0
    BLUE = 1


@dataclass
class Options:
    """Options."""

    count: int
    """How many.

    Details that --help leaves out.
    """
    size: int | None = None
    ratio: float = 0.5
    """100% of it."""
    fast: bool = True
    slow: bool | None = None
    colour: Colour | str | int = Colour.RED
    buckets: tuple[int, ...] | None = None
    words: str | Sequence[str] | None = None
    extra: dict[str, int] = field(default_factory=dict)
    bias: Mapping[int, float] | None = None
    hidden: object = None


def parse(*argv: str, defaults=None) -> dict:
    parser = argparse.ArgumentParser()
    add_dataclass_flags(parser, Options, "options", skip=("hidden",), defaults=defaults)
    return dataclass_values(parser.parse_args(argv), Options, defaults)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", {}),
        ("--count 3 --size 4 --ratio 0.25", {"count": 3, "size": 4, "ratio": 0.25}),
        ("--no-fast --slow", {"fast": False, "slow": True}),
        ("--colour blue", {"colour": Colour.BLUE}),
        ("--colour 1", {"colour": Colour.BLUE}),
        ("--buckets 1,2,8", {"buckets": (1, 2, 8)}),
        ("--words a --words b", {"words": ["a", "b"]}),
        ('--extra {"x":1}', {"extra": {"x": 1}}),
        ('--bias {"5":1.5}', {"bias": {"5": 1.5}}),
    ],
)
def test_types(argv, expected):
    assert parse(*argv.split()) == expected


def test_defaults_of_the_command_are_overridden_by_flags():
    assert parse("--count", "1", defaults={"count": 7, "size": 2}) == {"count": 1, "size": 2}


@pytest.mark.parametrize(
    "argv",
    ["--count x", "--colour green", "--buckets 1,x", "--extra [1]", "--extra {", "--hidden 1"],
)
def test_refusals(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(*argv.split())
    assert exit_.value.code == 2
    assert argv.split()[0] in capsys.readouterr().err


def test_help_comes_from_the_class(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--count INT how many --size" in text
    assert "100% of it (default: 0.5)" in text
    assert "--colour RED|BLUE (default: RED)" in text


def test_every_sampling_parameter_is_documented():
    assert set(field_docs(SamplingParams)) == set(SamplingParams.__dataclass_fields__)
