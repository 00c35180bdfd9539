"""How long a generation took, and how much of that was the compiler."""

from __future__ import annotations

import functools
import time
from typing import Any, Self

import jax.monitoring

_COMPILING = (
    "/jax/core/compile/backend_compile_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)


class _CompileClock:
    """Seconds spent in the compiler since the process's first Stopwatch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, name: str, seconds: float, **_: Any) -> None:
        if name in _COMPILING:
            self.seconds += seconds


_compile_clock = functools.cache(
    _CompileClock
)  # one for the process: not every JAX version lets a listener go again


class Stopwatch:
    """Measures a `with` block: `seconds` of wall time, `compiling` of it for programs not met
    before."""

    def __enter__(self) -> Self:
        self._start, self._compiled = time.perf_counter(), _compile_clock().seconds
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.compiling = _compile_clock().seconds - self._compiled

    def report(self, prompts: int, tokens: int) -> str:
        """One line: counts, seconds, tokens per second."""
        speed = f"{self.seconds:.1f} s: {tokens / self.seconds:.1f} tokens/s"
        line = f"{prompts} prompt{'' if prompts == 1 else 's'}, {tokens} tokens in {speed}"
        running = self.seconds - self.compiling
        if self.compiling < 0.1 * self.seconds or running <= 0:
            return line
        return (
            f"{line} ({self.compiling:.1f} s of it compiling; {tokens / running:.1f} tokens/s"
            " without)"
        )
