"""The two engines of prefill/decode disaggregation: `LLMEngine` with its hooks filled in.

`PromptEngine` prefills and hands over; `CompletionEngine` takes over and decodes. Who goes where is
decided outside (a `PromptCoordinator`, in one process disaggregate.py); who owns what in
handoff_source.py and handoff_target.py; bytes are in kv_transfer.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.disagg.protocol import (
    HandoffConfig,
    Link,
    Message,
    Refused,
    make_layout,
)
from deepinfer_jax.disagg.receiver import Receiver
from deepinfer_jax.disagg.sender import Sender
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.kv.block_mover import BUCKETS, BlockMover, Payload
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus


class PromptCoordinator(Protocol):
    """Whom a PromptEngine asks and tells; key: the request's id in that engine. Called from the
    engine's thread."""

    def choose_target(self, key: str, exclude: set[str]) -> str | None: ...

    def unchoose_target(self, key: str, target: str) -> None: ...

    def prefill_progress(self, key: str, tokens: int, seconds: float) -> None: ...

    def prefilled(self, key: str) -> None: ...

    def handed_over(self, key: str, target: str) -> None: ...

    def hand_over_failed(self, key: str, reason: str, retry: bool) -> None: ...


class _HandoverEngine(LLMEngine):
    """What both sides have: a BlockMover, a layout, a name that is unique in the deployment."""

    transfer_buckets = BUCKETS

    def init_pd_split(self) -> None:
        self.mover = BlockMover(self.runner, self.transfer_buckets)
        self._cuts: dict[str, int] = {}

    def layout(self) -> dict[str, Any]:
        """See `handoff.check_layouts`."""
        return make_layout(
            self.config.role, self.fingerprint, self.mover.describe(), self.config.max_model_len
        )

    def prepare_link(self, peer: str, peer_tp: int) -> None:
        """Compiles what a peer with another tp needs. Before the first transfer, under the engine's
        lock."""
        with self.lock, compile_watch().expected():
            self._cuts[peer] = self.mover.prepare_for(peer_tp)


