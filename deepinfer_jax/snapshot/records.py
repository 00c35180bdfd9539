"""What a snapshot holds beside the blocks' bytes: an engine's requests as typed records.

A sequence's place is recorded, not its slot or block ids: whether it decodes or waits, how many of
its tokens have KV, and which rows of the snapshot's block array hold it. Rows may be shared by
sequences, as blocks are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from deepinfer_jax.engine.kv_identity import KVIdentity
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler import resume
from deepinfer_jax.scheduler.sequence import SequenceStatus
from deepinfer_jax.snapshot.copy import Rows

VERSION = 3
"""Of the records below; another one is refused."""


class SnapshotMismatch(ValueError):
    """A snapshot of another model, layout or format; the message names both values."""


class Place(msgspec.Struct, kw_only=True):
    """Where a completion stood that had not ended. rank: of the ranks that were recorded. order:
    `resume.order_key`. rows, state_row: of the snapshot's arrays. max_len: tokens at which it would
    have ended."""

    rank: int = 0
    order: tuple[int, int] = (0, 0)
    decoding: bool = False
    num_cached: int = 0
    rows: list[int] = []
    state_row: int | None = None
    max_len: int = 0


class CompletionRecord(msgspec.Struct, kw_only=True):
    """place: None once it has ended."""

    index: int
    state: RequestState
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    place: Place | None = None


class RequestRecord(msgspec.Struct, kw_only=True):
    request_id: str
    prompt: str | None
    params: dict[str, Any]  # SamplingParams.from_dict
    completions: list[CompletionRecord]

    @property
    def places(self) -> list[Place]:
        """Of every completion that has not ended."""
        return [c.place for c in self.completions if c.place is not None]


class PageRecord(msgspec.Struct, array_like=True):
    """A page that the prefix cache could find (`BlockManager.cached_pages`): its content as
    hexadecimal digits, its block as a row of the snapshot's arrays."""

    rank: int
    row: int
    parent: int | str
    content: str
    node: int


class ExpertsRecord(msgspec.Struct, kw_only=True):
    """`PlacementRecord`; loads [layers][experts] are sums over the steps that were kept."""

    version: int
    ranks: int
    slots: list[list[int]]
    loads: list[list[int]]

    @classmethod
    def of(cls, record: PlacementRecord) -> ExpertsRecord:
        loads = record.loads.sum(1, dtype=np.int64)
        return cls(
            version=record.version,
            ranks=record.ranks,
            slots=record.slots.tolist(),
            loads=np.minimum(loads, np.iinfo(np.int32).max).tolist(),
        )

    def placement(self) -> PlacementRecord:
        """ValueError unless every layer has a slot for every expert."""
        loads = np.array(self.loads, np.int32)[:, None, :]
        record = PlacementRecord(self.version, self.ranks, np.array(self.slots, np.int32), loads)
        record.validate()
        return record


class SnapshotRecord(msgspec.Struct, kw_only=True):
    """outputs: nobody has been given them yet. seeds: `SeedSource.state`. ranks: how many the
    places name. experts: where they were; None for a model whose experts are not counted."""

    identity: KVIdentity
    role: str
    created: float  # seconds of time.time()
    requests: list[RequestRecord]
    outputs: list[RequestOutput]
    prefix: list[PageRecord]
    seeds: dict[str, Any]
    ranks: int
    experts: ExpertsRecord | None = None

    @property
    def places(self) -> Iterator[Place]:
        return (place for request in self.requests for place in request.places)

    def used_rows(self) -> dict[str, np.ndarray]:
        """i64 rows of each kind's arrays that requests and prefixes refer to."""
        blocks = [row for place in self.places for row in place.rows]
        blocks += [page.row for page in self.prefix]
        states = [place.state_row for place in self.places if place.state_row is not None]
        return {"blocks": np.array(blocks, np.int64), "states": np.array(states, np.int64)}

    def check_identity(self, own: KVIdentity, what: str) -> None:
        """Raises SnapshotMismatch naming every difference with both values."""
        problems = own.differences(self.identity)
        if problems:
            raise SnapshotMismatch(f"{what} does not fit this engine: " + "; ".join(problems))


class Base(msgspec.Struct, frozen=True):
    """How many ranks and rows the parts of a snapshot before this one have: its own numbers are
    shifted by them."""

    ranks: int = 0
    blocks: int = 0
    states: int = 0

    def after(self, ranks: int, rows: Mapping[str, int]) -> Base:
        """The next part's, where this one has so many ranks and rows of each kind."""
        return Base(
            self.ranks + ranks,
            self.blocks + rows.get("blocks", 0),
            self.states + rows.get("states", 0),
        )

    def shift(self, place: Place) -> None:
        """Renumbers a place, in place."""
        place.rank += self.ranks
        place.rows = [row + self.blocks for row in place.rows]
        if place.state_row is not None:
            place.state_row += self.states

    def shifted(self, pages: Iterable[PageRecord]) -> list[PageRecord]:
        return [
            msgspec.structs.replace(p, rank=p.rank + self.ranks, row=p.row + self.blocks)
            for p in pages
        ]


def merge(parts: Sequence[SnapshotRecord], rows: Sequence[Mapping[str, int]]) -> SnapshotRecord:
    """What the processes of a job have recorded at the same step, as one record; rows: of each kind
    in each one's arrays."""
    base, requests, outputs, prefix = Base(), [], [], []
    for part, count in zip(parts, rows, strict=True):
        for place in part.places:
            base.shift(place)
        requests += part.requests
        outputs += part.outputs
        prefix += base.shifted(part.prefix)
        base = base.after(part.ranks, count)
    requests.sort(key=_arrival)
    return msgspec.structs.replace(
        parts[0], requests=requests, outputs=outputs, prefix=prefix, ranks=base.ranks
    )


