"""A thread per engine: steps it while there is work, moves hand-overs between steps, contains its
crashes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from deepinfer_jax.disagg.engines import CompletionEngine, PromptEngine
from deepinfer_jax.outputs import RequestOutput

logger = logging.getLogger(__name__)

ARRIVAL_POLL = 0.0005
"""Seconds between looks at bytes that are on their way while the engine has nothing else to do."""
IDLE_POLL = 0.5


class EngineWorker:
    """Runs one engine. Everything that touches the engine happens in its thread: others `post`
    functions.

    on_output(worker, output) and on_crash(worker, reason) are called from the thread.
    """

    def __init__(
        self,
        engine: PromptEngine | CompletionEngine,
        on_output: Callable[[EngineWorker, RequestOutput], None],
        on_crash: Callable[[EngineWorker, str], None],
    ) -> None:
        self.engine, self.name = engine, engine.name
        self._on_crash = on_crash
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.failed: str | None = None
        self.busy_since: float | None = None  # start of the round that is going on
        self._control = engine.sender if isinstance(engine, PromptEngine) else engine.receiver
        engine.process_output = lambda output: self._emit(on_output, output)  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` in the engine's thread, before its next step."""
        self._commands.append(command)
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the step that is going on."""
        self._stopping = True
        self._wake.set()
        if self.thread.is_alive():
            self.thread.join(timeout)

    def stuck_for(self) -> float:
        """Seconds the current round has taken."""
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _emit(
        self, on_output: Callable[[EngineWorker, RequestOutput], None], output: RequestOutput
    ) -> RequestOutput:
        # Before the step goes on: a request's first token must not be overtaken by what its
        # completion engine makes of it.
        on_output(self, output)
        return output

    def _run(self) -> None:
        try:
            last_rounds = 8
            while not self._stopping or (last_rounds and self._holds_ended()):
                last_rounds -= self._stopping
                self._wake.clear()
                self.busy_since = time.monotonic()
                progressed = self._round()
                self.busy_since = None
                if not progressed and not self._commands:
                    self._wake.wait(self._idle_seconds())
        except Exception as error:
            logger.exception("%s has crashed", self.name)
            self.failed = f"{self.name} crashed: {type(error).__name__}: {error}"
            self.busy_since = None
            self._on_crash(self, self.failed)

    def _holds_ended(self) -> bool:
        """Requests the caller has the end of, and the engine has not finalized: a KV store would
        miss their tails."""
        return any(seq.is_finished for s in self.engine.schedulers for seq in s.sequences)

    def _round(self) -> bool:
        while self._commands:
            self._commands.popleft()()
        self.engine.pump()
        if not self.engine.has_unfinished_requests():
            return False
        self.engine.step()
        return self.engine.did_work

    def _idle_seconds(self) -> float:
        if isinstance(self.engine, CompletionEngine) and self.engine.receiver.has_arriving:
            return ARRIVAL_POLL
        deadline = self._control.next_deadline
        if self.engine.has_unfinished_requests():  # prompts that wait for blocks
            return 0.005
        return (
            IDLE_POLL
            if deadline is None
            else min(max(deadline - time.monotonic(), 0.001), IDLE_POLL)
        )
