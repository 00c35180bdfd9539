"""What happens between two steps of an engine: calls from other threads, calls that all processes
of a job make at the same place, outputs that no step has made."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.scheduler.group import DPGroup

COMMON_EVERY = 16
"""Steps between two votes of a job's processes on whether all want a call at a common step
boundary."""
LOCK_POLL = 0.01
"""Seconds a caller waits for the engine's lock before it looks whether a step has made its call."""


class StepBoundary:
    """One engine's. lock: held while the engine steps.

    group: the job's data-parallel group; ranks: how many of its ranks are here; spans_processes:
    other processes have the rest, and take every step with this one.
    """

    def __init__(
        self, lock: threading.RLock, group: DPGroup, ranks: int, spans_processes: bool
    ) -> None:
        self._lock, self._group, self._ranks = lock, group, ranks
        self.spans_processes = spans_processes
        self._calls: deque[tuple[Callable[[], object], Future]] = deque()
        self._common: deque[Callable[[int], None]] = deque()
        self._stepping = False
        self._steps = 0  # taken; the same in all processes of a job
        self.undelivered: list[RequestOutput] = []
        """Made between steps, returned by the next one."""

    # ---- any thread ------------------------------------------------------------------------------

    def run[T](self, call: Callable[[], T]) -> T:
        """Runs call() while no step is going on, under the engine's lock, and returns its result.

        Raises what it raises; RuntimeError when called from within a step (a hook, an output
        callback).
        """
        task: Future = Future()
        self._calls.append((call, task))
        # a loop of steps may never let go of the lock: then the next step makes the call
        while not task.done():
            if self._lock.acquire(timeout=LOCK_POLL):
                try:
                    self._run_calls()
                finally:
                    self._lock.release()
        return task.result()

    def run_in_all_processes(self, call: Callable[[int], None]) -> None:
        """Has the stepping thread run call(key) between the same two steps in all processes of the
        job, once all have asked; key is the same in all and never comes twice. Returns at once. The
        n-th calls of all processes belong together."""
        self._common.append(call)

    # ---- the engine ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._run_calls()
        self._steps += 1
        if self.spans_processes and self._steps % COMMON_EVERY == 0:
            self._run_common()
        self._stepping = True

    def end_step(self) -> None:
        """Not called for a step that has failed: what it has left behind is no state to look at."""
        self._stepping = False

    def take_undelivered(self) -> list[RequestOutput]:
        outputs, self.undelivered = self.undelivered, []
        return outputs

    @property
    def needs_step(self) -> bool:
        """Only a step delivers these outputs, or makes these calls."""
        return bool(self.undelivered or self._common)

    def _run_calls(self) -> None:
        while self._calls:
            call, task = self._calls.popleft()
            try:
                if self._stepping:
                    raise RuntimeError("not from within a step")
                task.set_result(call())
            except Exception as error:
                task.set_exception(error)

    def _run_common(self) -> None:
        if self._group.all_reduce_min([int(bool(self._common))] * self._ranks):
            key = self._group.all_reduce_min([secrets.randbits(62)] * self._ranks)
            self._common.popleft()(key)
