"""Connections between processes: one thread owns all sockets, anybody may send.

A `Channel` is one conversation over one TCP connection: hello, welcome or refusal, messages in
order, heartbeats, the end. It never reconnects by itself: when TCP breaks, when nothing is heard
for `peer_timeout`, when bytes make no sense or a queue is full, the channel is lost, its handler is
told why, and whoever wants another one dials again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.security import Security, stop_authenticator

logger = logging.getLogger(__name__)

READS_PER_ROUND = 256
BACKLOG_RETRY = 0.001
"""Seconds until a full socket is tried again."""
SOCKET_QUEUE = 256
"""Messages libzmq may hold per connection and direction; what does not fit waits in the channel's
own bounded queue."""

_ENDINGS = {
    zmq.EVENT_DISCONNECTED: "the connection was closed by the other side",
    zmq.EVENT_CLOSED: "no connection: nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "the other side refused the handshake: the shared secrets differ, or only one side has one"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        "the handshake made no sense: the shared secrets differ, or only one side has one"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the other side does not accept this shared secret",
}
_FINAL = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


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


class Channel:
    """One end of a conversation. `send` and `close` may be called from any thread."""

    def __init__(self, hub: Hub, socket: zmq.Socket, identity: bytes | None, label: str) -> None:
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
            self.hub._post_message(self, [wire.encode(message), *frames])

    def close(self, reason: str = "closed", final: bool = False) -> None:
        """Tells the other side why and forgets it."""
        self.hub.call(lambda: self.hub._close(self, reason, final))


class NotNow(ValueError):
    """A refusal that may not last: the other side should ask again."""


Accept = Callable[[Channel, wire.Hello], wire.Welcome]
"""Sets channel.handler and returns the welcome; raises ValueError to refuse."""


class Hub:
    """The thread and its sockets. on_ping: what this process reports of itself with every
    heartbeat."""

    def __init__(
        self,
        name: str,
        security: Security | None = None,
        config: HubConfig | None = None,
        on_ping: Callable[[], wire.Ping] = wire.Ping,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.security, self.config, self.on_ping, self.clock = (
            name,
            security or Security(),
            config or HubConfig(),
            on_ping,
            clock,
        )
        self.context = zmq.Context()
        self.counters = {"garbage": 0, "refused": 0, "lost": 0}
        self._poller = zmq.Poller()
        self._servers: dict[zmq.Socket, tuple[Accept, dict[bytes, Channel]]] = {}
        self._dialled: dict[zmq.Socket, Channel] = {}
        self._monitors: dict[zmq.Socket, Channel] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[list[Any]] = []  # [next, every, function]
        self._backlog: set[Channel] = set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._signalled, self._wake_lock = False, threading.Lock()
        self._stopping, self._ended, self._linger = False, False, 0.0
        self.thread = threading.Thread(target=self._run, name=f"hub-{name}", daemon=True)

    # ---- from any thread -------------------------------------------------------------------------

    def listen(self, endpoint: str, accept: Accept) -> str:
        """Before start(). Binds "tcp://host:port" (port 0: any); the endpoint as bound. ValueError
        without a needed secret."""
        self.security.check_bind(endpoint)
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        self.security.server(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from error
        self._servers[socket] = (accept, {})
        self._poller.register(socket, zmq.POLLIN)
        return socket.last_endpoint.decode()

    def dial(self, endpoint: str, hello: wire.Hello, handler: Handler) -> None:
        """Connects; the handler hears `opened` or `lost`."""
        self.call(lambda: self._dial(endpoint, hello, handler))

    def call(self, function: Callable[[], None]) -> None:
        """Runs it in the hub's thread, after what was enqueued before."""
        self._calls.append(function)
        self._signal()

    def every(self, seconds: float, function: Callable[[], None]) -> None:
        self.call(lambda: self._timers.append([self.clock(), seconds, function]))

    def start(self) -> Hub:
        self.thread.start()
        return self

    def stop(self, linger: float = 1.0) -> None:
        """Ends the thread; what is queued gets `linger` seconds to leave."""
        if self._stopping:
            return
        self._stopping, self._linger = True, linger
        self._signal()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(linger + 10)

    def _signal(self) -> None:
        if self._signalled:
            return
        with self._wake_lock:
            if not self._ended:
                self._signalled = True
                with contextlib.suppress(BlockingIOError):  # a wake-up is pending
                    os.write(self._wake_write, b"x")

    def _post_message(self, channel: Channel, frames: list[Any]) -> None:
        self.call(lambda: self._enqueue(channel, frames))

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = self.clock()
        try:
            while not self._stopping:
                due = min([next_beat, *(t[0] for t in self._timers)])
                wait = BACKLOG_RETRY if self._backlog else max(0.0, due - self.clock())
                ready = dict(self._poller.poll(wait * 1000))
                self._round(ready)
                now = self.clock()
                for timer in self._timers:
                    if now >= timer[0]:
                        timer[0] = now + timer[1]
                        timer[2]()
                if now >= next_beat:
                    next_beat = now + self.config.heartbeat / 2
                    self._beat(
                        now, judge=set(ready) <= {self._wake_read}
                    )  # silence is judged with nothing left to read
        except Exception:
            logger.exception("%s: the network thread has failed", self.name)
            raise
        finally:
            self._shut()

    def _round(self, ready: dict[Any, int]) -> None:
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._signalled = False  # before the calls are taken: what is added later signals again
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        for socket in ready:
            if socket in self._servers:
                self._read_server(socket)
            elif socket in self._dialled:
                self._read_dialled(socket)
        for socket in ready:
            if socket in self._monitors:
                self._read_monitor(socket)
        for channel in list(self._backlog):
            self._flush(channel)

    def _beat(self, now: float, judge: bool) -> None:
        c = self.config
        for channel in self._channels():
            if judge and now - channel.last_seen > (
                c.peer_timeout if channel.is_open else c.connect_timeout
            ):
                what = (
                    f"nothing heard for {c.peer_timeout} s"
                    if channel.is_open
                    else f"no answer within {c.connect_timeout} s"
                )
                self._lose(channel, what)
            elif (
                channel.is_open and now - channel.last_ping >= c.heartbeat
            ):  # whatever else is sent: it says how its sender is
                channel.last_ping = now
                self._enqueue(channel, [wire.encode(self.on_ping())])

    def _channels(self) -> list[Channel]:
        return [
            *self._dialled.values(),
            *(c for _, channels in self._servers.values() for c in channels.values()),
        ]

    # ---- reading ---------------------------------------------------------------------------------

    def _read_server(self, socket: zmq.Socket) -> None:
        accept, channels = self._servers[socket]
        for _ in range(READS_PER_ROUND):
            frames = self._receive(socket)
            if frames is None:
                return
            identity, *frames = frames
            channel = channels.get(identity.bytes)
            if channel is not None:
                self._deliver(channel, frames)
            elif frames:
                self._greet(socket, identity.bytes, frames[0].bytes, accept, channels)

    def _greet(
        self,
        socket: zmq.Socket,
        identity: bytes,
        data: bytes,
        accept: Accept,
        channels: dict[bytes, Channel],
    ) -> None:
        channel = Channel(self, socket, identity, "?")
        try:
            hello = wire.decode_hello(data)
            channel.peer = hello.name
            channel.session = secrets.token_hex(8)
            welcome = accept(channel, hello)
        except wire.BadMessage as error:
            stranger = _is_late(data)  # of a channel this side has given up
            self.counters["garbage"] += not stranger
            reason = "this side has given up the connection: dial again" if stranger else str(error)
            self._write(channel, [wire.encode(wire.Refused(reason, final=not stranger))])
            return
        except ValueError as error:
            self.counters["refused"] += 1
            logger.warning("%s: refused %s %r: %s", self.name, hello.kind, hello.name, error)
            self._write(
                channel,
                [wire.encode(wire.Refused(str(error), final=not isinstance(error, NotNow)))],
            )
            return
        channel.is_open = True
        channels[identity] = channel
        welcome.session = channel.session
        self._enqueue(channel, [wire.encode(welcome)])

    def _read_dialled(self, socket: zmq.Socket) -> None:
        for _ in range(READS_PER_ROUND):
            channel = self._dialled.get(socket)
            frames = None if channel is None else self._receive(socket)
            if frames is None:
                return
            self._deliver(channel, frames)

    def _receive(self, socket: zmq.Socket) -> list[zmq.Frame] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _deliver(self, channel: Channel, frames: list[zmq.Frame]) -> None:
        channel.last_seen = self.clock()
        try:
            message = wire.decode(frames[0].bytes)
        except (wire.BadMessage, IndexError) as error:
            self.counters["garbage"] += 1
            self._lose(channel, f"sent garbage: {error}")
            return
        if isinstance(message, wire.Ping):
            channel.peer_ping = message
        elif isinstance(message, wire.Refused):
            self._lose(channel, message.reason, message.final, tell=False)
        elif isinstance(message, wire.Welcome) and not channel.is_open:
            channel.is_open, channel.session, channel.peer = True, message.session, message.name
            channel.handler.opened(channel, message)
        else:
            try:
                channel.handler.message(channel, message, frames[1:])
            except (
                ValueError,
                TypeError,
                LookupError,
            ) as error:  # well-formed, but not acceptable: that peer's end, not ours
                logger.exception("%s: %s from %s", self.name, type(message).__name__, channel.peer)
                self._lose(
                    channel,
                    f"its {type(message).__name__} cannot be handled: {type(error).__name__}:"
                    f" {error}",
                )

    def _read_monitor(self, monitor: zmq.Socket) -> None:
        while monitor in self._monitors:
            try:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event in _ENDINGS:
                channel = self._monitors[monitor]
                self._read_dialled(channel.socket)  # what came before the end
                self._lose(channel, _ENDINGS[event], final=event in _FINAL, tell=False)

    # ---- writing ---------------------------------------------------------------------------------

    def _enqueue(self, channel: Channel, frames: list[Any]) -> None:
        if channel.closed:
            return
        if not channel.queue and self._write(channel, frames):
            return
        channel.queue.append(frames)
        channel.queued_bytes += sum(_size(f) for f in frames)
        self._backlog.add(channel)
        if (
            len(channel.queue) > self.config.max_queued
            or channel.queued_bytes > self.config.max_queued_bytes
        ):
            self._lose(
                channel,
                f"does not read: {len(channel.queue)} messages of {channel.queued_bytes} bytes are"
                " waiting",
            )

    def _flush(self, channel: Channel) -> None:
        while channel.queue and self._write(channel, channel.queue[0]):
            if channel.queue:
                channel.queued_bytes -= sum(_size(f) for f in channel.queue.popleft())
        if not channel.queue:
            self._backlog.discard(channel)

    def _write(self, channel: Channel, frames: list[Any]) -> bool:
        """False if the socket's queue is full."""
        address = [] if channel.identity is None else [channel.identity]
        try:
            channel.socket.send_multipart([*address, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(channel, "the connection was closed by the other side", tell=False)
        return True

    # ---- beginnings and ends ---------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = self.config.max_frame
        socket.sndhwm = socket.rcvhwm = SOCKET_QUEUE
        return socket

    def _dial(self, endpoint: str, hello: wire.Hello, handler: Handler) -> None:
        socket = self._socket(zmq.DEALER)
        socket.reconnect_ivl = -1
        self.security.client(socket)
        channel = Channel(self, socket, None, endpoint)
        channel.handler = handler
        monitor = socket.get_monitor_socket(sum(_ENDINGS))
        self._dialled[socket], self._monitors[monitor] = channel, channel
        channel.monitor = monitor
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._lose(channel, f"cannot connect to {endpoint!r}: {error.strerror}", tell=False)
            return
        self._enqueue(channel, [wire.encode(hello)])

    def _close(self, channel: Channel, reason: str, final: bool) -> None:
        if not channel.closed:
            self._write(channel, [wire.encode(wire.Refused(reason, final))])
            self._forget(channel, linger=1000)

    def _lose(self, channel: Channel, reason: str, final: bool = False, tell: bool = True) -> None:
        if channel.closed:
            return
        self.counters["lost"] += 1
        channel.closed = True  # before anything is written: a failing write ends here again
        if tell:
            self._write(channel, [wire.encode(wire.Refused(reason, final=False))])
        self._forget(channel)
        if channel.handler is not None:
            channel.handler.lost(channel, reason, final)

    def _forget(self, channel: Channel, linger: int = 0) -> None:
        channel.closed = True
        channel.queue.clear()
        self._backlog.discard(channel)
        if channel.identity is not None:
            self._servers[channel.socket][1].pop(channel.identity, None)
            return
        del self._dialled[channel.socket], self._monitors[channel.monitor]
        self._poller.unregister(channel.socket)
        self._poller.unregister(channel.monitor)
        channel.socket.disable_monitor()
        channel.monitor.close(0)
        channel.socket.close(linger)

    def _shut(self) -> None:
        deadline = self.clock() + self._linger
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        while self._backlog and self.clock() < deadline:
            for channel in list(self._backlog):
                self._flush(channel)
            time.sleep(0.001)
        for channel in self._channels():
            self._close(channel, f"{self.name} has stopped", final=False)
        for socket in list(self._servers):
            socket.close(int(self._linger * 1000))
        stop_authenticator(self.context)
        with self._wake_lock:
            self._ended = True
            os.close(self._wake_write)
        os.close(self._wake_read)
        self.context.destroy()


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes


def _is_late(data: bytes) -> bool:
    """A message that would be fine on a channel that is open."""
    try:
        return not isinstance(wire.decode(data), wire.Hello)
    except wire.BadMessage:
        return False
