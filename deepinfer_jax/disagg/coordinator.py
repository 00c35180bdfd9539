"""Who holds which request in a disaggregated deployment, and what the caller gets: the part that
knows no device, no thread and no process.

`Coordinator` joins the router (where to), the engines' reports (what happened) and the callers'
requests (what they are owed: exactly one final output each, whatever fails). It is the `Placement`
of prompt engines in the same process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from deepinfer_jax.disagg.split_request import CompletionPart, FannedOutRequest
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.scheduler.routing.config import Capacity
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, PartId, attempt_of, parse_id
from deepinfer_jax.scheduler.routing.router import Router, Verdict


class EngineHandle(Protocol):
    """One engine, wherever it runs. None of these may wait."""

    name: str

    def start(self, part: CompletionPart, attempt: AttemptId) -> None:
        """Prefill this (a prompt engine), or answer it (a NORMAL one), unless it has ended."""
        ...

    def cancel(self, attempt: AttemptId, reason: str) -> None:
        """Ends whatever the engine holds of an attempt."""
        ...

    def wake(self) -> None:
        """Room may have been made: ask again for what had none."""
        ...


class Coordinator:
    """Thread-safe: `lock` guards everything here and the router."""

    def __init__(self, router: Router, waits: bool = False) -> None:
        """waits: requests wait while a role is missing, until the owner gives them up; otherwise
        they end, with the reason why the last engine of the role has gone."""
        self.router, self.waits = router, waits
        self.lock = threading.RLock()
        self.outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.requests: dict[str, FannedOutRequest] = {}
        self.parts: dict[PartId, CompletionPart] = {}
        self.engines: dict[str, EngineHandle] = {}
        self.failed: dict[str, str] = {}  # why engines are gone that have not come back

    # ---- engines ---------------------------------------------------------------------------------

    def join(self, engine: EngineHandle, capacity: Capacity | None) -> None:
        """capacity: of a completion engine; None: a prompt or NORMAL one. ValueError if the name is
        taken."""
        with self.lock:
            if self.router.load_of(engine.name) is None:
                self.router.join(engine.name, capacity)
            elif engine.name in self.failed:
                self.router.engine_recovered(engine.name)
            else:
                raise ValueError(f"the name {engine.name!r} is taken")
            self.engines[engine.name] = engine
            self.failed.pop(engine.name, None)

    def engine_failed(self, name: str, reason: str) -> None:
        """What it held is queued again or ends."""
        with self.lock:
            if name in self.failed or name not in self.engines:
                return
            self.failed[name] = reason
            self._settle_all(self.router.engine_failed(name, reason))
            self._fail_answered_by(name, reason)

    def engine_left(self, name: str, reason: str) -> None:
        """The same, and it is forgotten. Does nothing for an unknown name."""
        with self.lock:
            if self.engines.pop(name, None) is not None:
                self._settle_all(self.router.leave(name, reason))
                self._fail_answered_by(name, reason)

    def _settle_all(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._settle(verdict)
        self._advance()
        self.wake_prompt_engines()

    def _fail_answered_by(self, name: str, reason: str) -> None:
        """Parts whose hand-over to this engine had been taken back after its first tokens had gone
        to the caller: the router counts them to nobody, and nobody else may answer them."""
        for part in list(self.parts.values()):
            if part.answerer == name and part.answering is not None:
                self._fail(part.answering.attempt, reason, True)

    # ---- requests --------------------------------------------------------------------------------

    def submit(self, request: FannedOutRequest, max_model_len: int) -> None:
        """Queues all parts or none. RuntimeError when no engine of a role is left and requests do
        not wait, ValueError when one could never fit."""
        with self.lock:
            if not self.waits and self.router.missing():
                raise RuntimeError(f"request {request.request_id!r}: {self._why_missing()}")
            ids, added = np.asarray(request.prompt_token_ids, np.int32), []
            try:
                for part in request.parts:
                    want = part.params.max_tokens
                    most = max_model_len - len(ids)
                    self.router.add(part.id, ids, max(1, most if want is None else min(want, most)))
                    added.append(part)
            except ValueError as error:
                for part in added:
                    self.router.cancel(part.id)
                raise ValueError(
                    str(error).replace(repr(request.unique_id), repr(request.request_id))
                ) from None
            self.requests[request.request_id] = request
            self.parts |= {part.id: part for part in request.parts}
            self.dispatch()

    def refuse(self, request: FannedOutRequest, finish_reason: str) -> None:
        """Ends a request that was never queued."""
        with self.lock:
            self.requests[request.request_id] = request
            for part in request.parts:
                self._finish_part(part, part.ended(finish_reason, None))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Ends requests with finish_reason "abort" (and what has been reported of them); returns
        the ids that were alive."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self.lock:
            alive = [i for i in ids if i in self.requests]
            for request_id in alive:
                for part in self.requests[request_id].unfinished():
                    self._cancel(self.router.cancel(part.id), "aborted")
                    self._finish_part(part, part.ended("abort", None))
            self.dispatch()
            return alive

    def give_up_starved(self, reason: str) -> None:
        """Ends what waits for a role that is missing."""
        with self.lock:
            for job in self.router.starved():
                verdict = Verdict(job.part, job.attempt_id, reason, False, tuple(job.engines))
                self.router.cancel(job.part)
                self._settle(verdict)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) or not self.outputs.empty()

    def is_active(self, request_id: str) -> bool:
        return request_id in self.requests

    def current(self, attempt: AttemptId) -> CompletionPart | None:
        """The part that this attempt may still answer; None for a late or abandoned one."""
        return self.parts.get(attempt.part_id) if self.router.is_current(attempt) else None

    def dispatch(self) -> None:
        """Gives what is queued to prompt engines that take more."""
        with self.lock:
            for assignment in self.router.dispatch():
                part = self.parts[assignment.part]
                part.restart()
                self.engines[assignment.prompt_engine].start(part, assignment.attempt)

    # ---- Placement: what the prompt engines ask and tell -----------------------------------------

    def assign_decode(self, attempt: AttemptId, exclude: set[str]) -> str | None:
        with self.lock:
            part = self.current(attempt)
            if part is None or part.answering is not None:
                return None
            return self.router.assign_decode(attempt, exclude)

    def release_decode(self, attempt: AttemptId, target: str) -> None:
        with self.lock:
            self.router.release_decode(attempt, target)
            self.wake_prompt_engines()

    def prefill_progress(self, attempt: AttemptId, tokens: int, seconds: float) -> None:
        with self.lock:
            self.router.prefill_progress(attempt, tokens, seconds)

    def prefilled(self, attempt: AttemptId) -> None:
        with self.lock:
            self.router.prefilled(attempt)

    def handed_over(self, attempt: AttemptId, target: str) -> None:
        with self.lock:
            self.router.delivered(attempt)
            self.dispatch()

    def hand_over_failed(self, attempt: AttemptId, reason: str, retry: bool) -> None:
        with self.lock:
            self._fail(attempt, reason, retry)

    # ---- what engines make -----------------------------------------------------------------------

    def on_output(self, engine: str, output: RequestOutput) -> bool:
        """An output of an attempt or a hand-over. False, and nothing happens, if it is late or if
        this engine does not hold it. ValueError for another id."""
        with self.lock:
            output_of = parse_id(output.request_id)
            attempt = attempt_of(output_of)
            part = self.current(attempt)
            if part is None or engine in self.failed or not self._may_answer(engine, part, attempt):
                return False
            if output.outputs[0].finish_reason == "abort":
                self._given_up(part, output_of)
            elif not part.accepts(output_of, engine):
                return False
            elif output.finished:
                self._finished(part, output_of, output)
            else:
                self.router.no_retry(attempt)
                self._emit(part, output)
            return True

    def _may_answer(self, engine: str, part: CompletionPart, attempt: AttemptId) -> bool:
        """It holds the attempt, or was answering when its hand-over was taken back."""
        return engine == part.answerer or engine in self.router.holders(attempt)

    def _finished(
        self, part: CompletionPart, output_of: AttemptId | HandoffId, output: RequestOutput
    ) -> None:
        attempt = attempt_of(output_of)
        prompt_engine = self.router.jobs[part.id].prompt_engine
        self.router.finish(attempt)
        if prompt_engine is not None and isinstance(output_of, HandoffId):
            # it has not seen the acknowledgement, and need not
            self._cancel([(prompt_engine, attempt)], "answered")
        self._finish_part(part, output)
        self.dispatch()
        self.wake_prompt_engines()  # room for another hand-over

    def _given_up(self, part: CompletionPart, output_of: AttemptId | HandoffId) -> None:
        """The caller did not abort it: a hand-over's source took it back before it saw the
        acknowledgement. The source tries again by itself, unless the caller has been given tokens
        of this one."""
        if part.answering == output_of or self.router.jobs[part.id].prompt_engine is None:
            reason = f"hand-over {output_of} was taken back by its source"
            self._fail(attempt_of(output_of), reason, True)

    # ---- plumbing --------------------------------------------------------------------------------

    def _fail(self, attempt: AttemptId, reason: str, retry: bool) -> None:
        verdict = self.router.fail(attempt, reason, retry)
        if verdict is not None:
            self._settle(verdict)
        self._advance()

    def _settle(self, verdict: Verdict) -> None:
        notify = [(name, verdict.attempt) for name in verdict.engines_to_notify]
        self._cancel(notify, verdict.reason)
        part = self.parts.get(verdict.part)
        if not verdict.retry and part is not None:
            self._finish_part(part, part.ended("error", verdict.reason))

    def _advance(self) -> None:
        if not self.waits and self.router.missing():
            self.give_up_starved(self._why_missing())
        self.dispatch()

    def _why_missing(self) -> str:
        roles = " and no ".join(self.router.missing())
        return f"no {roles} engine is left: {'; '.join(self.failed.values())}"

    def _cancel(self, notify: Iterable[tuple[str, AttemptId]], reason: str) -> None:
        for name, attempt in notify:
            if name in self.engines and name not in self.failed:
                self.engines[name].cancel(attempt, reason)

    def _finish_part(self, part: CompletionPart, output: RequestOutput) -> None:
        self.parts.pop(part.id, None)
        self._emit(part, output)
        if part.request.finished:
            self.requests.pop(part.request.request_id, None)

    def _emit(self, part: CompletionPart, output: RequestOutput) -> None:
        merged = part.request.merge(part, output)
        if merged is not None:
            self.outputs.put(merged)

    def wake_prompt_engines(self) -> None:
        for name in self.router.prompt:
            if name in self.engines:
                self.engines[name].wake()
