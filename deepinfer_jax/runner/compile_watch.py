"""Counts XLA compilations of the whole process, so that a compile where none is expected cannot go
unseen.

`StepPrograms` counts step programs that warm-up missed; this also sees everything else: an eager
operation, a new shape of some helper, another library. It listens to JAX's own monitoring events
and costs nothing between compiles.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax.monitoring

# one per executable, fetched from the persistent cache or not
_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileWatch:
    """Counters since the process's first use of `compile_watch()`. Thread-safe.

    compiles: executables asked of XLA. cache_hits: how many of them the persistent compilation
    cache had. unexpected: compiles while no `expected()` block was open in any thread. recent: what
    the last of those were, and in which thread.
    """

    def __init__(self) -> None:
        self.compiles = self.cache_hits = self.unexpected = 0
        self.recent: deque[str] = deque(maxlen=16)
        self._expected = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, name: str, seconds: float, **about: Any) -> None:
        if name == _COMPILED:
            with self._lock:
                self.compiles += 1
                if not self._expected:
                    self.unexpected += 1
                    self.recent.append(
                        f"{about.get('fun_name', '?')} in thread {threading.current_thread().name}"
                    )

    def _on_event(self, name: str, **_: Any) -> None:
        if name == _CACHE_HIT:
            with self._lock:
                self.cache_hits += 1

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Compiles inside, in whatever thread, are meant to happen: an engine is being built, or
        one without warm-up runs."""
        with self._lock:
            self._expected += 1
        try:
            yield
        finally:
            with self._lock:
                self._expected -= 1


@functools.cache  # one for the process: not every JAX version lets a listener go again
def compile_watch() -> CompileWatch:
    """The process's counter."""
    return CompileWatch()
