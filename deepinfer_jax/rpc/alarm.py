"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import os
import threading


class Alarm:
    """A pipe. `fd` becomes readable when somebody rings."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._rung, self._closed, self._lock = False, False, threading.Lock()

    def ring(self) -> None:
        """From any thread; also after `close`."""
        if self._rung:
            return
        with self._lock:
            if not self._closed:
                self._rung = True
                with contextlib.suppress(BlockingIOError):  # it is readable already
                    os.write(self._write, b"x")

    def reset(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        self._rung = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._write)
        os.close(self.fd)
