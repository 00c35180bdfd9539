"""Real processes for tests: a router and engines on loopback ports, their output, and ways to hurt
them."""

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

from network import Network

ROOT = Path(__file__).parents[3]
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
            self.popen = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.env, cwd=ROOT
            )

    @property
    def text(self) -> str:
        """What it has printed since its last start."""
        return self.log.read_bytes()[self._from :].decode(errors="replace")

    def wait_for(self, pattern: str, timeout: float = START_TIMEOUT) -> re.Match[str]:
        limit = time.monotonic() + timeout
        while (found := re.search(pattern, self.text)) is None:
            if self.popen.poll() is not None or time.monotonic() > limit:
                raise AssertionError(
                    f"{self.name} (exit code {self.popen.poll()}) never printed"
                    f" {pattern!r}:\n{self.text[-3000:]}"
                )
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
    """Call `close()`, or use it as a context manager. Every process is this object's child; nothing
    outlives it.

    With a network every engine is a host of its own (the processes of a job share one), and there
    is a secret; without one all are on loopback, with a secret if one is given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        network: Network | None = None,
        secret: bytes | None = None,
        plain: bool = False,
        **router_flags: Any,
    ) -> None:
        """plain: programs are compiled as users have them, not for short start-up."""
        self.folder, self.network = folder, network
        self.processes: dict[str, Process] = {}
        self.hosts: dict[str, str] = {}  # process -> host
        self.env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "DEEPINFER_LOG_LEVEL": "INFO",
            "PYTHONUNBUFFERED": "1",
        }
        if not plain:  # no C++ compiler at work while tests wait
            self.env |= {
                "XLA_FLAGS": "--xla_backend_optimization_level=0",
                "DEEPINFER_CPU_NATIVE": "xla",
            }
        self.secret: Path | None = None
        if network is not None or secret is not None:
            self.secret = folder / "secret"
            self.secret.touch(mode=0o600)
            self.secret.write_bytes(secret or b"of this deployment's processes")
        self.port, self.http = free_port(), free_port()
        self.router_host = self._host("router")
        flags = {
            "listen": self.address,
            "http-host": self.router_host,
            "http-port": self.http,
            **self._common,
            **dashed(router_flags),
        }
        self.router = self._launch("router", "router", flags, "router")
        self.router.wait_for("listening on")

    @property
    def address(self) -> str:
        return f"{self.router_host}:{self.port}"

    @property
    def _common(self) -> dict[str, Any]:
        return {"heartbeat": HEARTBEAT} | (
            {} if self.secret is None else {"secret-file": self.secret}
        )

    def _host(self, name: str) -> str:
        return "127.0.0.1" if self.network is None else self.network.host(name).address

    def engine(
        self, role: str, name: str, model: str = "llama", *, log: str | None = None, **flags: Any
    ) -> Process:
        """Starts an engine process; `joined` waits for it. flags: underscores become dashes. model:
        of tests/golden, or "demo"."""
        path = model if model == "demo" else ROOT / "tests" / "golden" / model
        sizes = {k: v for k, v in SMALL.items() if role != "completion" or k != "prefill-buckets"}
        own = {"model": path, "router": self.address, "name": name, "data": f"{self._host(name)}:0"}
        return self._launch(log or name, role, own | self._common | sizes | dashed(flags), name)

    def job(
        self,
        role: str,
        name: str,
        model: str = "llama",
        *,
        processes: int = 2,
        own: Any = None,
        **flags: Any,
    ) -> list[str]:
        """One role over several processes; the engines' names. own: flags by process."""
        address = f"{self._host(name)}:{free_port()}"
        for i in range(processes):
            part = {
                "coordinator": address,
                "num_processes": processes,
                "process_id": i,
                **((own or {}).get(i, {})),
            }
            self.engine(role, name, model, log=f"{name}.{i}", **flags, **part)
        return [f"{name}.{i}" for i in range(processes)]

    def command(self, name: str, host: str, arguments: list[str]) -> Process:
        """Any other Python process of the deployment, such as a client."""
        return self._run(name, host, [sys.executable, *arguments])

    def joined(self, *names: str) -> None:
        for name in names:
            self.processes[name].wait_for("joined the router")

    def wait_for_engines(self, *names: str, timeout: float = 30.0) -> None:
        """Until exactly these serve."""
        limit = time.monotonic() + timeout
        while (
            serving := {e["name"] for e in self.status()["engines"] if e["state"] == "serving"}
        ) != set(names):
            assert time.monotonic() < limit, f"serving {serving}, expected {set(names)}"
            time.sleep(0.05)

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Until no engine holds a block, a request or a hand-over: nothing has leaked."""
        start = quiet_since = time.monotonic()
        while (
            time.monotonic() - quiet_since < 3 * HEARTBEAT
        ):  # what engines say of themselves is up to a heartbeat old
            status = self.status()
            held = {
                e["name"]: {k: e.get(k, 0) for k in ("waiting", "running", "cache", "hand_overs")}
                for e in status["engines"]
            }
            if status["requests"] or any(any(h.values()) for h in held.values()):
                quiet_since = time.monotonic()
                assert quiet_since - start < timeout, (
                    f"{status['requests']} requests; still held: {held}"
                )
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status")[1])

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://{self.router_host}:{self.http}{path}", timeout=10
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _launch(self, name: str, role: str, flags: dict[str, Any], host: str) -> Process:
        command = [sys.executable, "-m", f"deepinfer_jax.launch.{role}"]
        for key, value in flags.items():
            command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return self._run(name, host, command)

    def _run(self, name: str, host: str, command: list[str]) -> Process:
        prefix = [] if self.network is None else self.network.host(host).prefix
        self.hosts[name] = host
        self.processes[name] = Process(name, [*prefix, *command], self.folder, self.env)
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
