"""Who holds which request in a disaggregated deployment, and what the caller gets: the part that
knows no device and no thread.

`Coordinator` joins the router (where to), the engines' reports (what happened) and the callers'
requests (what they are owed: exactly one final output each, whatever fails). In one process
`DisaggregatedEngine` is one; tests drive it with fake engines.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from deepinfer_jax.disagg.split_request import CompletionPart, FannedOutRequest
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.scheduler.routing.router import Router, Verdict, split_attempt


class Worker(Protocol):
    """What runs one engine. failed: why it does not any more."""

    name: str
    engine: Any
    failed: str | None

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` in the engine's thread, before its next step."""
        ...

    def wake(self) -> None:
        """There may be something to do."""
        ...


class Coordinator:
    """Thread-safe. Ids: a request is cut into parts `id#unique.i`, each prefilled as attempt
    `...@k` and handed over as `...@k/t`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._requests: dict[str, FannedOutRequest] = {}
        self._parts: dict[str, CompletionPart] = {}
        self.workers: dict[str, Worker] = {}
        self.router: Router

    def close_links(self, name: str, reason: str) -> None:
        """Every engine connected to `name` must learn that it is gone."""
        raise NotImplementedError

    # ---- requests --------------------------------------------------------------------------------

    def submit(self, request: FannedOutRequest, max_model_len: int) -> None:
        """Queues all parts or none. RuntimeError when no engine of a role is left, ValueError when
        one could never fit."""
        with self._lock:
            self._check_alive(request.request_id)
            ids, added = request.prompt_token_ids, []
            try:
                for part in request.parts:
                    want = (
                        max_model_len if part.params.max_tokens is None else part.params.max_tokens
                    )
                    self.router.add(part.id, ids, max(1, min(want, max_model_len - len(ids))))
                    added.append(part)
            except ValueError as error:
                for part in added:
                    self.router.cancel(part.id)
                raise ValueError(
                    str(error).replace(repr(request.parts[len(added)].id), repr(request.request_id))
                ) from None
            self._requests[request.request_id] = request
            self._parts |= {part.id: part for part in request.parts}
            self._dispatch()

    def refuse(self, request: FannedOutRequest, finish_reason: str) -> None:
        """Ends a request that was never queued."""
        with self._lock:
            self._requests[request.request_id] = request
            for part in request.parts:
                self._finish_part(part, part.ended(finish_reason, None))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Ends requests with finish_reason "abort" (and what has been reported of them); returns
        the ids that were alive."""
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

    # ---- what the prompt engines ask and tell (their threads) ------------------------------------

    def choose_target(self, key: str, exclude: set[str]) -> str | None:
        with self._lock:
            part = self._current(key)
            return (
                None
                if part is None or part.answering is not None
                else self.router.assign_decode(key, exclude)
            )

    def unchoose_target(self, key: str, target: str) -> None:
        with self._lock:
            self.router.release_decode(key, target)
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

    # ---- what workers report (their threads) -----------------------------------------------------

    def _on_output(self, worker: Worker, output: RequestOutput) -> None:
        with self._lock:
            attempt = output.request_id.partition("/")[0]
            part = self._current(attempt)
            if part is None or worker.failed is not None:
                return  # a late or abandoned attempt
            if output.outputs[0].finish_reason == "abort":
                self._given_up(part, attempt, output.request_id)
            elif not part.accepts(output.request_id):
                return
            elif output.finished:
                self._finished(part, attempt, output)
            else:
                self.router.no_retry(attempt)
                self._emit(part, output)

    def _finished(self, part: CompletionPart, attempt: str, output: RequestOutput) -> None:
        prompt_engine = self.router.jobs[part.id].prompt_engine
        self.router.finish(attempt)
        if (
            prompt_engine is not None and "/" in output.request_id
        ):  # it has not seen the acknowledgement, and need not
            self._tell([(prompt_engine, attempt)], "answered")
        self._finish_part(part, output)
        self._dispatch()
        self._wake_prompt_engines()  # room for another hand-over

    def _given_up(self, part: CompletionPart, attempt: str, output_id: str) -> None:
        """The caller did not abort it: a hand-over's source took it back before it saw the
        acknowledgement. The source tries again by itself, unless the caller has been given tokens
        of this one."""
        if part.answering == output_id or self.router.jobs[part.id].prompt_engine is None:
            verdict = self.router.fail(
                attempt, f"hand-over {output_id} was taken back by its source"
            )
            if verdict is not None:
                self._settle(verdict)
            self._dispatch()

    def _on_crash(self, worker: Worker, reason: str) -> None:
        with self._lock:
            worker.failed = reason
            self.close_links(worker.name, reason)
            for verdict in self.router.engine_failed(worker.name, reason):
                self._settle(verdict)
            prompt, completion = self.router.alive()
            if not prompt or not completion:
                for job in list(self.router.queue):
                    self._settle(Verdict(job.request_id, job.attempt_id, reason, False))
                    self.router.cancel(job.request_id)
            self._dispatch()

    # ---- plumbing --------------------------------------------------------------------------------

    def _current(self, attempt_id: str) -> CompletionPart | None:
        part_id, _ = split_attempt(attempt_id)
        return self._parts.get(part_id) if self.router.is_current(attempt_id) else None

    def _dispatch(self) -> None:
        for assignment in self.router.dispatch():
            part = self._parts[assignment.request_id]
            part.answering = None
            engine = self.workers[assignment.prompt_engine].engine
            self.workers[assignment.prompt_engine].post(
                lambda e=engine, p=part, key=assignment.attempt_id: self._start(e, p, key)
            )

    def _start(self, engine: Any, part: CompletionPart, key: str) -> None:
        with self._lock:
            if self._current(key) is None:
                return
        prompt = {"prompt_token_ids": part.prompt_token_ids}
        engine.add_request(key, prompt, part.params, arrival_time=part.arrival_time, seed=part.seed)

    def _settle(self, verdict: Verdict) -> None:
        self._tell(
            [(name, verdict.attempt_id) for name in verdict.engines_to_notify], verdict.reason
        )
        part = self._parts.get(verdict.request_id)
        if not verdict.retry and part is not None:
            self._finish_part(part, part.ended("error", verdict.reason))

    def _tell(self, engines_to_notify: list[tuple[str, str]], reason: str) -> None:
        for name, attempt in engines_to_notify:
            worker = self.workers[name]
            if worker.failed is not None:
                continue
            if worker.engine.policy.does_prefill:
                worker.post(lambda e=worker.engine, a=attempt: e.abort_request(a))
            else:
                worker.post(lambda e=worker.engine, a=attempt: e.drop_attempt(a, reason))

    def _finish_part(self, part: CompletionPart, output: RequestOutput) -> None:
        self._parts.pop(part.id, None)
        self._emit(part, output)
        if part.request.finished:
            self._requests.pop(part.request.request_id, None)

    def _emit(self, part: CompletionPart, output: RequestOutput) -> None:
        merged = part.request.merge(part, output)
        if merged is not None:
            self._outputs.put(merged)

    def _wake_prompt_engines(self) -> None:
        for name in self.router.prompt:
            self.workers[name].wake()

    def _check_alive(self, request_id: str) -> None:
        prompt, completion = self.router.alive()
        if not prompt or not completion:
            reasons = "; ".join(w.failed for w in self.workers.values() if w.failed is not None)
            raise RuntimeError(
                f"request {request_id!r}: no {'completion' if prompt else 'prompt'} engine is left:"
                f" {reasons}"
            )
