"""Arrivals for the simulator: our JSONL, the public Azure and Mooncake traces, and a seeded
generator.

A trace is arrays, not objects: one row per request, sorted by time. Formats (docs/simulator.md has
  examples): jsonl     {"timestamp": s, "input_length": n, "output_length": n[, "max_tokens": n,
  "prefix_ids": [ids]]} mooncake  {"timestamp": ms, "input_length": n, "output_length": n,
  "hash_ids": [ids]}, one id per 512 prompt tokens azure     CSV with the columns TIMESTAMP,
  ContextTokens, GeneratedTokens
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

PREFIX_BLOCK = 512
"""Prompt tokens that one prefix id stands for (Mooncake's traces: Qin et al. 2024,
arXiv:2407.00079, section 4)."""
FORMATS = ("jsonl", "mooncake", "azure")
_UNIQUE = -2  # prompt tokens <= this belong to one request only; prefix ids are >= 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests by time of arrival.

    timestamps: f64 [n], seconds, ascending, the first is 0. input_lengths, output_lengths: i64 [n],
    tokens, >= 1: what the request really produces. max_tokens: i64 [n], what it asks for at most:
    above its output_length the request ends as if by EOS, unforeseen. prefix_ids: per request the
    ids of its leading prompt pieces of `prefix_block` tokens; requests whose leading ids are equal
    share these tokens. None: no prompt shares anything. Raises ValueError naming the row.
    """

    name: str
    timestamps: np.ndarray
    input_lengths: np.ndarray
    output_lengths: np.ndarray
    max_tokens: np.ndarray
    prefix_ids: tuple[tuple[int, ...], ...] | None = None
    prefix_block: int = PREFIX_BLOCK

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError(f"trace {self.name!r} has no requests")
        for field in ("input_lengths", "output_lengths", "max_tokens"):
            values = getattr(self, field)
            if values.shape != self.timestamps.shape:
                raise ValueError(
                    f"trace {self.name!r}: {field} has shape {values.shape}, timestamps"
                    f" {self.timestamps.shape}"
                )
            if values.min() < 1:
                raise ValueError(
                    f"trace {self.name!r}: {field}[{int(values.argmin())}] must be >= 1, got"
                    f" {int(values.min())}"
                )
        if not np.isfinite(self.timestamps).all() or (np.diff(self.timestamps) < 0).any():
            raise ValueError(f"trace {self.name!r}: timestamps must be finite and ascending")
        if (self.max_tokens < self.output_lengths).any():
            row = int(np.flatnonzero(self.max_tokens < self.output_lengths)[0])
            raise ValueError(
                f"trace {self.name!r}: request {row} has max_tokens={int(self.max_tokens[row])} "
                f"below its output_length={int(self.output_lengths[row])}"
            )

    def __len__(self) -> int:
        return self.timestamps.size

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and max_tokens."""
        return int((self.input_lengths + self.max_tokens).max())

    @property
    def rate(self) -> float:
        """Requests per second over the trace's span; infinite when all arrive at once."""
        span = float(self.timestamps[-1] - self.timestamps[0])
        return (len(self) - 1) / span if span > 0 else math.inf

    def prompt(self, row: int) -> np.ndarray:
        """i32 [input_length] token ids: equal exactly where prefixes are shared."""
        length = int(self.input_lengths[row])
        tokens = np.full(length, _UNIQUE - row, np.int32)
        if self.prefix_ids is not None and self.prefix_ids[row]:
            shared = np.repeat(np.asarray(self.prefix_ids[row], np.int32), self.prefix_block)[
                :length
            ]
            tokens[: shared.size] = shared
        return tokens

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        cut = slice(0, count)
        return replace(
            self,
            timestamps=self.timestamps[cut],
            input_lengths=self.input_lengths[cut],
            output_lengths=self.output_lengths[cut],
            max_tokens=self.max_tokens[cut],
            prefix_ids=None if self.prefix_ids is None else self.prefix_ids[cut],
        )

    def faster(self, factor: float) -> Trace:
        """The same requests arriving `factor` times as fast."""
        if not factor > 0 or not math.isfinite(factor):
            raise ValueError(f"the speed of a trace must be > 0 and finite, got {factor}")
        return replace(self, timestamps=self.timestamps / factor)

    def asking_for(self, max_tokens: int) -> Trace:
        """Every request asks for at least `max_tokens`; its output length stays, so it ends as if
        by EOS."""
        return replace(self, max_tokens=np.maximum(self.max_tokens, max_tokens))


