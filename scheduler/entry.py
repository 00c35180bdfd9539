"""Ways into and out of a scheduler besides the waiting queue: hand-over reservations, hand-over of
prefilled sequences, forks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus


class EntryMixin:
    """Part of Scheduler; its state is declared there."""

    # ---- receiving side of a hand-over

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Holds a slot, a state row and blocks for num_tokens tokens, queueing nothing; False if
        that is not possible now.

        The KV may then be written to `seq.block_ids`. Raises ValueError when it could never fit, or
        when already reserved.
        """
        if not self.policy.does_decode:
            raise ValueError(
                f"request {seq.request_id!r}: a {self.config.role.name} engine does not decode,"
                " nothing can be handed to it"
            )
        registered = self._seqs.get(seq.request_id)
        if registered is not None and registered is not seq:
            raise ValueError(
                f"request {seq.request_id!r}: this id is already in use ({registered.status.name})"
            )
        if seq.num_blocks or seq.status is not SequenceStatus.WAITING or seq in self.waiting:
            raise ValueError(
                f"request {seq.request_id!r}: cannot reserve for a sequence in status"
                f" {seq.status.name}, {seq.num_blocks} blocks"
            )
        pages = self.config.pages(num_tokens)
        if not seq.num_tokens <= num_tokens <= self.config.max_model_len + 1:
            raise ValueError(
                f"request {seq.request_id!r}: a reservation must cover its {seq.num_tokens} tokens"
                f" and at most max_model_len + 1 = {self.config.max_model_len + 1}, got"
                f" {num_tokens}"
            )
        if pages > self.config.num_blocks:
            raise ValueError(
                f"request {seq.request_id!r}: {num_tokens} tokens need {pages} blocks, the pool has"
                f" {self.config.num_blocks}"
            )
        if not self.slots.num_free or pages > self.blocks.num_free or not self.states.has_room:
            return False
        if registered is None:
            self.register(seq)
        seq._blocks = self.blocks.allocate(pages)
        seq.state_id = self.states.allocate()
        self.bind(seq)
        seq.status = SequenceStatus.RESERVED
        self._reserved[seq.request_id] = seq
        return True

    def enqueue_prompted(
        self, seq: Sequence, output_token_ids: Iterable[int] = (), num_cached: int | None = None
    ) -> bool:
        """The KV of a reserved sequence has arrived: it decodes from now on. output_token_ids: what
        the prefill side sampled (unless load_prefix() was called). False if it was aborted
        meanwhile: cancel_reservation() is then due.

        Raises ValueError for partial KV: there must be KV for all tokens but the last.
        """
        if self._reserved.get(seq.request_id) is not seq:
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
        if self.config.pages(seq.num_cached) > seq.num_blocks:
            raise ValueError(
                f"request {seq.request_id!r}: {seq.num_cached} tokens of KV do not fit the"
                f" {seq.num_blocks} reserved blocks"
            )
        del self._reserved[seq.request_id]
        seq._decoding = True
        seq.status = SequenceStatus.PROMPTED
        self.prompted.append(seq)
        if seq.num_tokens >= self.max_len_of(seq):
            self.finish(seq, SequenceStatus.FINISHED_LENGTH)
        return True

    def cancel_reservation(self, seq: Sequence) -> bool:
        """Gives a reservation back (refused, failed, aborted, timed out). Idempotent: False if
        there is none."""
        if self._reserved.get(seq.request_id) is not seq:
            return False
        del self._reserved[seq.request_id]
        if not seq.is_finished:
            self.set_finished(seq, SequenceStatus.FINISHED_ABORTED)
        self.release(seq)
        return True

    # ---- sending side

    def detach(self, seq: Sequence) -> None:
        """Hands a prefilled sequence over: it leaves queues and slot, its blocks and state row stay
        pinned until release_detached(). Raises ValueError unless its prefill has been processed and
        nothing is in flight."""
        if self._seqs.get(seq.request_id) is not seq or seq.request_id in self._detached:
            raise ValueError(
                f"request {seq.request_id!r}: not in this scheduler, or detached already"
            )
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
        elif seq in self.ended:
            self.ended.remove(seq)
        self.slots.unbind(seq, keep_blocks=True)
        self._detached[seq.request_id] = seq

    def release_detached(self, seq: Sequence) -> bool:
        """The hand-over is acknowledged or has failed: its blocks may be reused. Idempotent: False
        if there is nothing to do."""
        if self._detached.get(seq.request_id) is not seq:
            return False
        del self._detached[seq.request_id]
        if not seq.is_finished:
            self.order.ended(seq)
        self.release(seq)
        return True

    # ---- forks

    def fork_seq(
        self,
        source: Sequence,
        request_id: str | int,
        *,
        blocks: Iterable[int] | None = None,
        num_tokens: int | None = None,
        replace_last_token_id: int | None = None,
        prompt_logprobs: bool = False,
        **overrides,
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
            : self.config.pages(cached)
        ]
        self._check_fork(source, fork, cached, table, prompt_logprobs)
        complete = cached == fork.num_tokens - 1
        if not (self.policy.does_decode if complete else self.policy.does_prefill):
            raise ValueError(
                f"request {request_id!r}: a {self.config.role.name} engine cannot serve a"
                f" {'' if complete else 'in'}complete fork"
            )
        if not self.states.has_room:
            raise ValueError(
                f"request {request_id!r}: no free state slot for a fork,"
                f" {self.states.num_slots - 1} are held"
            )
        self._check_state_is_here(source, fork, cached)
        self.register(fork)
        fork._enqueue_time = self.clock()
        self.blocks.pin(table)
        fork._blocks = table.copy()
        fork._num_cached = fork._num_scheduled = cached
        fork._shares_last_block = cached % self.config.block_size != 0
        self._share_known_prefix(source, fork, own_blocks=blocks is not None)
        if source.state_id >= 0:
            # Copied by the next step already, not when the fork is admitted: the source's ring
            # moves on meanwhile.
            fork.state_id = self.states.allocate()
            self._new_clone_states.append((source.state_id, fork.state_id))
        self.order.arrived(fork)
        if complete:
            fork._decoding = True
            fork.status = SequenceStatus.PROMPTED
            self.prompted.append(fork)
        else:
            self.waiting.appendleft(fork)
        if fork.num_tokens >= self.max_len_of(fork):
            self.finish(fork, SequenceStatus.FINISHED_LENGTH)
        return fork

    def _check_fork(
        self,
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
        if self.config.pages(cached) > table.size:
            raise ValueError(
                f"{name}: {cached} computed tokens need {self.config.pages(cached)} blocks, the"
                f" block table has {table.size}"
            )
        if (
            table.min() < 0
            or table.max() >= self.config.num_blocks
            or len(set(table.tolist())) != table.size
        ):
            raise ValueError(
                f"{name}: block ids must be distinct and in [0, {self.config.num_blocks}), got"
                f" {table.tolist()}"
            )
        if (self.blocks.ref_counts[table] < 1).any():
            raise ValueError(
                f"{name}: blocks {table[self.blocks.ref_counts[table] < 1].tolist()} are held by"
                " nobody: their content is not safe"
            )

    def _check_state_is_here(self, source: Sequence, fork: Sequence, cached: int) -> None:
        """State, unlike KV, exists at one position only. An ended source may have moved on by a
        step scheduled ahead."""
        if not self.states.enabled:
            return
        ran_ahead = source.is_finished and self.config.zos
        if source.num_in_flight or cached != source.num_cached or source.state_id < 0 or ran_ahead:
            raise ValueError(
                f"request {fork.request_id!r}: the state of {source.request_id!r}"
                f" ({source.status.name}) stands at token {source.num_cached} with"
                f" {source.num_in_flight} steps in flight, a fork at token {cached} needs it"
                " exactly there"
            )

    def _share_known_prefix(self, source: Sequence, fork: Sequence, own_blocks: bool) -> None:
        """The fork continues the source's chain of cached pages only where both have the same,
        fully computed pages."""
        whole = fork._num_cached // self.config.block_size
        if own_blocks or source.cache_salt != fork.cache_salt or source._cached_pages != whole:
            fork._cached_pages = -1 if whole else 0
        else:
            fork._cached_pages, fork._cache_parent = source._cached_pages, source._cache_parent


def _fork_of(
    source: Sequence,
    request_id: str | int,
    num_tokens: int | None,
    replace_last: int | None,
    overrides: dict,
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
    fork._append(tokens[prompt_len:])
    return fork