class PromptEngine(_HandoverEngine):
    """Prefills, then hands each request over with its KV. A request that ends with its first token
    is answered here.

    Blocks stay pinned from the first chunk until the completion engine has acknowledged, or the
    hand-over has failed for good. Requests have n=1: a coordinator splits the others.
    """

    reads_scheduled = True

    def start_hand_over(
        self, name: str, coordinator: PromptCoordinator, config: HandoffConfig | None = None
    ) -> None:
        """Before the first request. Links are then added with `sender.connect`."""
        self.name, self.coordinator = name, coordinator
        self.sender = Sender(self, name, config)
        self._by_key: dict[str, Completion] = {}
        self._chunks: dict[str, int] = {}  # tokens scheduled in this step, by key
        self._step_start = 0.0
        self._has_states = "states" in self.mover.kinds

    def add_request(
        self,
        request_id: str | None,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> Request:
        """seed: the 64-bit seed of its draws (the coordinator's, so that a retry repeats them);
        None: as in any engine."""
        if params is not None and params.n > 1:
            raise ValueError(
                f"request {request_id!r}: a PROMPT engine hands over single completions, got"
                f" n={params.n}"
            )
        with self.lock:
            request = super().add_request(request_id, prompt, params, **options)
            self._by_key[request.request_id] = request.completions[0]
            if seed is not None:
                request.completions[0].seed = seed
            self._offer_next()
            return request

    def adopt_request(self, request: Request) -> None:
        super().adopt_request(request)
        self._by_key[request.request_id] = request.completions[0]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        with self.lock:
            alive = super().abort_request(request_ids)
            for key in alive:
                self.sender.cancel(key, "aborted")
                self._release_detached(key)
            return alive

    def pump(self) -> None:
        """Moves hand-overs on between steps."""
        with self.lock:
            self.sender.pump()

    # ---- hooks -----------------------------------------------------------------------------------

    def post_schedule(self, outputs: list[SchedulerOutputs]) -> None:
        self._step_start = time.perf_counter()
        self._chunks = {}
        for o in outputs:
            for item in o.prefill:
                key = self.live.of(item.seq).request.request_id
                self._chunks[key] = item.q_len
                self._offer(key)

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
                    self._offer(c.request.request_id)

    def _offer(self, key: str) -> None:
        c = self._by_key[key]
        scheduler = self.schedulers[c.rank]
        if key in self.sender.outgoing or scheduler.max_len_of(c.seq) <= c.seq.prompt_len + 1:
            return  # or it ends here, whatever its first token is
        state = RequestState(
            request_id=key,
            prompt_token_ids=c.request.prompt_token_ids,
            params=c.params.to_dict(),
            seed=c.seed,
        )
        self.sender.offer(
            key, state.to_dict(), scheduler.config.pages(c.seq.prompt_len), int(self._has_states)
        )

    def pe_prepare_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """Chunks of this step that fill pages start moving while the sampler runs."""
        self.sender.pump()

    def pe_do_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """Transfers are acknowledged by the other side, so there is nothing to wait for: books what
        the step computed."""
        seconds = time.perf_counter() - self._step_start
        total = sum(self._chunks.values())
        for key, tokens in self._chunks.items():
            self.coordinator.prefill_progress(key, tokens, seconds * tokens / total)

    def send_processed_prompts(self) -> None:
        for c in self.results.take_prefilled():
            key = c.request.request_id
            if c.seq.is_finished or c.finished:
                self.sender.cancel(key, "ended with its first token")
                continue
            self.schedulers[c.rank].detach(c.seq)
            self.coordinator.prefilled(key)
            self.sender.prefilled(key, RequestState.of(c).to_dict())
        self.drop_finished_prompts()
        self._offer_next()
        self.sender.pump()

    def forget_request(self, request: Request) -> None:
        self.sender.cancel(request.request_id, "ended on the prompt engine")
        self._by_key.pop(request.request_id, None)
        super().forget_request(request)

    # ---- SourcePort ------------------------------------------------------------------------------

    def choose_target(self, key: str, exclude: set[str]) -> str | None:
        return self.coordinator.choose_target(key, exclude)

    def unchoose_target(self, key: str, target: str) -> None:
        self.coordinator.unchoose_target(key, target)

    def ready_pages(self, key: str) -> int:
        seq = self._by_key[key].seq
        if seq.is_finished:
            return 0
        done, pages = seq.num_scheduled, self.schedulers[0].config.pages(seq.prompt_len)
        ready = pages if done >= seq.prompt_len else done // self.config.block_size
        return min(ready, seq.num_blocks)

    def send_pages(self, link: Link, batch: list[tuple[str, str, int, int, int]]) -> None:
        queues: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for handoff_id, key, first, count, target_rank in batch:
            c = self._by_key[key]
            blocks = c.seq.block_ids[first : first + count].tolist()
            queues.setdefault((c.rank, target_rank), []).extend(
                (handoff_id, first + i, b) for i, b in enumerate(blocks)
            )
        self._send_rounds(link, "blocks", queues)

    def send_states(self, link: Link, batch: list[tuple[str, str, int]]) -> None:
        queues: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for handoff_id, key, target_rank in batch:
            c = self._by_key[key]
            queues.setdefault((c.rank, target_rank), []).append((handoff_id, 0, c.seq.state_id))
        self._send_rounds(link, "states", queues)

    def _send_rounds(
        self, link: Link, kind: str, queues: dict[tuple[int, int], list[tuple[str, int, int]]]
    ) -> None:
        """One gather serves all source ranks at once, each with blocks for one rank of
        the target."""
        while queues:
            firsts = {source: target for source, target in reversed(queues)}
            chosen = {
                source: (target, queues.pop((source, target))) for source, target in firsts.items()
            }
            ids = [
                [b for *_, b in chosen[r][1]] if r in chosen else []
                for r in range(self.mover.ranks)
            ]
            sent = [0] * self.mover.ranks
            for source, payload in self.mover.gathers(
                ids, kind, self._cuts.get(link.peer, 1)
            ):  # each goes at once, still cached
                target, rows = chosen[source]
                segments = runs(rows[sent[source] : sent[source] + payload.count])
                link.send(
                    Message("pages", "", {"kind": kind, "segments": segments}, payload), target
                )
                sent[source] += payload.count

    def handed_over(self, key: str, target: str) -> None:
        self._drop_request(key)
        self.coordinator.handed_over(key, target)

    def hand_over_failed(self, key: str, reason: str, retry: bool) -> None:
        c = self._by_key[key]
        if c.seq.status is not SequenceStatus.DETACHED:
            self.schedulers[c.rank].finish(c.seq, SequenceStatus.FINISHED_ERROR, "error", reason)
        self._drop_request(key)
        self.coordinator.hand_over_failed(key, reason, retry)

    def _drop_request(self, key: str) -> None:
        """Forgets a request that is not this engine's any more, without an output."""
        self._release_detached(key)
        c = self._by_key.pop(key)
        self.live.forget(c.request)

    def _release_detached(self, key: str) -> None:
        c = self._by_key[key]
        if self.schedulers[c.rank].release_detached(c.seq):
            self.live.drop_rank(c.seq)


class CompletionEngine(_HandoverEngine):
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
        self.receiver = Receiver(self, name, config)
        self._reserved: dict[str, Completion] = {}

    def pump(self) -> None:
        """Takes what has arrived; between steps."""
        with self.lock:
            self.receiver.pump()

    def drop_attempt(self, key: str, reason: str) -> None:
        """Ends whatever this engine holds of an attempt: reservations and decoding requests."""
        with self.lock:
            self.receiver.drop_request(key, reason)
            self.abort_request([i for i in self.live.requests if i.rpartition("/")[0] == key])

    # ---- TargetPort ------------------------------------------------------------------------------

    def reserve(self, handoff_id: str, request: dict[str, Any]) -> int:
        state = RequestState.from_dict(request)
        try:
            params = SamplingParams.from_dict(state.params)
            self.admission.check(handoff_id, params, self.live)
            for rank in self._ranks_by_load():
                request = Request(handoff_id, None, state.prompt_token_ids, params)
                c = self.admission.new_completion(request, params, state.seed, rank)
                request.completions.append(c)
                if self.schedulers[rank].reserve(c.seq, self._tokens_to_reserve(c.seq, rank)):
                    self._reserved[handoff_id] = c
                    return rank
        except ValueError as error:
            raise Refused(str(error), retry=False) from error
        free = max(s.blocks.num_free for s in self.schedulers)
        raise Refused(
            f"no rank has a free slot and room for {len(state.prompt_token_ids)} tokens (free"
            f" blocks: {free})",
            retry=True,
        )

    def _ranks_by_load(self) -> list[int]:
        loads = [
            (s.config.max_num_seqs - s.slots.num_free, s.cache_usage, r)
            for r, s in enumerate(self.schedulers)
        ]
        return [r for *_, r in sorted(loads)]

    def _tokens_to_reserve(self, seq: Sequence, rank: int) -> int:
        most = self.schedulers[rank].max_len_of(seq)
        return max(
            seq.prompt_len + 1,
            seq.prompt_len + int(np.ceil((most - seq.prompt_len) * self.reserve_fraction)),
        )

    def write(
        self, kind: str, payload: Payload, segments: list[tuple[str, int, int, int]], live: set[str]
    ) -> None:
        ids = np.full(payload.count, -1, np.int32)
        for handoff_id, first, count, row in segments:
            if handoff_id in live:
                seq = self._reserved[handoff_id].seq
                ids[row : row + count] = (
                    seq.block_ids[first : first + count] if kind == "blocks" else seq.state_id
                )
        self.mover.scatter([(payload, ids)])

    def enqueue(self, handoff_id: str, state: dict[str, Any]) -> bool:
        c = self._reserved.pop(handoff_id)
        scheduler, loaded = self.schedulers[c.rank], RequestState.from_dict(state)
        if not scheduler.enqueue_prompted(c.seq, loaded.output_token_ids):
            scheduler.cancel_reservation(c.seq)
            return False
        loaded.load_into(c, self.tokenizer)
        self.live.add(c.request)
        return True

    def release(self, handoff_id: str, reason: str) -> None:
        c = self._reserved.pop(handoff_id)
        self.schedulers[c.rank].cancel_reservation(c.seq)

    def abort(self, handoff_id: str, reason: str) -> None:
        self.abort_request(handoff_id)


def runs(rows: list[tuple[str, int, int]]) -> list[list[Any]]:
    """(handoff id, page, block) per payload row -> [handoff id, first page, count, first row] per
    run of pages."""
    out: list[list[Any]] = []
    for row, (handoff_id, page, _) in enumerate(rows):
        if out and out[-1][0] == handoff_id and out[-1][1] + out[-1][2] == page:
            out[-1][2] += 1
        else:
            out.append([handoff_id, page, 1, row])
    return out
