"""Traces of engine steps with jax.profiler, on request."""

from __future__ import annotations

from pathlib import Path

import jax


class StepProfiler:
    """At most one trace at a time, for a number of steps or until stopped. Costs one comparison per
    step while idle."""

    def __init__(self) -> None:
        self.active = False
        self._steps_left: int | None = None

    def start(self, folder: str | Path, num_steps: int | None = None) -> None:
        """RuntimeError if a trace is running; ValueError if num_steps is given and not positive."""
        if self.active:
            raise RuntimeError("a profile is being taken already: call stop_profile first")
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_steps must be >= 1, got {num_steps}")
        jax.profiler.start_trace(str(folder))
        self.active, self._steps_left = True, num_steps

    def after_step(self) -> None:
        """Counts a step; ends the trace after the last one asked for."""
        if self._steps_left is not None:
            self._steps_left -= 1
            if not self._steps_left:
                self.stop()

    def stop(self) -> None:
        """Writes the trace. Does nothing if none is running."""
        if self.active:
            self.active, self._steps_left = False, None
            jax.profiler.stop_trace()
