"""Votes between the processes of one job, over TCP sockets of the hosts: nothing of them touches an
accelerator's stream.

Process 0 collects one integer from everybody and answers with the minimum. Every vote has a number
and a deadline, so that a process that has died or stands still, or takes other steps than the
others, is named instead of waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

_VOTE = struct.Struct("<qq")  # number of the vote, value
_HELLO = struct.Struct("<16sq")  # token, process
START_TIMEOUT = 600.0
"""Seconds until every process has built its engine: loading and compiling may take them very
different times."""


class VoteFailed(RuntimeError):
    """A process of the job is gone, stands still or is out of step."""


class SocketDPGroup:
    """A scheduler.group.DPGroup over processes. `bind` says which ranks are whose before the first
    vote."""

    def __init__(
        self, process: int, processes: int, deadline: float, peers: dict[int, socket.socket]
    ) -> None:
        """peers: for process 0 everybody else's connection, for others {0: connection}."""
        self.process, self.processes, self.deadline = process, processes, deadline
        self._peers = peers
        self._number = 0
        self.size = processes
        self.local_ranks: Sequence[int] = (process,)
        self.seconds = 0.0  # spent in votes
        for s in peers.values():
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.settimeout(deadline)

    def bind(self, size: int, local_ranks: Sequence[int]) -> None:
        """ValueError for a process without a rank: it could not take part in scheduling."""
        if not local_ranks:
            raise ValueError(
                f"process {self.process} owns none of the {size} DP ranks: every process needs at"
                " least one"
            )
        self.size, self.local_ranks = size, tuple(local_ranks)

    @property
    def votes(self) -> int:
        return self._number

    def all_reduce_min(self, values: list[int]) -> int:
        if len(values) != len(self.local_ranks):
            raise ValueError(f"{len(values)} votes for {len(self.local_ranks)} local ranks")
        start = time.perf_counter()
        result = self._vote(min(values))
        self.seconds += time.perf_counter() - start
        return result

    def agree_min(self, value: int, timeout: float = START_TIMEOUT) -> int:
        """The minimum over the processes, with a deadline of its own: at start, where they may be
        minutes apart."""
        for s in self._peers.values():
            s.settimeout(timeout)
        value = self._vote(value)
        for s in self._peers.values():
            s.settimeout(self.deadline)
        return value

    def wait_for_all(self) -> None:
        self.agree_min(0)

    def must_agree(self, name: str, value: object) -> None:
        """Raises ValueError, in every process, unless all have the same value; integers are named
        on both sides."""
        is_int = isinstance(value, int)
        number = (
            int(value)
            if is_int
            else int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
        )
        low, high = self.agree_min(number), -self.agree_min(-number)
        if low != high:
            others = f"from {low} to {high}" if is_int else "another value elsewhere"
            raise ValueError(
                f"the processes of a job must agree on {name}: {value!r} in process {self.process},"
                f" {others} in the job"
            )

    def _vote(self, value: int) -> int:
        self._number += 1
        if self.process:
            self._send(0, value)
            return self._receive(0)
        for process in self._peers:
            value = min(value, self._receive(process))
        for process in self._peers:
            self._send(process, value)
        return value

    def _send(self, process: int, value: int) -> None:
        try:
            self._peers[process].sendall(_VOTE.pack(self._number, value))
        except OSError as error:
            raise VoteFailed(f"vote {self._number}: process {process} is gone: {error}") from error

    def _receive(self, process: int) -> int:
        try:
            number, value = _VOTE.unpack(_read(self._peers[process], _VOTE.size))
        except TimeoutError as error:
            raise VoteFailed(
                f"vote {self._number}: nothing from process {process} for"
                f" {self._peers[process].gettimeout()} s"
            ) from error
        except OSError as error:
            raise VoteFailed(f"vote {self._number}: process {process} is gone: {error}") from error
        if number != self._number:
            raise VoteFailed(
                f"process {process} is at vote {number}, this process ({self.process}) at"
                f" {self._number}"
            )
        return value

    def close(self) -> None:
        for s in self._peers.values():
            s.close()


def _read(s: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = s.recv(size - len(data))
        if not more:
            raise ConnectionResetError("connection closed")
        data += more
    return data


def listen_for_votes(
    processes: int, token: bytes, server: socket.socket, deadline: float, timeout: float
) -> SocketDPGroup:
    """Process 0: waits for everybody else, lets nobody in without the token."""
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + timeout
    while len(peers) < processes - 1:
        server.settimeout(max(0.01, until - time.monotonic()))
        try:
            s, _ = server.accept()
            s.settimeout(5.0)
            given, process = _HELLO.unpack(_read(s, _HELLO.size))
        except TimeoutError as error:
            if time.monotonic() < until:
                continue  # a connection that says nothing
            missing = sorted(set(range(1, processes)) - peers.keys())
            raise VoteFailed(
                f"processes {missing} of {processes} did not connect for votes within {timeout} s"
            ) from error
        except OSError:
            continue
        if not hmac.compare_digest(given, token) or not 0 < process < processes or process in peers:
            s.close()
            continue
        peers[process] = s
    server.close()
    return SocketDPGroup(0, processes, deadline, peers)


def join_votes(
    address: tuple[str, int],
    process: int,
    processes: int,
    token: bytes,
    deadline: float,
    timeout: float,
) -> SocketDPGroup:
    try:
        s = socket.create_connection(address, timeout=timeout)
        s.sendall(_HELLO.pack(token, process))
    except OSError as error:
        raise VoteFailed(
            f"process {process} cannot reach process 0 at {address[0]}:{address[1]} for votes:"
            f" {error}"
        ) from error
    return SocketDPGroup(process, processes, deadline, {0: s})


def connect_votes(
    process: int,
    processes: int,
    deadline: float,
    coordinator: str | None = None,
    timeout: float = 60.0,
) -> SocketDPGroup:
    """After jax.distributed.initialize. Process 0 chooses port and token, jax.distributed tells the
    others."""
    import numpy as np
    from jax.experimental import multihost_utils

    note = np.zeros(256, np.uint8)
    if process == 0:
        host = _own_host(coordinator)
        server = socket.create_server((host, 0), backlog=processes)
        token = secrets.token_bytes(16)
        text = token + f"{host}:{server.getsockname()[1]}".encode()
        note[: len(text)] = np.frombuffer(text, np.uint8)
    note = np.asarray(multihost_utils.broadcast_one_to_all(note), np.uint8).tobytes()
    if process == 0:
        return listen_for_votes(processes, token, server, deadline, timeout)
    host, _, port = note[16:].rstrip(b"\0").decode().rpartition(":")
    return join_votes((host, int(port)), process, processes, note[:16], deadline, timeout)


def _own_host(coordinator: str | None) -> str:
    """The address of this host that the others use: the coordinator's, which runs in process 0, if
    it is one of this host's (not a service's); its host name may stand for loopback only."""
    if coordinator is not None:
        address = socket.gethostbyname(coordinator.rpartition(":")[0])
        with contextlib.suppress(OSError), socket.create_server((address, 0)):
            return address
    return socket.gethostbyname(socket.gethostname())