def _arrival(request: RequestRecord) -> float:
    metrics = request.completions[0].state.metrics
    return 0.0 if metrics is None else metrics.arrival_time


def share_of(
    whole: SnapshotRecord, ranks: int, owners: Sequence[int], process: int
) -> SnapshotRecord:
    """The part of a snapshot that one process of a job goes on with, ranks renumbered to its own
    `ranks`.

    owners: the process of each of the job's ranks, a process's ranks following each other. Requests
    go to the rank they came from, counted round; from fewer ranks than there are here, round robin.
    Every process sees the same whole and takes another part of it.
    """
    kept, total, at = [], len(owners), list(owners).index(process)
    spread = whole.ranks < total
    for i, request in enumerate(whole.requests):
        own = request.places
        rank = i if spread or not own else own[0].rank
        if owners[rank % total] == process:
            kept.append(request)
            for place in own:
                place.rank = 0 if spread else (place.rank - at) % total % ranks
    ids = {r.request_id for r in kept}
    all_ids = {r.request_id for r in whole.requests}
    first = owners[0] == process
    return msgspec.structs.replace(
        whole,
        requests=kept,
        outputs=[
            o
            for o in whole.outputs
            if o.request_id in ids or (first and o.request_id not in all_ids)
        ],
        prefix=[
            msgspec.structs.replace(p, rank=(p.rank // total) * ranks + p.rank % total - at)
            for p in whole.prefix
            if owners[p.rank % total] == process
        ],
        ranks=0 if spread else ranks,
    )


# ---- out -----------------------------------------------------------------------------------------


def record_request(
    engine: LLMEngine, request: Request, blocks: Rows, states: Rows
) -> RequestRecord:
    """One request; its blocks and state rows are added to the two lists."""
    return RequestRecord(
        request_id=request.request_id,
        prompt=request.prompt,
        params=request.params.to_dict(),
        completions=[
            CompletionRecord(
                index=c.index,
                state=RequestState.of(c),
                finish_reason=c.finish_reason,
                stop_reason=c.stop_reason,
                place=None if c.finished else _record_place(engine, c, blocks, states),
            )
            for c in request.completions
        ],
    )


def _record_place(engine: LLMEngine, c: Completion, blocks: Rows, states: Rows) -> Place:
    seq, s = c.seq, engine.schedulers[c.rank]
    held = resume.held_blocks(s, seq).tolist()
    full = seq.num_cached // engine.config.block_size
    state_row = None
    if seq.state_id >= 0 and held:
        state_row = states.add(c.rank, seq.state_id, changing=True)
    return Place(
        rank=c.rank,
        order=resume.order_key(s, seq),
        decoding=seq.status in resume.DECODING,
        num_cached=seq.num_cached if held else 0,
        rows=[blocks.add(c.rank, b, changing=i >= full) for i, b in enumerate(held)],
        state_row=state_row,
        max_len=s.max_len_of(seq),
    )


def record_output(output: RequestOutput) -> RequestOutput:
    """A copy of an output nobody has been given yet: its receiver may change it."""
    return copy.deepcopy(output)


# ---- back ----------------------------------------------------------------------------------------


def load_request(engine: LLMEngine, record: RequestRecord) -> Request:
    """The request with its completions; their sequences have all tokens and nothing cached, and
    belong to no scheduler yet.

    Raises ValueError naming the request when it needs more tokens than this engine allows.
    """
    request = Request(
        record.request_id,
        record.prompt,
        record.completions[0].state.prompt_token_ids,
        SamplingParams.from_dict(record.params),
    )
    for completion in record.completions:
        request.completions.append(_load_completion(engine, request, completion))
    return request


def _load_completion(engine: LLMEngine, request: Request, record: CompletionRecord) -> Completion:
    state, params = record.state, SamplingParams.from_dict(record.state.params)
    c = engine.admission.new_completion(request, params, state.seed, index=record.index)
    seq = c.seq
    seq.load_prefix(state.output_token_ids, 0)
    state.load_into(c, engine.tokenizer)
    c.finish_reason, c.stop_reason = record.finish_reason, record.stop_reason
    if record.place is None:
        seq.status = SequenceStatus.FINISHED_STOPPED
        seq.finish_reason, seq.stop_reason = c.finish_reason, c.stop_reason
        return c
    limit, most = record.place.max_len, engine.config.max_model_len
    if limit > max(most, seq.prompt_len + 1):
        raise ValueError(
            f"request {request.request_id!r}: may reach {limit} tokens, this engine's max_model_len"
            f" is {most}"
        )
    # where it would have ended, also if this engine allows more
    seq.max_tokens = limit - seq.prompt_len
    return c


def rewind_prefill(engine: LLMEngine, c: Completion) -> None:
    """Takes a prefilled sequence's first token back, so that a PROMPT engine computes it again
    (draws are keyed by position) and hands the request over as if it had just come."""
    fresh = engine.admission.new_completion(c.request, c.params, c.seed)
    fresh.seq.max_tokens = c.seq.max_tokens
    c.seq, c.detokenizer, c.logprobs = fresh.seq, fresh.detokenizer, fresh.logprobs
    c.cumulative_logprob, c.consumed, c.reported = 0.0, 0, 0
