"""Whether a snapshot's records hold together: every id, count, row and rank is what it may be.

A checksum tells damage, not intent, and an engine that went on with a row or token out of range
would read other requests' blocks. So nothing of a record is used before all of it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.snapshot.files import Snapshot, SnapshotError
from deepinfer_jax.snapshot.records import CompletionRecord, PageRecord, Place, RequestRecord

_DIGITS = frozenset("0123456789abcdef")


def check(snapshot: Snapshot, vocab_size: int) -> None:
    """Raises SnapshotError naming the request, the value and the limit."""
    record = snapshot.record
    rows = {kind: _num_rows(snapshot, kind) for kind in ("blocks", "states")}
    try:
        _unique("request", (r.request_id for r in record.requests))
        for request in record.requests:
            _check_request(request, vocab_size)
            for c in request.completions:
                if c.place is not None:
                    _check_place(c, c.place, record.ranks, rows, record.identity.block_size)
        _check_pages(record.prefix, rows["blocks"])
        _check_outputs(snapshot)
        SeedSource(0).state = record.seeds
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise SnapshotError(f"the snapshot is not one of an engine: {error}") from None


def _num_rows(snapshot: Snapshot, kind: str) -> int:
    return min((len(a) for a in snapshot.arrays.get(kind, {}).values()), default=0)


def _unique(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} occurs twice")
        seen.add(value)


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{what} must lie in [{low}, {high}], got {value}")


def _check_request(request: RequestRecord, vocab_size: int) -> None:
    name, completions = f"request {request.request_id!r}", request.completions
    params = SamplingParams.from_dict(request.params)
    if not completions or len(completions) > params.n:
        raise ValueError(f"{name}: {len(completions)} completions, n is {params.n}")
    _unique(f"{name}: completion", (c.index for c in completions))
    for c in completions:
        _within(f"{name}: index", c.index, 0, params.n - 1)
        c.state.check(vocab_size)
        if c.state.prompt_token_ids != completions[0].state.prompt_token_ids:
            raise ValueError(f"{name}: its completions have different prompts")
        if (c.place is None) != (c.finish_reason is not None):
            raise ValueError(f"{name}: completion {c.index} has ended and has a place, or neither")


def _check_place(
    c: CompletionRecord, place: Place, ranks: int, rows: dict[str, int], block_size: int
) -> None:
    name = f"request {c.state.request_id!r}"
    prompt = len(c.state.prompt_token_ids)
    tokens = prompt + len(c.state.output_token_ids)
    _within(f"{name}: rank", place.rank, 0, max(ranks, 1) - 1)
    _within(f"{name}: num_cached", place.num_cached, 0, tokens)
    _within(f"{name}: max_len", place.max_len, tokens, 2**31 - 1)
    pages = math.ceil(place.num_cached / block_size)
    if len(place.rows) != pages:
        raise ValueError(
            f"{name}: {place.num_cached} cached tokens are {pages} blocks, got {len(place.rows)}"
        )
    for row in place.rows:
        _within(f"{name}: block row", row, 0, rows["blocks"] - 1)
    if place.state_row is not None:
        _within(f"{name}: state row", place.state_row, 0, rows["states"] - 1)
    if place.decoding and (tokens == prompt or place.num_cached != tokens - 1):
        raise ValueError(
            f"{name}: decodes with {place.num_cached} of {tokens - 1} tokens cached, {prompt} of"
            " them its prompt"
        )


def _check_pages(pages: list[PageRecord], blocks: int) -> None:
    parents: dict[tuple[int, int], int | str] = {}
    for page in pages:
        _within("prefix page: rank", page.rank, 0, 2**31 - 1)  # counted round the ranks here
        _within("prefix page: row", page.row, 0, blocks - 1)
        if len(page.content) % 8 or not _DIGITS.issuperset(page.content):
            raise ValueError(f"prefix page {page.node}: its content is not hexadecimal token ids")
        if (page.rank, page.node) in parents:
            raise ValueError(f"prefix page {page.node} of rank {page.rank} occurs twice")
        parents[page.rank, page.node] = page.parent
    for (rank, node), parent in parents.items():
        if isinstance(parent, int) and parent >= node:  # nodes are numbered as they are made
            raise ValueError(f"prefix page {node} of rank {rank} comes after its parent {parent}")


def _check_outputs(snapshot: Snapshot) -> None:
    for output in snapshot.record.outputs:
        if not output.outputs or not output.prompt_token_ids:
            raise ValueError(f"output of request {output.request_id!r} holds nothing")