def make_trace(
    name: str,
    timestamps: Any,
    input_lengths: Any,
    output_lengths: Any,
    max_tokens: Any = None,
    prefix_ids: list[tuple[int, ...]] | None = None,
    prefix_block: int = PREFIX_BLOCK,
) -> Trace:
    """A Trace from any order of arrival: sorted by time (ties keep their order), times counted from
    the first arrival.

    An output length of 0 counts as 1, as max_tokens=0 does in an engine. Prefix ids may be any
    integers.
    """
    times = np.asarray(timestamps, np.float64)
    order = np.argsort(times, kind="stable")
    outputs = np.maximum(np.asarray(output_lengths, np.int64), 1)
    limits = outputs if max_tokens is None else np.asarray(max_tokens, np.int64)
    ids = None
    if prefix_ids is not None and any(prefix_ids):
        dense: dict[int, int] = {}  # any integers -> 0, 1, 2, ..: they must fit a token id
        ids = tuple(
            tuple(dense.setdefault(i, len(dense)) for i in prefix_ids[row]) for row in order
        )
    return Trace(
        name=name,
        timestamps=times[order] - (times.min() if times.size else 0.0),
        input_lengths=np.asarray(input_lengths, np.int64)[order],
        output_lengths=outputs[order],
        max_tokens=limits[order],
        prefix_ids=ids,
        prefix_block=prefix_block,
    )


# ---- files


def load_trace(path: str | Path, format: str = "auto", limit: int | None = None) -> Trace:
    """Reads a trace file. format "auto": CSV by its suffix, Mooncake by `hash_ids` in the first
    line, else our JSONL.

    limit: read no more than this many rows. Raises ValueError naming file, line and field; OSError
    if it cannot be read.
    """
    path = Path(path)
    if format == "auto":
        format = _detect(path)
    if format not in FORMATS:
        raise ValueError(f"unknown trace format {format!r}; known: auto, {', '.join(FORMATS)}")
    rows = list(_azure_rows(path, limit) if format == "azure" else _json_rows(path, format, limit))
    if not rows:
        raise ValueError(f"{path}: the trace has no requests")
    times, inputs, outputs, limits, ids = zip(*rows, strict=True)
    return make_trace(path.name, times, inputs, outputs, limits, list(ids))


def _detect(path: Path) -> str:
    if path.suffix.lower() == ".csv":
        return "azure"
    first = next((line for _, line in _lines(path) if line.strip()), "")
    return "mooncake" if '"hash_ids"' in first else "jsonl"


def _json_rows(path: Path, format: str, limit: int | None) -> Iterator[tuple]:
    seconds, ids_field = (1e-3, "hash_ids") if format == "mooncake" else (1.0, "prefix_ids")
    with contextlib.closing(_lines(path)) as lines:
        filled = ((number, line) for number, line in lines if line.strip())
        for number, line in itertools.islice(filled, limit):
            where = f"{path}, line {number}"
            record = _json_object(where, line)
            output = _count(where, record, "output_length", 0)
            most = (
                _count(where, record, "max_tokens", max(output, 1))
                if "max_tokens" in record
                else max(output, 1)
            )
            ids = _ids(where, record, ids_field)
            yield (
                _number(where, record, "timestamp") * seconds,
                _count(where, record, "input_length", 1),
                output,
                most,
                ids,
            )


def _lines(path: Path) -> Generator[tuple[int, str]]:
    """(number, text) of every line; ValueError naming the line that is not UTF-8."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8: {error}") from None
            yield number, line


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {type(record).__name__}")
    return record


def _field(where: str, record: dict[str, Any], name: str) -> Any:
    if record.get(name) is None:
        raise ValueError(
            f"{where}: field {name!r} is missing; the line has"
            f" {', '.join(map(str, record)) or 'nothing'}"
        )
    return record[name]


def _number(where: str, record: dict[str, Any], name: str) -> float:
    value = _field(where, record, name)
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where}: field {name!r} must be a finite number, got {repr(value)[:80]}")
    return number


def _count(where: str, record: dict[str, Any], name: str, least: int) -> int:
    value = _field(where, record, name)
    number = _integer(value)
    if number is None or number < least:
        raise ValueError(f"{where}: field {name!r} must be an integer >= {least}, got {value!r}")
    return number


def _integer(value: Any) -> int | None:
    """3, 3.0 and "3" -> 3; anything else None."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None


