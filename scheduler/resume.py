"""Taking the state of a scheduler apart and putting it together in another one: what snapshots and
a KV store need.

Nothing here knows where the blocks' contents go: the caller copies them. Between steps only, with
no step in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from deepinfer_jax.scheduler import lifecycle
from deepinfer_jax.scheduler.block_manager import BlockManager
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus

DECODING = (SequenceStatus.PROMPTED, SequenceStatus.RUNNING, SequenceStatus.DETACHED)


def held_blocks(s: Scheduler, seq: Sequence) -> np.ndarray:
    """i32: the blocks that hold the sequence's computed tokens, last one perhaps in part. Raises
    ValueError with steps in flight."""
    if seq.num_in_flight:
        raise ValueError(f"request {seq.request_id!r}: {seq.num_in_flight} steps are in flight")
    return seq.block_ids[: s.config.pages(seq.num_cached)]


def order_key(s: Scheduler, seq: Sequence) -> tuple[int, int]:
    """Sorts sequences as they should be resumed: those that decode by admission, `prompted`, then
    `waiting` in its order."""
    if seq.status is SequenceStatus.RUNNING:
        return 0, int(s.slots.admission[seq.slot])
    queue = s.prompted if seq.status is SequenceStatus.PROMPTED else s.waiting
    position = next((i for i, other in enumerate(queue) if other is seq), len(queue))
    return (1 if seq.status in DECODING else 2), position


def resume_decoding(s: Scheduler, seq: Sequence, blocks: np.ndarray) -> None:
    """Queues a sequence whose tokens but the last have KV in `blocks` i32 [pages] (allocated or
    pinned for it): it decodes next.

    Raises ValueError when the role does not decode, the blocks do not match the tokens, or it would
    end at once.
    """
    if not s.policy.does_decode:
        raise ValueError(
            f"request {seq.request_id!r}: a {s.config.role.name} engine does not decode"
        )
    if seq.num_cached != seq.num_tokens - 1 or blocks.size != s.config.pages(seq.num_cached):
        raise ValueError(
            f"request {seq.request_id!r}: {seq.num_cached} of {seq.num_tokens - 1} tokens cached in"
            f" {blocks.size} blocks"
        )
    if seq.num_tokens >= s.max_len_of(seq):
        raise ValueError(
            f"request {seq.request_id!r}: {seq.num_tokens} tokens reach the limit of"
            f" {s.max_len_of(seq)}"
        )
    _take(s, seq, blocks)
    seq.decoding = True
    seq.status = SequenceStatus.PROMPTED
    s.prompted.append(seq)
    s.prefix.register(seq)


def resume_waiting(s: Scheduler, seq: Sequence, blocks: np.ndarray) -> None:
    """Appends a sequence to `waiting`; `blocks` hold its first num_cached tokens (none: it starts
    from nothing)."""
    if not s.policy.does_prefill:
        raise ValueError(
            f"request {seq.request_id!r}: a {s.config.role.name} engine does not prefill"
        )
    if blocks.size != s.config.pages(seq.num_cached):
        raise ValueError(
            f"request {seq.request_id!r}: {seq.num_cached} tokens cached in {blocks.size} blocks"
        )
    _take(s, seq, blocks)
    s.waiting.append(seq)
    s.prefix.register(seq)


def _take(s: Scheduler, seq: Sequence, blocks: np.ndarray) -> None:
    lifecycle.register(s.state, seq)
    seq.own_blocks = np.array(blocks, np.int32)
    seq.enqueue_time = s.state.clock()
    if blocks.size:
        seq.state_id = s.states.allocate()
    s.order.arrived(seq)


def insert_pages(
    blocks: BlockManager, parent: int | str, contents: Seq[bytes], first: int
) -> list[tuple[int, int]]:
    """Makes consecutive pages findable in blocks that the caller fills before the next step; they
    stay cached, held by nobody.

    contents: from the first page of the sequence on; those before `first` must be known, the others
    may be. Returns [(block, index into contents)] of the pages that were not known. Ends early when
    blocks run out, a page before `first` is not known any more, or a hash is taken.
    """
    new: list[tuple[int, int]] = []
    pinned: list[int] = []  # so that none of the chain is evicted to make room for a later one
    for i, content in enumerate(contents):
        known = blocks.lookup(parent, content)
        if known is not None:
            block, parent = known
            blocks.pin(np.array([block], np.int32))
            pinned.append(block)
            continue
        if i < first or not blocks.num_free:
            break
        block = int(blocks.allocate(1)[0])
        node = blocks.register(block, parent, content)
        pinned.append(block)
        if node is None:
            break
        new.append((block, i))
        parent = node
    blocks.unpin(np.array(pinned, np.int32))
    return new
