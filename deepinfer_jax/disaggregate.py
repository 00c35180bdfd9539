"""Prefill and decode apart in one process: N prompt and M completion engines on their own devices, behind one engine-like face.

`DisaggregatedEngine` has the methods of LLMEngine that `LLM` uses. Each engine runs in its own thread (pd_worker.py); the
router (scheduler/router.py) decides who gets what; a crash or a stall of one engine ends or moves only what it held.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from deepinfer_jax import mesh_link
from deepinfer_jax.admission import PromptInput, check_request, tokenize_prompt
from deepinfer_jax.config import EngineArgs
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.pd_config import DisaggregationConfig, assign_devices, role_args
from deepinfer_jax.pd_engines import CompletionEngine, PromptEngine
from deepinfer_jax.pd_requests import Part, SplitRequest
from deepinfer_jax.pd_worker import EngineWorker
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.router import Capacity, Router, Verdict, split_attempt

LOOK_AGAIN = 0.2
"""Seconds between looks at stalled engines while the caller waits for outputs."""


class DisaggregatedEngine:
    """An engine made of engines. Thread-safe; outputs are collected by whoever calls step()."""

    def __init__(self, fields: Mapping[str, Any], config: DisaggregationConfig, devices: Seq[Any] | None = None) -> None:
        """fields: EngineArgs fields both roles share. Raises ValueError for an impossible layout, LayoutMismatch."""
        self.pd = config
        self._lock = threading.RLock()
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._requests: dict[str, SplitRequest] = {}
        self._parts: dict[str, Part] = {}
        self._counter = itertools.count()
        self.workers: dict[str, EngineWorker] = {}
        args = {EngineType.PROMPT: role_args(fields, config, EngineType.PROMPT)}
        args[EngineType.COMPLETION] = role_args(fields, config, EngineType.COMPLETION)
        self._build(args, list(jax.devices() if devices is None else devices))
        first = self.prompt_engines[0]
        self.args, self.config, self.tokenizer = first.args, first.config, first.tokenizer
        self.model_config, self.eos_token_ids = first.model_config, first.eos_token_ids
        self._seeds = np.random.default_rng(self.args.seed)
        capacity = {e.name: _capacity(e) for e in self.completion_engines}
        self.router = Router([e.name for e in self.prompt_engines], capacity, config.router)
        for worker in self.workers.values():
            worker.start()

    def _build(self, args: dict[EngineType, EngineArgs], devices: list[Any]) -> None:
        c = self.pd
        chosen = assign_devices(args, c, devices)
        self.prompt_engines = [PromptEngine(args[EngineType.PROMPT], devices=d) for d in chosen[EngineType.PROMPT]]
        self.completion_engines = [CompletionEngine(args[EngineType.COMPLETION], devices=d) for d in chosen[EngineType.COMPLETION]]
        for i, engine in enumerate(self.prompt_engines):
            engine.start_hand_over(f"PROMPT_{i}", self, c.handoff)
        for i, engine in enumerate(self.completion_engines):
            engine.start_hand_over(f"COMPLETION_{i}", c.handoff, c.reserve_fraction)
        for engine in (*self.prompt_engines, *self.completion_engines):
            self.workers[engine.name] = EngineWorker(engine, self._on_output, self._on_crash)
        self._links = {}
        for source in self.prompt_engines:
            for target in self.completion_engines:
                a, b = mesh_link.connect(source, target)
                a.on_arrival, b.on_arrival = self.workers[source.name].wake, self.workers[target.name].wake
                self._links[source.name, target.name] = (a, b)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str | None, prompt: PromptInput, params: SamplingParams | None = None, *, arrival_time: float | None = None
    ) -> SplitRequest:
        """Queues a request. Raises ValueError naming the request, the value and the limit; RuntimeError when no engine is left."""
        with self._lock:
            request_id = str(next(self._counter)) if request_id is None else request_id
            params = params or SamplingParams()
            check_request(self, request_id, params)
            text, ids = tokenize_prompt(self, request_id, prompt)
            self._check_alive(request_id)
            arrival = time.time() if arrival_time is None else arrival_time
            request = SplitRequest.make(request_id, text, ids, params, self.draw_seed, arrival)
            limit = self.config.max_model_len
            for part in request.parts:
                want = limit if part.params.max_tokens is None else part.params.max_tokens
                self.router.add(part.id, ids, max(1, min(want, limit - len(ids))))
            self._requests[request_id] = request
            self._parts |= {part.id: part for part in request.parts}
            self._dispatch()
            return request

    def draw_seed(self) -> int:
        return int(self._seeds.integers(0, 2**64, dtype=np.uint64))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Ends requests with finish_reason "abort" (and what has been reported of them); returns the ids that were alive."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._lock:
            alive = [i for i in ids if i in self._requests]
            for request_id in alive:
                for part in self._requests[request_id].unfinished():
                    self._tell(self.router.cancel(part.id), "aborted")
                    self._finish_part(part, part.ended("abort", None))
            self._dispatch()
            return alive

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests) or not self._outputs.empty()

    def is_active(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput]:
        """Waits for outputs and returns all there are; [] when a while has passed without any."""
        if not self.has_unfinished_requests():
            return []
        try:
            outputs = [self._outputs.get(timeout=LOOK_AGAIN)]
        except queue.Empty:
            self._check_stalls()
            with self._lock:
                self._dispatch()
            return []
        while not self._outputs.empty():
            outputs.append(self._outputs.get())
        return outputs

    # ---- what the prompt engines ask and tell (their threads) -------------------------------------------------------

    def choose_target(self, key: str, exclude: set[str]) -> str | None:
        with self._lock:
            part = self._current(key)
            return None if part is None or part.answering is not None else self.router.place(key, exclude)

    def unchoose_target(self, key: str, target: str) -> None:
        with self._lock:
            self.router.unplace(key)
            self._wake_prompt_engines()

    def prefill_progress(self, key: str, tokens: int, seconds: float) -> None:
        with self._lock:
            self.router.prefill_progress(key, tokens, seconds)

    def prefilled(self, key: str) -> None:
        with self._lock:
            self.router.prefilled(key)

    def handed_over(self, key: str, target: str) -> None:
        with self._lock:
            self.router.delivered(key)
            self._dispatch()

    def hand_over_failed(self, key: str, reason: str, retry: bool) -> None:
        with self._lock:
            verdict = self.router.fail(key, reason, retry)
            if verdict is not None:
                self._settle(verdict)
            self._dispatch()

    # ---- what workers report (their threads) -------------------------------------------------------------------------

    def _on_output(self, worker: EngineWorker, output: RequestOutput) -> None:
        with self._lock:
            attempt = output.request_id.partition("/")[0] if worker.engine.policy.does_decode else output.request_id
            part = self._current(attempt)
            if part is None or worker.failed is not None or not part.accepts(worker.name, output.request_id):
                return  # a late or abandoned attempt
            if output.finished:
                if self.router.finish(attempt) is None:
                    return
                self._finish_part(part, output)
                self._dispatch()
                self._wake_prompt_engines()  # room for another hand-over
            else:
                self.router.no_retry(attempt)
                self._emit(part, output)

    def _on_crash(self, worker: EngineWorker, reason: str) -> None:
        with self._lock:
            worker.failed = reason
            for pair, (a, b) in self._links.items():
                if worker.name in pair:
                    (a if pair[0] == worker.name else b).close(reason)
            for verdict in self.router.engine_failed(worker.name, reason):
                self._settle(verdict)
            prompt, completion = self.router.alive()
            if not prompt or not completion:
                for job in list(self.router.queue):
                    self._settle(Verdict(job.request_id, job.attempt_id, reason, False))
                    self.router.cancel(job.request_id)
            self._dispatch()

    def _check_stalls(self) -> None:
        limit = self.pd.stall_timeout
        for worker in self.workers.values():
            if limit is not None and worker.failed is None and worker.stuck_for() > limit:
                self._on_crash(worker, f"{worker.name}: no progress for {limit} s")

    # ---- plumbing ------------------------------------------------------------------------------------------------------

    def _current(self, attempt_id: str) -> Part | None:
        part_id, attempt = split_attempt(attempt_id)
        job = self.router.jobs.get(part_id)
        return self._parts.get(part_id) if job is not None and job.attempt == attempt else None

    def _dispatch(self) -> None:
        for assignment in self.router.dispatch():
            part = self._parts[assignment.request_id]
            part.answering = None
            engine = self.workers[assignment.prompt_engine].engine
            self.workers[assignment.prompt_engine].post(lambda e=engine, p=part, key=assignment.attempt_id: self._start(e, p, key))

    def _start(self, engine: PromptEngine, part: Part, key: str) -> None:
        with self._lock:
            if self._current(key) is None:
                return
        engine.add_request(key, {"prompt_token_ids": part.prompt_token_ids}, part.params, arrival_time=part.arrival_time)
        engine.set_seed(key, part.seed)

    def _settle(self, verdict: Verdict) -> None:
        self._tell([(name, verdict.attempt_id) for name in verdict.told], verdict.reason)
        part = self._parts.get(verdict.request_id)
        if not verdict.retry and part is not None:
            self._finish_part(part, part.ended("error", verdict.reason))

    def _tell(self, told: list[tuple[str, str]], reason: str) -> None:
        for name, attempt in told:
            worker = self.workers[name]
            if worker.failed is not None:
                continue
            if isinstance(worker.engine, PromptEngine):
                worker.post(lambda e=worker.engine, a=attempt: e.abort_request(a))
            else:
                worker.post(lambda e=worker.engine, a=attempt: e.drop_attempt(a, reason))

    def _finish_part(self, part: Part, output: RequestOutput) -> None:
        self._parts.pop(part.id, None)
        self._emit(part, output)
        if part.request.finished:
            self._requests.pop(part.request.request_id, None)

    def _emit(self, part: Part, output: RequestOutput) -> None:
        merged = part.request.merge(part, output)
        if merged is not None:
            self._outputs.put(merged)

    def _wake_prompt_engines(self) -> None:
        for engine in self.prompt_engines:
            self.workers[engine.name].wake()

    def _check_alive(self, request_id: str) -> None:
        prompt, completion = self.router.alive()
        if not prompt or not completion:
            reasons = "; ".join(w.failed for w in self.workers.values() if w.failed is not None)
            raise RuntimeError(f"request {request_id!r}: no {'completion' if prompt else 'prompt'} engine is left: {reasons}")

    # ---- the rest ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Of every engine by name, the router's, and the hand-overs' counters."""
        handoff = {e.name: dict(e.sender.counters) for e in self.prompt_engines}
        handoff |= {e.name: dict(e.receiver.counters) for e in self.completion_engines}
        with self._lock:
            router = self.router.stats()
        return {
            "engines": {name: w.engine.stats() for name, w in self.workers.items()},
            "failed": {name: w.failed for name, w in self.workers.items() if w.failed is not None},
            "router": router,
            "handoff": handoff,
        }

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Waits until every living engine has let go of everything; TimeoutError names what is left."""
        limit = time.monotonic() + timeout
        while any(self._held(w) for w in self.workers.values() if w.failed is None):
            if time.monotonic() > limit:
                held = {n: self._held(w) for n, w in self.workers.items()}
                raise TimeoutError(f"after {timeout} s still held: {held}")
            time.sleep(0.002)

    def _held(self, worker: EngineWorker) -> list[str]:
        engine = worker.engine
        with engine._lock:
            held = [str(seq) for s in engine.schedulers for seq in s.sequences]
        return held + [str(c) for c in worker._commands]

    def check_integrity(self) -> None:
        """Raises if a block or slot is lost or doubly used anywhere, or the router's loads disagree with its requests."""
        for worker in self.workers.values():
            with worker.engine._lock:
                worker.engine.check_integrity()
        with self._lock:
            self.router.check_integrity()

    def close(self) -> None:
        """Stops the threads, then frees device memory."""
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
            if not worker.thread.is_alive():
                worker.engine.close()


def _capacity(engine: CompletionEngine) -> Capacity:
    ranks, c = len(engine.schedulers), engine.config
    return Capacity(ranks * c.max_num_seqs, ranks * engine.runner.num_blocks * c.block_size, c.max_model_len)
