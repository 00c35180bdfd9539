"""Ways into and out of a scheduler besides the waiting queue: hand-over reservations, hand-over of
prefilled sequences, forks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from deepinfer_jax.scheduler import lifecycle
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.scheduler.state import SchedulerState

# ---- receiving side of a hand-over


def reserve(s: SchedulerState, seq: Sequence, num_tokens: int) -> bool:
    """Holds a slot, a state row and blocks for num_tokens tokens, queueing nothing; False if
    that is not possible now.

    The KV may then be written to `seq.block_ids`. Raises ValueError when it could never fit, or
    when already reserved.
    """
    if not s.policy.does_decode:
        raise ValueError(
            f"request {seq.request_id!r}: a {s.config.role.name} engine does not decode,"
            " nothing can be handed to it"
        )
    registered = s.registered.get(seq.request_id)
    if registered is not None and registered is not seq:
        raise ValueError(
            f"request {seq.request_id!r}: this id is already in use ({registered.status.name})"
        )
    if seq.num_blocks or seq.status is not SequenceStatus.WAITING or seq in s.waiting:
        raise ValueError(
            f"request {seq.request_id!r}: cannot reserve for a sequence in status"
            f" {seq.status.name}, {seq.num_blocks} blocks"
        )
    pages = s.config.pages(num_tokens)
    if not seq.num_tokens <= num_tokens <= s.config.max_model_len + 1:
        raise ValueError(
            f"request {seq.request_id!r}: a reservation must cover its {seq.num_tokens} tokens"
            f" and at most max_model_len + 1 = {s.config.max_model_len + 1}, got"
            f" {num_tokens}"
        )
    if pages > s.config.num_blocks:
        raise ValueError(
            f"request {seq.request_id!r}: {num_tokens} tokens need {pages} blocks, the pool has"
            f" {s.config.num_blocks}"
        )
    if not s.slots.num_free or pages > s.blocks.num_free or not s.states.has_room:
        return False
    if registered is None:
        lifecycle.register(s, seq)
    seq.own_blocks = s.blocks.allocate(pages)
    seq.state_id = s.states.allocate()
    lifecycle.bind(s, seq)
    seq.status = SequenceStatus.RESERVED
    s.reserved[seq.request_id] = seq
    return True


def enqueue_prompted(
    s: SchedulerState,
    seq: Sequence,
    output_token_ids: Iterable[int] = (),
    num_cached: int | None = None,
) -> bool:
    """The KV of a reserved sequence has arrived: it decodes from now on. output_token_ids: what
    the prefill side sampled (unless load_prefix() was called). False if it was aborted
    meanwhile: cancel_reservation() is then due.

    Raises ValueError for partial KV: there must be KV for all tokens but the last.
    """
    if s.reserved.get(seq.request_id) is not seq:
        raise ValueError(f"request {seq.request_id!r}: no reservation")
    if seq.is_finished:
        return False
    output_token_ids = list(output_token_ids)
    if output_token_ids or num_cached is not None:
        seq.load_prefix(output_token_ids, num_cached)
    if not seq.num_output_tokens or seq.num_cached != seq.num_tokens - 1:
        raise ValueError(
            f"request {seq.request_id!r}: partial KV: {seq.num_cached} of {seq.num_tokens - 1}"
            f" tokens, {seq.num_output_tokens} outputs"
        )
    if s.config.pages(seq.num_cached) > seq.num_blocks:
        raise ValueError(
            f"request {seq.request_id!r}: {seq.num_cached} tokens of KV do not fit the"
            f" {seq.num_blocks} reserved blocks"
        )
    del s.reserved[seq.request_id]
    seq.decoding = True
    seq.status = SequenceStatus.PROMPTED
    s.prompted.append(seq)
    if seq.num_tokens >= s.max_len_of(seq):
        lifecycle.finish(s, seq, SequenceStatus.FINISHED_LENGTH)
    return True


def cancel_reservation(s: SchedulerState, seq: Sequence) -> bool:
    """Gives a reservation back (refused, failed, aborted, timed out). Idempotent: False if
    there is none."""
    if s.reserved.get(seq.request_id) is not seq:
        return False
    del s.reserved[seq.request_id]
    if not seq.is_finished:
        lifecycle.set_finished(s, seq, SequenceStatus.FINISHED_ABORTED)
    lifecycle.release(s, seq)
    return True


# ---- sending side


def detach(s: SchedulerState, seq: Sequence) -> None:
    """Hands a prefilled sequence over: it leaves queues and slot, its blocks and state row stay
    pinned until release_detached(). Raises ValueError unless its prefill has been processed and
    nothing is in flight."""
    if s.registered.get(seq.request_id) is not seq or seq.request_id in s.detached:
        raise ValueError(f"request {seq.request_id!r}: not in this scheduler, or detached already")
    if (
        seq.slot < 0
        or seq.status in (SequenceStatus.PROMPTED, SequenceStatus.RESERVED)
        or seq.num_in_flight
    ):
        raise ValueError(
            f"request {seq.request_id!r}: cannot detach in status {seq.status.name},"
            f" {seq.num_in_flight} steps in flight"
        )
    if not seq.is_finished:
        seq.status = SequenceStatus.DETACHED
    elif seq in s.ended:
        s.ended.remove(seq)
    s.slots.unbind(seq, keep_blocks=True)
    s.detached[seq.request_id] = seq


def release_detached(s: SchedulerState, seq: Sequence) -> bool:
    """The hand-over is acknowledged or has failed: its blocks may be reused. Idempotent: False
    if there is nothing to do."""
    if s.detached.get(seq.request_id) is not seq:
        return False
    del s.detached[seq.request_id]
    if not seq.is_finished:
        s.order.ended(seq)
    lifecycle.release(s, seq)
    return True


# ---- forks


def fork_seq(
    s: SchedulerState,
    source: Sequence,
    request_id: str | int,
    *,
    blocks: Iterable[int] | None = None,
    num_tokens: int | None = None,
    replace_last_token_id: int | None = None,
    prompt_logprobs: bool = False,
    **overrides: Any,
) -> Sequence:
    """A new sequence on top of the computed prefix of `source`: shares its blocks, copies the
    half-written last one.

    blocks: explicit block ids instead of the source's. num_tokens: keep only the first tokens.
    overrides: arguments of Sequence (max_tokens, ...), default the source's. All but the last
    token computed: it decodes next (`prompted`); otherwise it goes to the front of `waiting`.
    Raises ValueError when there is no computed prefix, no block table, a request for prompt
    log-probabilities, a role without the queue it needs, or per-sequence state that has moved
    past the fork's prefix.
    """
    fork = _fork_of(source, request_id, num_tokens, replace_last_token_id, overrides)
    cached = min(source.num_cached, fork.num_tokens - 1)
    table = np.asarray(source.block_ids if blocks is None else list(blocks), np.int32)[
        : s.config.pages(cached)
    ]
    _check_fork(s, source, fork, cached, table, prompt_logprobs)
    complete = cached == fork.num_tokens - 1
    if not (s.policy.does_decode if complete else s.policy.does_prefill):
        raise ValueError(
            f"request {request_id!r}: a {s.config.role.name} engine cannot serve a"
            f" {'' if complete else 'in'}complete fork"
        )
    if not s.states.has_room:
        raise ValueError(
            f"request {request_id!r}: no free state slot for a fork,"
            f" {s.states.num_slots - 1} are held"
        )
    _check_state_is_here(s, source, fork, cached)
    lifecycle.register(s, fork)
    fork.enqueue_time = s.clock()
    s.blocks.pin(table)
    fork.own_blocks = table.copy()
    fork.num_prefilled = fork.num_scheduled = cached
    fork.shares_last_block = cached % s.config.block_size != 0
    _share_known_prefix(s, source, fork, own_blocks=blocks is not None)
    if source.state_id >= 0:
        # Copied by the next step already, not when the fork is admitted: the source's ring
        # moves on meanwhile.
        fork.state_id = s.states.allocate()
        s.new_clone_states.append((source.state_id, fork.state_id))
    s.order.arrived(fork)
    if complete:
        fork.decoding = True
        fork.status = SequenceStatus.PROMPTED
        s.prompted.append(fork)
    else:
        s.waiting.appendleft(fork)
    if fork.num_tokens >= s.max_len_of(fork):
        lifecycle.finish(s, fork, SequenceStatus.FINISHED_LENGTH)
    return fork


def _check_fork(
    s: SchedulerState,
    source: Sequence,
    fork: Sequence,
    cached: int,
    table: np.ndarray,
    prompt_logprobs: bool,
) -> None:
    name = f"request {fork.request_id!r}"
    if prompt_logprobs:
        raise ValueError(
            f"{name}: forking a computed prefix does not support prompt log-probabilities"
        )
    if cached < 1:
        raise ValueError(
            f"{name}: cannot fork {source.request_id!r}: it has no computed prefix"
            f" (num_cached={source.num_cached})"
        )
    if s.config.pages(cached) > table.size:
        raise ValueError(
            f"{name}: {cached} computed tokens need {s.config.pages(cached)} blocks, the"
            f" block table has {table.size}"
        )
    if (
        table.min() < 0
        or table.max() >= s.config.num_blocks
        or len(set(table.tolist())) != table.size
    ):
        raise ValueError(
            f"{name}: block ids must be distinct and in [0, {s.config.num_blocks}), got"
            f" {table.tolist()}"
        )
    if (s.blocks.ref_counts[table] < 1).any():
        raise ValueError(
            f"{name}: blocks {table[s.blocks.ref_counts[table] < 1].tolist()} are held by"
            " nobody: their content is not safe"
        )


def _check_state_is_here(s: SchedulerState, source: Sequence, fork: Sequence, cached: int) -> None:
    """State, unlike KV, exists at one position only. An ended source may have moved on by a
    step scheduled ahead."""
    if not s.states.enabled:
        return
    ran_ahead = source.is_finished and s.config.zos
    if source.num_in_flight or cached != source.num_cached or source.state_id < 0 or ran_ahead:
        raise ValueError(
            f"request {fork.request_id!r}: the state of {source.request_id!r}"
            f" ({source.status.name}) stands at token {source.num_cached} with"
            f" {source.num_in_flight} steps in flight, a fork at token {cached} needs it"
            " exactly there"
        )


def _share_known_prefix(
    s: SchedulerState, source: Sequence, fork: Sequence, own_blocks: bool
) -> None:
    """The fork continues the source's chain of cached pages only where both have the same,
    fully computed pages."""
    whole = fork.num_prefilled // s.config.block_size
    if own_blocks or source.cache_salt != fork.cache_salt or source.cached_pages != whole:
        fork.cached_pages = -1 if whole else 0
    else:
        fork.cached_pages, fork.cache_parent = source.cached_pages, source.cache_parent


def _fork_of(
    source: Sequence,
    request_id: str | int,
    num_tokens: int | None,
    replace_last: int | None,
    overrides: dict[str, Any],
) -> Sequence:
    keep = source.num_tokens if num_tokens is None else num_tokens
    if not 1 <= keep <= source.num_tokens:
        raise ValueError(
            f"request {request_id!r}: num_tokens must lie in [1, {source.num_tokens}], got"
            f" {num_tokens}"
        )
    image = source.image_around(keep)
    if image is not None:
        raise ValueError(
            f"request {request_id!r}: num_tokens={keep} would cut the image [{image.start},"
            f" {image.end})"
        )
    tokens = source.token_ids[:keep].copy()
    if replace_last is not None:
        tokens[-1] = replace_last
    prompt_len = min(source.prompt_len, keep)
    inherited = (
        "max_tokens",
        "min_tokens",
        "eos_token_ids",
        "stop_token_ids",
        "ignore_eos",
        "priority",
        "user_id",
        "cache_salt",
    )
    arguments = {
        name: getattr(source, name)
        for name in (*inherited, "skip_prefix_cache", "chunk_checkpoints")
    }
    arguments["image_spans"] = tuple(span for span in source.image_spans if span.end <= prompt_len)
    fork = Sequence(request_id, tokens[:prompt_len], **(arguments | overrides))
    fork.append_tokens(tokens[prompt_len:])
    return fork
