"""The one loop that runs an engine: steps it while there is work, moves hand-overs between steps,
reports what it makes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from deepinfer_jax.disagg.engines import ServedEngine

ARRIVAL_POLL = 0.0005
"""Seconds between looks at bytes that are on their way while the engine has nothing else to do."""
WAITING_POLL = 0.005
"""The same, while prompts wait for blocks."""
GROUP_IDLE = 0.02
"""Most seconds between the votes of an idle job of several processes: a request at one of them
waits for the others' next vote."""


class VoteGroup(Protocol):
    """The processes of one job; see launch.votes."""

    local_ranks: tuple[int, ...]

    def all_reduce_min(self, values: list[int]) -> int: ...


class EngineLoop:
    """Everything that touches the engine happens in the thread that calls `run`: others `post`
    functions."""

    def __init__(
        self,
        engine: ServedEngine,
        idle_poll: float = 0.5,
        group: VoteGroup | None = None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """idle_poll: most seconds of a wait. group: votes with the other processes of the job: all
        step, or none. on_idle: called in every round in which nobody has anything to do."""
        self.engine, self.idle_poll, self.group, self.on_idle = engine, idle_poll, group, on_idle
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._busy_since: float | None = None  # start of the round that is going on
        self._last_busy = 0.0

    # ---- from any thread -------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` in the engine's thread, before its next step."""
        self._commands.append(command)
        self._wake.set()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def stuck_for(self) -> float:
        """Seconds the current round has taken."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def num_commands(self) -> int:
        return len(self._commands)

    # ---- the engine's thread ---------------------------------------------------------------------

    def run(self, going: Callable[[], bool]) -> None:
        """While going(); raises what the engine raises."""
        try:
            while going():
                self._wake.clear()
                self._busy_since = time.monotonic()
                progressed = self._round()
                self._busy_since = None
                if not progressed and not self._commands:
                    self._wake.wait(self._idle_seconds())
        finally:
            self._busy_since = None

    def vote(self, yes: bool) -> bool:
        """Whether every process of the job says yes."""
        if self.group is None:
            return yes
        return self.group.all_reduce_min([int(yes)] * len(self.group.local_ranks)) == 1

    def _round(self) -> bool:
        while self._commands:
            self._commands.popleft()()
        self.engine.pump()
        if self.vote(not self.engine.has_unfinished_requests()):
            self.on_idle()
            return False
        self._last_busy = time.monotonic()
        self.engine.step()
        return self.engine.did_work

    def _idle_seconds(self) -> float:
        if self.group is not None:
            idle = time.monotonic() - self._last_busy
            return min(GROUP_IDLE, max(ARRIVAL_POLL, idle / 10))
        hand_overs = self.engine.hand_overs
        if hand_overs is not None and hand_overs.has_arriving:
            return ARRIVAL_POLL
        if self.engine.has_unfinished_requests():
            return WAITING_POLL
        deadline = None if hand_overs is None else hand_overs.next_deadline
        if deadline is None:
            return self.idle_poll
        return min(max(deadline - time.monotonic(), 0.001), self.idle_poll)
