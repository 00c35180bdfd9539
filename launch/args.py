"""Flags of the processes of a deployment."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LaunchArgs:
    """Flags of every engine process."""

    router: str = "127.0.0.1:9510"
    """The router's address, host:port."""
    name: str | None = None
    """Unique among the living engines; a restarted process should keep it. By default role, host
    and process number."""
    data: str = "127.0.0.1:0"
    """COMPLETION: where hand-overs are taken, host:port (port 0: any free one). PROMPT, --transport
    device: the host for pulls."""
    advertise: str | None = None
    """COMPLETION: the host by which prompt engines reach this process, where it is not the one in
    --data."""
    transport: str = "host"
    """How KV travels between engines: host (through host memory, encrypted with the secret) or
    device (jax.experimental.transfer, unencrypted; where one side has it not, or
    tensor_parallel_size differs, host is used)."""
    secret_file: str | None = None
    """File with the deployment's shared secret; needed as soon as anything listens on more than
    loopback."""
    deadline: float = 10.0
    """Seconds without progress after which a hand-over, a vote or a connection has failed."""
    heartbeat: float = 0.5
    """Seconds between signs of life."""
    peer_timeout: float = 5.0
    """Seconds of silence after which a peer is lost."""
    drain_timeout: float = 60.0
    """Seconds that requests get to finish after SIGTERM."""
    reserve_fraction: float = 1.0
    """COMPLETION: share of max_tokens that must be free before a request is taken."""
    coordinator: str | None = None
    """host:port of process 0, for one job of several processes."""
    num_processes: int | None = None
    """Processes of this job."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    local_devices: tuple[int, ...] = ()
    """Devices of this host that this process drives; by default all (one process per GPU: give its
    index)."""
    cpu_devices: int | None = None
    """On CPU: pretend to have this many devices."""


@dataclasses.dataclass
class RouterArgs:
    """Flags of the router process."""

    listen: str = "127.0.0.1:9510"
    """Where engines and clients connect, host:port (port 0: any free one)."""
    http_host: str = "127.0.0.1"
    """Where /healthz, /metrics and /status are served."""
    http_port: int = 9511
    """Port of /healthz, /metrics and /status (0: any free one)."""
    secret_file: str | None = None
    """File with the deployment's shared secret; needed as soon as --listen is more than loopback.
    """
    deadline: float = 10.0
    """Seconds requests wait for a missing role before they end with a reason."""
    stall_timeout: float = 30.0
    """Seconds one step of an engine may take before the engine counts as dead."""
    heartbeat: float = 0.5
    """Seconds between signs of life."""
    peer_timeout: float = 5.0
    """Seconds of silence after which a peer is lost."""
    drain_timeout: float = 60.0
    """Seconds that requests get to finish after SIGTERM."""
    max_requests: int = 65536
    """The most unfinished completions; a request has n of them, and more are refused."""
    max_n: int = 1024
    """The largest n of one request."""
