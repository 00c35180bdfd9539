"""The completion engine: takes requests over and decodes them. Who owns one is decided in
receiver.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_jax.disagg.engines import HandoverEngine
from deepinfer_jax.disagg.messages import PayloadKind, Segment
from deepinfer_jax.disagg.protocol import HandoffConfig, Refused
from deepinfer_jax.disagg.receiver import Receiver
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.kv.payload import Payload
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, attempt_named
from deepinfer_jax.scheduler.sequence import Sequence as SchedulerSequence


class CompletionEngine(HandoverEngine):
    """Takes requests over: reserves first, writes what arrives, decodes once everything is there.
    Never prefills.

    Its requests are named by hand-over ids. reserve_fraction: share of max_tokens that must be free
    before a request is taken; 1.0 admits only what can finish, less may stop one
    ("insufficient_system_resource") when the pool runs out.
    """

    def start_hand_over(
        self, name: str, config: HandoffConfig | None = None, reserve_fraction: float = 1.0
    ) -> None:
        if not 0 <= reserve_fraction <= 1:
            raise ValueError(f"reserve_fraction must lie in [0, 1], got {reserve_fraction}")
        self.name, self.reserve_fraction = name, reserve_fraction
        self.hand_overs = self.receiver = Receiver(self, name, config)
        self._reserved: dict[HandoffId, Completion] = {}

    def cancel_attempt(self, attempt: AttemptId, reason: str) -> None:
        """Reservations and decoding requests of all its hand-overs."""
        with self.lock:
            self.receiver.drop(attempt, reason)
            running = [i for i in self.live.requests if attempt_named(i) == attempt]
            self.abort_request(running)

    def cancel_all(self, reason: str) -> None:
        with self.lock:
            self.receiver.drop_all(reason)
            super().cancel_all(reason)

    # ---- TargetPort ------------------------------------------------------------------------------

    def reserve(self, handoff: HandoffId, request: RequestState, pages: int, states: int) -> int:
        """Raises Refused."""
        needed = self.schedulers[0].config.pages(len(request.prompt_token_ids))
        if (pages, states) != (needed, int("states" in self.ensure_mover().kinds)):
            raise ValueError(
                f"hand-over {handoff}: {pages} pages and {states} states, not {needed}"
            )
        name = str(handoff)
        try:
            params = SamplingParams.from_dict(request.params)
            self.admission.check(name, params, self.live)
            for rank in self._ranks_by_load():
                held = Request(name, None, request.prompt_token_ids, params)
                c = self.admission.new_completion(held, params, request.seed, rank)
                held.completions.append(c)
                if self.schedulers[rank].reserve(c.seq, self._tokens_to_reserve(c.seq, rank)):
                    self._reserved[handoff] = c
                    return rank
        except ValueError as error:
            raise Refused(str(error), retry=False) from error
        free = max(s.blocks.num_free for s in self.schedulers)
        raise Refused(
            f"no rank has a free slot and room for {len(request.prompt_token_ids)} tokens (free"
            f" blocks: {free})",
            retry=True,
        )

    def _ranks_by_load(self) -> list[int]:
        loads = [
            (s.config.max_num_seqs - s.slots.num_free, s.cache_usage, r)
            for r, s in enumerate(self.schedulers)
        ]
        return [r for *_, r in sorted(loads)]

    def _tokens_to_reserve(self, seq: SchedulerSequence, rank: int) -> int:
        most = self.schedulers[rank].max_len_of(seq)
        return max(
            seq.prompt_len + 1,
            seq.prompt_len + int(np.ceil((most - seq.prompt_len) * self.reserve_fraction)),
        )

    def write(self, kind: PayloadKind, payload: Payload, segments: Sequence[Segment]) -> None:
        ids = np.full(payload.count, -1, np.int32)
        for s in segments:
            seq = self._reserved[s.handoff].seq
            ids[s.row : s.row + s.count] = (
                seq.block_ids[s.first : s.first + s.count] if kind == "blocks" else seq.state_id
            )
        self.ensure_mover().scatter([(payload, ids.tolist())])

    def enqueue(self, handoff: HandoffId, state: RequestState) -> bool:
        c = self._reserved[handoff]
        if state.prompt_token_ids != c.request.prompt_token_ids or not state.output_token_ids:
            raise ValueError(f"hand-over {handoff}: another prompt, or no first token")
        del self._reserved[handoff]
        scheduler = self.schedulers[c.rank]
        if not scheduler.enqueue_prompted(c.seq, state.output_token_ids):
            scheduler.cancel_reservation(c.seq)
            return False
        state.load_into(c, self.tokenizer)
        self.live.add(c.request)
        return True

    def release(self, handoff: HandoffId) -> None:
        c = self._reserved.pop(handoff)
        self.schedulers[c.rank].cancel_reservation(c.seq)

    def abort(self, handoff: HandoffId) -> None:
        self.abort_request(str(handoff))
