"""The prompt engine: `LLMEngine` with its hooks filled in, so that it prefills and hands over.

Who gets a request is decided by a `Placement`; who owns it, in sender.py; bytes are moved by
kv/block_mover.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from deepinfer_jax.disagg.engines import HandoverEngine
from deepinfer_jax.disagg.messages import Link, Message, Pages, PayloadKind, Segment
from deepinfer_jax.disagg.protocol import HandoffConfig, Placement
from deepinfer_jax.disagg.sender import PageRange, Sender
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, attempt_named
from deepinfer_jax.scheduler.sequence import Sequence as SchedulerSequence
from deepinfer_jax.scheduler.sequence import SequenceStatus


class PromptEngine(HandoverEngine):
    """Prefills, then hands each request over with its KV. A request that ends with its first token
    is answered here.

    Blocks stay pinned from the first chunk until the completion engine has acknowledged, or the
    hand-over has failed for good. Requests are attempts at single completions: a coordinator fans
    the others out.
    """

    reads_scheduled = True

    def start_hand_over(
        self, name: str, placement: Placement, config: HandoffConfig | None = None
    ) -> None:
        """Before the first request. Links are then added with `sender.connect`."""
        self.name, self.placement = name, placement
        self.hand_overs = self.sender = Sender(self, placement, name, config)
        self._by_attempt: dict[AttemptId, Completion] = {}
        self._chunks: dict[AttemptId, int] = {}  # tokens scheduled in this step
        self._step_start = 0.0
        self._has_states = "states" in self.ensure_mover().kinds

    def add_request(
        self,
        request_id: str | None,
        prompt: Any,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Request:
        """request_id: an attempt's. ValueError for another one, and for n > 1."""
        attempt = AttemptId.parse(request_id or "")
        if params is not None and params.n > 1:
            raise ValueError(
                f"request {request_id!r}: a PROMPT engine hands over single completions, got"
                f" n={params.n}"
            )
        with self.lock:
            request = super().add_request(request_id, prompt, params, **options)
            self._by_attempt[attempt] = request.completions[0]
            return request

    def add_attempt(
        self,
        attempt: AttemptId,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        arrival_time: float,
    ) -> Request:
        with self.lock:
            request = super().add_attempt(attempt, prompt_token_ids, params, seed, arrival_time)
            self._offer_next()
            return request

    def adopt_request(self, request: Request) -> None:
        super().adopt_request(request)
        self._by_attempt[attempt_named(request.request_id)] = request.completions[0]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        with self.lock:
            alive = super().abort_request(request_ids)
            for attempt in map(attempt_named, alive):
                self.sender.cancel(attempt, "aborted")
                self._release_detached(attempt)
            return alive

    # ---- hooks -----------------------------------------------------------------------------------

    def post_schedule(self, outputs: list[SchedulerOutputs]) -> None:
        self._step_start = time.perf_counter()
        self._chunks = {}
        for o in outputs:
            for item in o.prefill:
                attempt = self._attempt_of(self.live.of(item.seq))
                self._chunks[attempt] = item.q_len
                self._offer(attempt)

    def _attempt_of(self, c: Completion) -> AttemptId:
        return attempt_named(c.request.request_id)

    def _offer_next(self) -> None:
        """Asks for room for what the next two steps will hold, so that the answer is there when the
        first chunk is."""
        for scheduler in self.schedulers:
            budget = 2 * scheduler.config.prefill_budget
            for seq in scheduler.waiting:
                c = self.live.find(seq)
                if budget <= 0 or c is None:
                    break
                budget -= seq.num_tokens - seq.num_scheduled
                if not seq.is_finished:
                    self._offer(self._attempt_of(c))

    def _offer(self, attempt: AttemptId) -> None:
        c = self._by_attempt[attempt]
        scheduler = self.schedulers[c.rank]
        if attempt in self.sender.outgoing or scheduler.max_len_of(c.seq) <= c.seq.prompt_len + 1:
            return  # or it ends here, whatever its first token is
        state = RequestState(
            request_id=str(attempt),
            prompt_token_ids=c.request.prompt_token_ids,
            params=c.params.to_dict(),
            seed=c.seed,
        )
        pages = scheduler.config.pages(c.seq.prompt_len)
        self.sender.offer(attempt, state, pages, int(self._has_states))

    def pe_prepare_save_kvcache(
        self, scheduled: list[SchedulerSequence], finished: list[SchedulerSequence]
    ) -> None:
        """Chunks of this step that fill pages start moving while the sampler runs."""
        self.sender.pump()

    def pe_do_save_kvcache(
        self, scheduled: list[SchedulerSequence], finished: list[SchedulerSequence]
    ) -> None:
        """Transfers are acknowledged by the other side, so there is nothing to wait for: books what
        the step computed."""
        seconds = time.perf_counter() - self._step_start
        total = sum(self._chunks.values())
        for attempt, tokens in self._chunks.items():
            self.placement.prefill_progress(attempt, tokens, seconds * tokens / total)

    def send_processed_prompts(self) -> None:
        for c in self.results.take_prefilled():
            attempt = self._attempt_of(c)
            if c.seq.is_finished or c.finished:
                self.sender.cancel(attempt, "ended with its first token")
                continue
            self.schedulers[c.rank].detach(c.seq)
            self.placement.prefilled(attempt)
            self.sender.prefilled(attempt, RequestState.of(c))
        self.drop_finished_prompts()
        self._offer_next()
        self.sender.pump()

    def forget_request(self, request: Request) -> None:
        attempt = attempt_named(request.request_id)
        self.sender.cancel(attempt, "ended on the prompt engine")
        self._by_attempt.pop(attempt, None)
        super().forget_request(request)

    # ---- SourcePort ------------------------------------------------------------------------------

    def ready_pages(self, attempt: AttemptId) -> int:
        seq = self._by_attempt[attempt].seq
        if seq.is_finished:
            return 0
        done, pages = seq.num_scheduled, self.schedulers[0].config.pages(seq.prompt_len)
        ready = pages if done >= seq.prompt_len else done // self.config.block_size
        return min(ready, seq.num_blocks)

    def send_payloads(self, link: Link, kind: PayloadKind, ranges: list[PageRange]) -> None:
        queues: dict[tuple[int, int], list[Row]] = {}
        for r in ranges:
            c = self._by_attempt[r.handoff.attempt]
            ids = [c.seq.state_id]
            if kind == "blocks":
                ids = c.seq.block_ids[r.first : r.first + r.count].tolist()
            queues.setdefault((c.rank, r.rank), []).extend(
                Row(r.handoff, r.first + i, row) for i, row in enumerate(ids)
            )
        self._send_rounds(link, kind, queues)

    def _send_rounds(
        self, link: Link, kind: PayloadKind, queues: dict[tuple[int, int], list[Row]]
    ) -> None:
        """One gather serves all source ranks at once, each with blocks for one rank of the
        target. queues: by (source rank, target rank)."""
        mover = self.ensure_mover()
        while queues:
            firsts = {source: target for source, target in reversed(queues)}
            chosen = {
                source: (target, queues.pop((source, target))) for source, target in firsts.items()
            }
            ids = [
                [row.id for row in chosen[r][1]] if r in chosen else [] for r in range(mover.ranks)
            ]
            sent = [0] * mover.ranks
            for source, payload in mover.gathers(ids, kind, self._cuts.get(link.peer, 1)):
                # each goes at once, still cached
                target, rows = chosen[source]
                segments = runs(rows[sent[source] : sent[source] + payload.count])
                link.send(Message(Pages(kind, segments), payload), target)
                sent[source] += payload.count

    def forget(self, attempt: AttemptId, error: str | None) -> None:
        c = self._by_attempt[attempt]
        if error is not None and c.seq.status is not SequenceStatus.DETACHED:
            self.schedulers[c.rank].finish(c.seq, SequenceStatus.FINISHED_ERROR, "error", error)
        self._release_detached(attempt)
        del self._by_attempt[attempt]
        self.live.forget(c.request)

    def _release_detached(self, attempt: AttemptId) -> None:
        c = self._by_attempt[attempt]
        if self.schedulers[c.rank].release_detached(c.seq):
            self.live.drop_rank(c.seq)


class Row(NamedTuple):
    """One block, or row of state caches, on its way. page: of its sequence. id: in the pool."""

    handoff: HandoffId
    page: int
    id: int


def runs(rows: Sequence[Row]) -> tuple[Segment, ...]:
    """Payload rows -> one segment per run of pages."""
    starts = [
        i
        for i, row in enumerate(rows)
        if i == 0 or rows[i - 1].handoff != row.handoff or rows[i - 1].page + 1 != row.page
    ]
    ends = [*starts[1:], len(rows)]
    return tuple(
        Segment(rows[i].handoff, rows[i].page, end - i, i)
        for i, end in zip(starts, ends, strict=True)
    )
