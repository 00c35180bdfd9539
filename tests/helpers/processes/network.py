"""Hosts of a private network for tests: network namespaces on a bridge. A cut one gets and sends
nothing, and nobody is told.

The program must own its network: `own_network()` starts it again in a user and network namespace of
its own, which needs util-linux and iproute2 and a kernel that lets us (as root, or where user
namespaces are not restricted).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SUBNET = "10.77.0"
MARK = "DEEPINFER_TEST_NETWORK"


def why_not() -> str | None:
    """What this machine refuses; None: networks can be made."""
    missing = [
        c for c in ("unshare", "nsenter", "setpriv", "ip", "bridge") if shutil.which(c) is None
    ]
    if missing:
        return f"no {', '.join(missing)}"
    script = (
        "ip link add bridge0 type bridge && ip link add v1 type veth peer name v2 && unshare -n"
        " true"
    )
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", script], capture_output=True, text=True, timeout=30
    )
    return None if done.returncode == 0 else done.stderr.strip()


def own_network() -> None:
    """Returns in a process whose network is its own; the caller's command line is run again to get
    there."""
    if MARK not in os.environ:
        os.environ[MARK] = "1"
        os.execvp("unshare", ["unshare", "-rn", "--", sys.executable, *sys.argv])


def _run(command: str, prefix: Sequence[str] = ()) -> None:
    subprocess.run([*prefix, *command.split()], check=True)


class Host:
    """prefix: what runs a command there."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address, self.port = name, f"{SUBNET}.{number}", f"v{number}"
        self._holder = subprocess.Popen(
            ["unshare", "-n", "cat"], stdin=subprocess.PIPE
        )  # ends with this process
        pid, own = self._holder.pid, os.readlink("/proc/self/ns/net")
        limit = time.monotonic() + 10
        while (
            os.readlink(f"/proc/{pid}/ns/net") == own
            or Path(f"/proc/{pid}/comm").read_text().strip() != "cat"
        ):
            assert time.monotonic() < limit
            time.sleep(0.005)
        self.prefix = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            "nsenter",
            "-t",
            str(pid),
            "-n",
            "--",
        ]  # nothing outlives us
        _run(f"ip link add {self.port} type veth peer name eth0 netns {pid}")
        _run(f"ip link set {self.port} master bridge0 up")
        for command in (
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
        ):
            _run(f"ip {command}", self.prefix)

    def cut(self) -> None:
        """The bridge drops whatever comes from it or would go to it."""
        _run(f"bridge link set dev {self.port} state 0")

    def heal(self) -> None:
        _run(f"bridge link set dev {self.port} state 3")

    def split(self, other: Host) -> None:
        """The two cannot reach each other, but everybody else."""
        for here, there in ((self, other), (other, self)):
            _run(f"ip route add blackhole {there.address}/32", here.prefix)

    def rejoin(self, other: Host) -> None:
        for here, there in ((self, other), (other, self)):
            _run(f"ip route del blackhole {there.address}/32", here.prefix)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Network:
    """A bridge, this process at one of its ports, and hosts at the others."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        _run("ip link set lo up")
        _run("ip link add bridge0 type bridge")
        _run(f"ip addr add {SUBNET}.1/24 dev bridge0")
        _run("ip link set bridge0 up")

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = Host(name, len(self.hosts) + 2)
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
