"""Putting a snapshot into an engine: which rank takes which sequence, which blocks, in which queue.

First everything is planned against counts (`_Plan`), so that what cannot be done is refused before
anything has changed; then blocks are allocated, sequences queued and contents written. Sequences
that shared a full block share it again if they land on one rank. What does not fit into a smaller
pool waits, and is computed again; a role that cannot prefill refuses instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests import Completion
from deepinfer_jax.scheduler import resume
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.snapshot import files, records
from deepinfer_jax.snapshot.check import check
from deepinfer_jax.snapshot.records import PageRecord, Place, SnapshotRecord


def restore(engine: LLMEngine, folder: str | Path, step: int | None = None) -> list[str]:
    """Adds everything a snapshot holds to an engine; ids of its live requests, in order of arrival.
    In a job of several processes each calls it and takes over its share.

    Raises SnapshotError (nothing there, damaged), SnapshotMismatch (another model or layout),
    ValueError (an id is in use, a request does not fit this engine's limits or role). Then nothing
    has changed.
    """
    own = engine.kv_identity()

    def select(record: SnapshotRecord) -> SnapshotRecord:
        record.check_identity(own, f"snapshot {folder}")
        if not engine.boundary.spans_processes:
            return record
        owners = engine.runner.placement.owners
        return records.share_of(record, len(engine.schedulers), owners, jax.process_index())

    loaded = files.load(folder, step, select)
    return engine.boundary.run(lambda: put(engine, loaded))


def put(engine: LLMEngine, loaded: files.Snapshot) -> list[str]:
    """`restore` from memory, under the engine's lock. Raises SnapshotError where the records do not
    hold together."""
    check(loaded, engine.model_config.vocab_size)
    engine.drain()  # forgets what has been aborted
    record = loaded.record
    taken = [r.request_id for r in record.requests if r.request_id in engine.live]
    if taken:
        raise ValueError(f"requests {taken} of the snapshot are already running here")
    requests = [records.load_request(engine, r) for r in record.requests]
    plan = _Plan(engine, record.ranks)
    for request, saved in zip(requests, record.requests, strict=True):
        for c, completion in zip(request.completions, saved.completions, strict=True):
            if completion.place is not None:
                plan.add(c, completion.place)
    plan.place()
    fresh = not engine.live.requests
    _place_experts(engine, record)
    plan.commit()
    plan.commit_prefix(record.prefix)
    plan.write(loaded.arrays)
    for request in requests:
        engine.adopt_request(request)
    engine.boundary.undelivered += record.outputs
    if fresh and jax.process_index() == 0:  # others would draw the same
        engine.seeds.state = record.seeds
    return [r.request_id for r in requests]


def _place_experts(engine: LLMEngine, record: SnapshotRecord) -> None:
    """An engine that moves experts, and has not yet, takes the snapshot's placement over."""
    own, saved = engine.experts, record.experts
    if own is None or saved is None or not own.options.moves or own.report.version:
        return
    own.take_over(saved.placement(), "of the snapshot")


@dataclass
class _Item:
    c: Completion
    rows: list[int]
    num_cached: int
    decoding: bool
    state_row: int | None
    source_rank: int
    order: tuple[int, int, int]


@dataclass
class _Rank:
    """What has been planned for, and then done to, one rank."""

    s: Scheduler
    free: int
    sequences: int
    state_room: int
    planned: set[int] = field(default_factory=set)  # rows of full pages that will be here
    blocks: dict[int, int] = field(default_factory=dict)  # row of a full page -> block
    copies: list[tuple[int, int]] = field(default_factory=list)  # (row, block)
    states: list[tuple[int, int]] = field(default_factory=list)

    def new_rows(self, item: _Item) -> int:
        full = item.num_cached // self.s.config.block_size
        return sum(i >= full or row not in self.planned for i, row in enumerate(item.rows))

    def has_room(self, item: _Item) -> bool:
        return self.new_rows(item) <= self.free and self.state_room > 0

    def reserve(self, item: _Item) -> None:
        self.free -= self.new_rows(item)
        self.planned.update(item.rows[: item.num_cached // self.s.config.block_size])
        self.state_room -= bool(item.rows)
        self.sequences += 1

    def take(self, item: _Item) -> np.ndarray:
        """Blocks for an item's rows, full pages shared with whoever has them on this rank."""
        full, out = item.num_cached // self.s.config.block_size, []
        for i, row in enumerate(item.rows):
            if i < full and row in self.blocks:
                block = self.blocks[row]
                self.s.blocks.pin(np.array([block], np.int32))
            else:
                block = int(self.s.blocks.allocate(1)[0])
                self.copies.append((row, block))
                if i < full:
                    self.blocks[row] = block
            out.append(block)
        return np.array(out, np.int32)


class _Plan:
    def __init__(self, engine: LLMEngine, source_ranks: int) -> None:
        self.engine, self.source_ranks = engine, source_ranks
        self.items: list[_Item] = []
        self.waiting: list[tuple[_Item, int]] = []  # without KV, by rank
        self.ready: list[tuple[_Item, int]] = []  # with their KV
        self.ranks = [
            _Rank(
                s, s.blocks.num_free, s.num_waiting + s.num_prompted + s.num_running, _state_room(s)
            )
            for s in engine.schedulers
        ]

    def add(self, c: Completion, place: Place) -> None:
        item = _Item(
            c,
            place.rows,
            place.num_cached,
            place.decoding,
            place.state_row,
            place.rank,
            (*place.order, len(self.items)),
        )
        self._fit_role(item)
        self.items.append(item)

    def _fit_role(self, item: _Item) -> None:
        """Makes the item something this role can go on with. Raises ValueError naming
        the request."""
        policy, name = self.engine.policy, self.engine.config.role.name
        c, request_id = item.c, item.c.request.request_id
        if not policy.does_prefill and not item.decoding:
            raise ValueError(
                f"request {request_id!r} is not prefilled: a {name} engine cannot go on with it"
            )
        if policy.does_decode:
            return
        if c.seq.num_output_tokens > 1 or (item.state_row is not None and item.decoding):
            count = c.seq.num_output_tokens
            raise ValueError(
                f"request {request_id!r} decodes already ({count} tokens): a {name} engine cannot"
                " go on with it"
            )
        if item.decoding:
            records.rewind_prefill(self.engine, c)
            item.decoding, item.num_cached = False, c.seq.prompt_len - 1
            item.rows = item.rows[: self.ranks[0].s.config.pages(item.num_cached)]

    # ---- planning --------------------------------------------------------------------------------

    def place(self) -> None:
        """Chooses ranks. Raises ValueError if a role that cannot prefill has no room for a decoding
        sequence."""
        for item in sorted(self.items, key=lambda item: item.order):
            rank = self._rank_for(item)
            if self.ranks[rank].has_room(item):
                self.ranks[rank].reserve(item)
                self.ready.append((item, rank))
                continue
            if not self.engine.policy.does_prefill:
                raise ValueError(
                    f"request {item.c.request.request_id!r}: its {len(item.rows)} blocks do not"
                    f" fit, {self.ranks[rank].free} are free, and a {self.engine.config.role.name}"
                    " engine cannot compute them again"
                )
            item.rows, item.num_cached, item.decoding, item.state_row = [], 0, False, None
            if item.c.request.prompt_logprobs is not None and not item.c.seq.num_output_tokens:
                item.c.request.prompt_logprobs = [
                    None
                ]  # they will be computed again with the prompt
            self.ranks[rank].sequences += 1
            self.waiting.append((item, rank))

    def _rank_for(self, item: _Item) -> int:
        """Its old neighbours' rank where ranks became fewer (they may share blocks), else the least
        loaded one that has room."""
        own = item.source_rank % len(self.ranks)
        merged = self.source_ranks >= len(self.ranks)
        if merged and self.ranks[own].has_room(item):
            return own
        loads = [(not r.has_room(item), r.sequences, -r.free, i) for i, r in enumerate(self.ranks)]
        return min(loads)[-1]

    # ---- doing -----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Queues every sequence. In `waiting` those that hold blocks come first: nobody may wait
        for them who stands before them."""
        started = [x for x in self.ready if x[0].rows]
        fresh = [x for x in self.ready if not x[0].rows]
        for item, rank in (*started, *sorted(self.waiting + fresh, key=lambda x: x[0].order)):
            item.c.rank = rank
            self._queue(item, self.ranks[rank])

    def _queue(self, item: _Item, rank: _Rank) -> None:
        seq = item.c.seq
        seq.load_prefix((), item.num_cached)
        blocks = rank.take(item)
        if item.decoding:
            resume.resume_decoding(rank.s, seq, blocks)
        else:
            resume.resume_waiting(rank.s, seq, blocks)
        if item.state_row is not None:
            rank.states.append((item.state_row, seq.state_id))

    def commit_prefix(self, pages: list[PageRecord]) -> None:
        """Makes what the prefix cache knew findable again, the most recently used pages first,
        while blocks last."""
        for rank, r in enumerate(self.ranks):
            if r.s.prefix.enabled:
                mine = [p for p in pages if p.rank % len(self.ranks) == rank]
                for source in {p.rank for p in mine}:
                    self._restore_pages(r, [p for p in mine if p.rank == source])

    def _restore_pages(self, r: _Rank, pages: list[PageRecord]) -> None:
        by_node = {p.node: p for p in pages}
        nodes: dict[int, int] = {}  # node there -> node here
        inserted: dict[int, int] = {}  # row -> block, pinned until all are in
        for page in reversed(pages):
            for p in reversed(_unknown_chain(page, by_node, nodes)):
                here = nodes.get(p.parent) if isinstance(p.parent, int) else p.parent
                if here is None:
                    break  # the page before was evicted there: nobody could find this one
                found = self._insert_page(r, p.row, here, bytes.fromhex(p.content), inserted)
                if found is None:
                    break
                nodes[p.node] = found
        for page in pages:  # least recently used first: the order in which they may go again
            block = inserted.pop(page.row, None)
            if block is not None:
                r.s.blocks.unpin(np.array([block], np.int32))

    def _insert_page(
        self, r: _Rank, row: int, parent: int | str, content: bytes, inserted: dict[int, int]
    ) -> int | None:
        blocks = r.s.blocks
        known = blocks.lookup(parent, content)
        if known is not None:
            return known[1]
        if row in r.blocks:
            return blocks.register(r.blocks[row], parent, content)
        if not blocks.num_free:
            return None
        block = int(blocks.allocate(1)[0])
        node = blocks.register(block, parent, content)
        if node is None:
            blocks.unpin(np.array([block], np.int32))
            return None
        inserted[row] = block
        r.copies.append((row, block))
        return node

    def write(self, arrays: dict[str, dict[str, np.ndarray]]) -> None:
        """Enqueues copying the contents into the pools."""
        mover, items = self.engine.ensure_mover(), []
        for rank, r in enumerate(self.ranks):
            for kind, copies in (("blocks", r.copies), ("states", r.states)):
                if not copies:
                    continue
                rows, ids = (list(x) for x in zip(*copies, strict=True))
                at = 0
                for payload in mover.from_host(
                    {n: a[rows] for n, a in arrays[kind].items()}, rank, kind
                ):
                    items.append((payload, ids[at : at + payload.count]))
                    at += payload.count
        mover.scatter(items)


def _unknown_chain(
    page: PageRecord, by_node: dict[int, PageRecord], known: dict[int, int]
) -> list[PageRecord]:
    """A page and those before it, the nearest first, up to one whose node is known."""
    chain: list[PageRecord] = []
    at: PageRecord | None = page
    while at is not None and at.node not in known:
        chain.append(at)
        at = by_node.get(at.parent) if isinstance(at.parent, int) else None
    return chain


def _state_room(s: Scheduler) -> int:
    return s.states.num_free if s.states.enabled else 1 << 30
