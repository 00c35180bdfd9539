"""A thread per engine: runs its loop and contains its crashes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.loop import EngineLoop
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.disagg.split_request import CompletionPart
from deepinfer_jax.scheduler.routing.ids import AttemptId

logger = logging.getLogger(__name__)

LAST_ROUNDS = 8
"""Rounds after `stop` in which requests that have ended may be finalized."""


class EngineWorker:
    """A coordinator's EngineHandle: runs one engine in a thread of its own."""

    def __init__(
        self,
        engine: PromptEngine | CompletionEngine,
        coordinator: Coordinator,
        on_crash: Callable[[str, str], None],
    ) -> None:
        """on_crash: called with the engine's name and the reason, from its thread."""
        self.engine, self.name = engine, engine.name
        self.failed: str | None = None
        self.loop = EngineLoop(engine)
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._coordinator, self._on_crash = coordinator, on_crash
        self._stopping, self._last_rounds = False, LAST_ROUNDS
        engine.on_output = lambda output: coordinator.on_output(self.name, output)

    def run(self) -> None:
        self.thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the step that is going on."""
        self._stopping = True
        self.loop.wake()
        if self.thread.is_alive():
            self.thread.join(timeout)

    # ---- EngineHandle ----------------------------------------------------------------------------

    def start(self, part: CompletionPart, attempt: AttemptId) -> None:
        self.loop.post(lambda: self._start(part, attempt))

    def cancel(self, attempt: AttemptId, reason: str) -> None:
        self.loop.post(lambda: self.engine.cancel_attempt(attempt, reason))

    def wake(self) -> None:
        self.loop.wake()

    # ---- the engine's thread ---------------------------------------------------------------------

    def _start(self, part: CompletionPart, attempt: AttemptId) -> None:
        with self._coordinator.lock:
            if self._coordinator.current(attempt) is None:
                return
        try:
            self.engine.add_attempt(
                attempt, part.prompt_token_ids, part.params, part.seed, part.arrival_time
            )
        except ValueError as error:  # this engine's arguments forbid it: a fault of the request
            self._coordinator.hand_over_failed(attempt, str(error), retry=False)

    def _run(self) -> None:
        try:
            self.loop.run(self._going)
        except Exception as error:
            logger.exception("%s has crashed", self.name)
            self.failed = f"{self.name} crashed: {type(error).__name__}: {error}"
            self._on_crash(self.name, self.failed)

    def _going(self) -> bool:
        if not self._stopping:
            return True
        self._last_rounds -= 1
        return self._last_rounds >= 0 and self._holds_ended()

    def _holds_ended(self) -> bool:
        """Requests the caller has the end of, and the engine has not finalized: a KV store would
        miss their tails."""
        return any(seq.is_finished for s in self.engine.schedulers for seq in s.sequences)