def _ids(where: str, record: dict[str, Any], name: str) -> tuple[int, ...]:
    ids = record.get(name) or []
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ValueError(f"{where}: field {name!r} must be a list of integers, got {ids!r}")
    return tuple(ids)


def _azure_rows(path: Path, limit: int | None) -> Iterator[tuple]:
    with contextlib.closing(_lines(path)) as lines:
        reader = csv.DictReader(line for _, line in lines)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"{path}, line 1: column {', '.join(sorted(missing))} is missing; the header has"
                f" {reader.fieldnames}"
            )
        for count, record in enumerate(_records(path, reader)):
            if limit is not None and count >= limit:
                return
            where = f"{path}, line {reader.line_num}"
            output = _count(where, record, "GeneratedTokens", 0)
            time = _timestamp(where, _field(where, record, "TIMESTAMP"))
            yield time, _count(where, record, "ContextTokens", 1), output, max(output, 1), ()


def _records(path: Path, reader: csv.DictReader) -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path}, after line {reader.line_num}: {error}") from None


def _timestamp(where: str, text: str) -> float:
    """Seconds: a plain number, or a date and time such as 2023-11-16 18:17:03.9799600 (UTC unless
    it says otherwise)."""
    for parse in (float, _date_seconds):
        try:
            value = parse(text.strip())
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    raise ValueError(f"{where}: field 'TIMESTAMP' must be seconds or a date and time, got {text!r}")


def _date_seconds(text: str) -> float:
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


# ---- generator


def synthetic_trace(
    num_requests: int,
    *,
    rate: float,
    input_mean: float,
    output_mean: float,
    input_cv: float = 1.0,
    output_cv: float = 1.0,
    arrivals: str = "poisson",
    burstiness: float = 2.0,
    max_length: int | None = None,
    shared_prefix: int = 0,
    prefix_groups: int = 1,
    seed: int = 0,
) -> Trace:
    """Random requests: the same arguments give the same trace.

    rate: requests per second (inf: all at once). arrivals: "poisson", "gamma" (gaps with
    coefficient of variation `burstiness`; 1 is Poisson) or "constant". Lengths are lognormal with
    the given mean and coefficient of variation (0: all equal), in [1, max_length]. shared_prefix:
    leading prompt tokens common to all requests of one of `prefix_groups` groups. Raises ValueError
    naming the argument.
    """
    for name, value in (
        ("num_requests", num_requests),
        ("rate", rate),
        ("input_mean", input_mean),
        ("output_mean", output_mean),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
    rng = np.random.default_rng(seed)
    timestamps = np.cumsum(_gaps(rng, num_requests, rate, arrivals, burstiness))
    inputs = _lengths(rng, num_requests, input_mean, input_cv, "input_cv", max_length)
    outputs = _lengths(rng, num_requests, output_mean, output_cv, "output_cv", max_length)
    ids: list[tuple[int, ...]] | None = None
    if shared_prefix:
        ids = [(int(group),) for group in rng.integers(0, prefix_groups, num_requests)]
    name = f"synthetic {arrivals} {rate:g}/s {input_mean:g} in {output_mean:g} out seed {seed}"
    return make_trace(
        name,
        timestamps,
        inputs,
        outputs,
        prefix_ids=ids,
        prefix_block=shared_prefix or PREFIX_BLOCK,
    )


def _gaps(
    rng: np.random.Generator, count: int, rate: float, arrivals: str, burstiness: float
) -> np.ndarray:
    draw: dict[str, Callable[[], np.ndarray]] = {
        "poisson": lambda: rng.exponential(1.0, count),
        "gamma": lambda: rng.gamma(burstiness**-2, burstiness**2, count),
        "constant": lambda: np.ones(count),
    }
    if arrivals not in draw:
        raise ValueError(f"unknown arrivals {arrivals!r}; known: {', '.join(draw)}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be > 0, got {burstiness}")
    return draw[arrivals]() / rate


def _lengths(
    rng: np.random.Generator, count: int, mean: float, cv: float, name: str, longest: int | None
) -> np.ndarray:
    if cv < 0:
        raise ValueError(f"{name} must be >= 0, got {cv}")
    variance = math.log1p(cv**2)  # of the logarithm
    values = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.clip(np.rint(values), 1, longest).astype(np.int64)
