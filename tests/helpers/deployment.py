"""Real processes for tests: a router and engines on loopback ports, their output, and ways to hurt them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "max-model-len": 256,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 256,
    "num-blocks": 80,
    "prefill-buckets": 256,
    "decode-buckets": 8,
}
START_TIMEOUT = 150.0
HEARTBEAT = 0.2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def dashed(flags: dict[str, Any]) -> dict[str, Any]:
    return {k.replace("_", "-"): v for k, v in flags.items()}


class Process:
    def __init__(self, name: str, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.name, self.command, self.env = name, command, env
        self.log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Also after it has ended: the same command again."""
        self._from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=self.env, cwd=ROOT)

    @property
    def text(self) -> str:
        """What it has printed since its last start."""
        return self.log.read_bytes()[self._from :].decode(errors="replace")

    def wait_for(self, pattern: str, timeout: float = START_TIMEOUT) -> re.Match[str]:
        limit = time.monotonic() + timeout
        while (found := re.search(pattern, self.text)) is None:
            if self.popen.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"{self.name} (exit code {self.popen.poll()}) never printed {pattern!r}:\n{self.text[-3000:]}")
            time.sleep(0.02)
        return found

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        return self.popen.wait(timeout)

    def kill(self) -> None:
        """kill -9, and reaps it."""
        self.popen.kill()
        self.popen.wait(30)


class Deployment:
    """Call `close()`, or use it as a context manager. Every process is this object's child; nothing outlives it."""

    def __init__(self, folder: Path, **router_flags: Any) -> None:
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self.env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "DEEPINFER_LOG_LEVEL": "INFO",
            "DEEPINFER_CPU_NATIVE": "xla",  # no C++ compiler at work while tests wait
            "PYTHONUNBUFFERED": "1",
        }
        self.port, self.http = free_port(), free_port()
        flags = {"listen": f"127.0.0.1:{self.port}", "http-port": self.http, "heartbeat": HEARTBEAT, **dashed(router_flags)}
        self.router = self._launch("router", "router", flags)
        self.router.wait_for("listening on")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def engine(self, role: str, name: str, model: str = "llama", *, log: str | None = None, **flags: Any) -> Process:
        """Starts an engine process; `joined` waits for it. flags: underscores become dashes."""
        path = ROOT / "tests" / "golden" / model
        sizes = {k: v for k, v in SMALL.items() if role != "completion" or k != "prefill-buckets"}
        return self._launch(
            log or name, role, {"model": path, "router": self.address, "name": name, "heartbeat": HEARTBEAT, **sizes, **dashed(flags)}
        )

    def joined(self, *names: str) -> None:
        for name in names:
            self.processes[name].wait_for("joined the router")

    def wait_for_engines(self, *names: str, timeout: float = 30.0) -> None:
        """Until exactly these serve."""
        limit = time.monotonic() + timeout
        while (serving := {e["name"] for e in self.status()["engines"] if e["state"] == "serving"}) != set(names):
            assert time.monotonic() < limit, f"serving {serving}, expected {set(names)}"
            time.sleep(0.05)

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Until no engine holds a block, a request or a hand-over: nothing has leaked."""
        start = quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 3 * HEARTBEAT:  # what engines say of themselves is up to a heartbeat old
            status = self.status()
            held = {e["name"]: {k: e.get(k, 0) for k in ("waiting", "running", "cache", "hand_overs")} for e in status["engines"]}
            if status["requests"] or any(any(h.values()) for h in held.values()):
                quiet_since = time.monotonic()
                assert quiet_since - start < timeout, f"{status['requests']} requests; still held: {held}"
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status")[1])

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _launch(self, name: str, role: str, flags: dict[str, Any]) -> Process:
        command = [sys.executable, "-m", f"deepinfer_jax.launch.{role}"]
        for key, value in flags.items():
            command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        self.processes[name] = Process(name, command, self.folder, self.env)
        return self.processes[name]

    def close(self) -> None:
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.kill()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
