"""Renders chat templates in a child process with limits (template_process.py says why).

The process is started by the first rendering, serves all templates of this process one after the
other, and is replaced when it was ended. It ends with its parent: its input is closed then.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WALL_SECONDS = 3.0
"""Of one rendering, before the process is killed."""
START_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("template_process.py")
_LENGTH = struct.Struct("<Q")


class TemplateFailure(ValueError):
    """A template could not be rendered; the message says why."""


class TemplateRenderer:
    """Callers of all threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> tuple[str, list[str]]:
        """(the text, the variables given that the template does not read). request: see
        template_process.py. Raises TemplateFailure."""
        body = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            try:
                reply = self._ask(process, _LENGTH.pack(len(body)) + body, WALL_SECONDS)
            except TimeoutError:
                self._end()
                raise TemplateFailure(f"it takes longer than {WALL_SECONDS:g} s") from None
            except (OSError, EOFError):
                code = self._end()
                raise TemplateFailure(
                    f"its process ended ({code}): too deep or too large"
                ) from None
        if "error" in reply:
            raise TemplateFailure(reply["error"])
        return reply["text"], reply["unread"]

    def close(self) -> None:
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """A process of this process: a fork of ours must not share its parent's."""
        alive = self._process is not None and self._process.poll() is None
        if not alive or self._owner != os.getpid():
            self._process, self._owner = self._start(), os.getpid()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(p for p in sys.path if p)
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.set_blocking(process.stdout.fileno(), False)
        os.set_blocking(process.stdin.fileno(), False)
        try:
            self._ask(process, b"", START_SECONDS)
        except (OSError, EOFError) as error:
            process.kill()
            process.wait()
            raise TemplateFailure(f"cannot start the process that renders it: {error}") from error
        return process

    def _ask(
        self, process: subprocess.Popen[bytes], message: bytes, seconds: float
    ) -> dict[str, Any]:
        """Sends a message and reads a reply, within the time given (TimeoutError)."""
        deadline = time.monotonic() + seconds
        source, target = process.stdout.fileno(), process.stdin.fileno()
        left, received = memoryview(message), bytearray()
        while True:
            rest = deadline - time.monotonic()
            readable, writable, _ = select.select(
                [source], [target] if left else [], [], max(rest, 0)
            )
            if not readable and not writable:
                raise TimeoutError(f"no reply within {seconds:g} s")
            if writable:
                left = left[os.write(target, left[: 1 << 16]) :]
            if readable:
                if not (data := os.read(source, 1 << 20)):
                    raise EOFError
                received += data
            if len(received) >= _LENGTH.size:
                size = _LENGTH.unpack_from(received)[0]
                if len(received) == _LENGTH.size + size:
                    return json.loads(received[_LENGTH.size :])

    def _end(self) -> int:
        """Ends the process; returns its exit code."""
        process, self._process = self._process, None
        process.kill()
        process.stdin.close()
        process.stdout.close()
        return process.wait()


RENDERER = TemplateRenderer()
"""Of this Python process."""
atexit.register(RENDERER.close)
