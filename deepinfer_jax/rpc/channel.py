"""A conversation over one connection, as those who talk see it; hub.py has the sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from deepinfer_jax.rpc import messages as wire


@dataclass(frozen=True)
class HubConfig:
    """heartbeat, peer_timeout, connect_timeout: seconds. max_frame, max_queued_bytes: bytes;
    max_queued: messages per channel."""

    heartbeat: float = 0.5
    peer_timeout: float = 5.0
    connect_timeout: float = 10.0
    max_frame: int = 1 << 30
    max_queued: int = 65536
    max_queued_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat < self.peer_timeout:
            raise ValueError(
                f"need 0 < heartbeat < peer_timeout, got {self.heartbeat} and {self.peer_timeout}"
            )


class Handler(Protocol):
    """Told, in the hub's thread, what happens on a channel. None of these may wait."""

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        """Dialling side only."""
        ...

    def message(
        self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]
    ) -> None: ...

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        """The channel has ended. final: the other side refused for good. Not called for one's own
        close()."""
        ...


class ChannelHub(Protocol):
    """What owns a channel's socket."""

    clock: Callable[[], float]

    def call(self, function: Callable[[], None]) -> None: ...

    def post_message(self, channel: Channel, frames: list[Any]) -> None: ...

    def close_channel(self, channel: Channel, reason: str, final: bool) -> None: ...


class Channel:
    """One end of a conversation. `send` and `close` may be called from any thread."""

    def __init__(
        self, hub: ChannelHub, socket: zmq.Socket, identity: bytes | None, label: str
    ) -> None:
        self.hub, self.socket, self.identity = hub, socket, identity
        self.peer = label
        self.session = ""
        self.handler: Handler | None = None
        self.monitor: zmq.Socket | None = None
        self.is_open = self.closed = False
        self.last_seen = hub.clock()
        self.last_ping = 0.0
        self.peer_ping = wire.Ping()
        self.queue: deque[list[Any]] = deque()
        self.queued_bytes = 0

    def send(self, message: wire.WireMessage, frames: Sequence[Any] = ()) -> None:
        """Enqueues; a closed channel swallows it (its handler has been told)."""
        if not self.closed:
            self.hub.post_message(self, [wire.encode(message), *frames])

    def close(self, reason: str = "closed", final: bool = False) -> None:
        """Tells the other side why and forgets it."""
        self.hub.close_channel(self, reason, final)


class NotNow(ValueError):
    """A refusal that may not last: the other side should ask again."""


Accept = Callable[[Channel, wire.Hello], wire.Welcome]
"""Sets channel.handler and returns the welcome; raises ValueError to refuse."""


def frame_size(frame: Any) -> int:
    """Bytes of a frame, whatever holds them."""
    return len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes
