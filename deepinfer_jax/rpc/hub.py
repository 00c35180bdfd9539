"""Connections between processes: one thread owns all sockets, anybody may send.

A `Channel` is one conversation over one TCP connection: hello, welcome or refusal, messages in
order, heartbeats, the end. It never reconnects by itself: when TCP breaks, when nothing is heard
for `peer_timeout`, when bytes make no sense or a queue is full, the channel is lost, its handler is
told why, and whoever wants another one dials again.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.alarm import Alarm
from deepinfer_jax.rpc.channel import Accept, Channel, Handler, HubConfig, NotNow, frame_size
from deepinfer_jax.rpc.security import Security, stop_authenticator

logger = logging.getLogger(__name__)

READS_PER_ROUND = 256
BACKLOG_RETRY = 0.001
"""Seconds until a full socket is tried again."""
SOCKET_QUEUE = 256
"""Messages libzmq may hold per connection and direction; what does not fit waits in the channel's
own bounded queue."""

_ENDINGS: dict[int, str] = {
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
        self.counters = {"garbage": 0, "refused": 0, "lost": 0, "faults": 0}
        self._poller = zmq.Poller()
        self._servers: dict[zmq.Socket, tuple[Accept, dict[bytes, Channel]]] = {}
        self._dialled: dict[zmq.Socket, Channel] = {}
        self._monitors: dict[zmq.Socket, Channel] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[list[Any]] = []  # [next, every, function]
        self._backlog: set[Channel] = set()
        self._alarm = Alarm()
        self._poller.register(self._alarm.fd, zmq.POLLIN)
        self._stopping, self._linger = False, 0.0
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
        return cast("bytes", socket.last_endpoint).decode()

    def dial(self, endpoint: str, hello: wire.Hello, handler: Handler) -> None:
        """Connects; the handler hears `opened` or `lost`."""
        self.call(lambda: self._dial(endpoint, hello, handler))

    def call(self, function: Callable[[], None]) -> None:
        """Runs it in the hub's thread, after what was enqueued before."""
        self._calls.append(function)
        self._alarm.ring()

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
        self._alarm.ring()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(linger + 10)

    def post_message(self, channel: Channel, frames: list[Any]) -> None:
        self.call(lambda: self._enqueue(channel, frames))

    def close_channel(self, channel: Channel, reason: str, final: bool) -> None:
        self.call(lambda: self._close(channel, reason, final))

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = self.clock()
        try:
            while not self._stopping:
                due = min([next_beat, *(t[0] for t in self._timers)])
                wait = BACKLOG_RETRY if self._backlog else max(0.0, due - self.clock())
                ready = dict(self._poller.poll(math.ceil(wait * 1000)))
                self._round(ready)
                now = self.clock()
                for timer in self._timers:
                    if now >= timer[0]:
                        timer[0] = now + timer[1]
                        self._guarded(None, "a timer", timer[2])
                if now >= next_beat:
                    next_beat = now + self.config.heartbeat / 2
                    # silence is judged with nothing left to read
                    self._beat(now, judge=set(ready) <= {self._alarm.fd})
        except Exception:
            logger.exception("%s: the network thread has failed", self.name)
            raise
        finally:
            self._shut()

    def _round(self, ready: dict[Any, int]) -> None:
        if self._alarm.fd in ready:
            self._alarm.reset()  # before the calls are taken: what is added later rings again
        for _ in range(len(self._calls)):
            self._guarded(None, "a call", self._calls.popleft())
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

    def _guarded(
        self, channel: Channel | None, what: str, function: Callable[..., Any], *args: Any
    ) -> bool:
        """The one way into code of others: what it raises is that channel's end, never this
        thread's. False if it has raised."""
        try:
            function(*args)
        except Exception as error:
            self.counters["faults"] += 1
            peer = "this process" if channel is None else channel.peer
            logger.exception("%s: %s of %s cannot be handled", self.name, what, peer)
            if channel is not None:
                reason = f"{what} cannot be handled: {type(error).__name__}: {error}"
                self._lose(channel, reason)
            return False
        return True

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
            welcome = self._accept(accept, channel, hello)
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

    def _accept(self, accept: Accept, channel: Channel, hello: wire.Hello) -> wire.Welcome:
        """Raises ValueError for whatever `accept` raises."""
        try:
            return accept(channel, hello)
        except ValueError:
            raise
        except Exception as error:
            self.counters["faults"] += 1
            logger.exception("%s: hello of %r", self.name, hello.name)
            raise ValueError(f"its hello cannot be handled: {error}") from error

    def _read_dialled(self, socket: zmq.Socket) -> None:
        for _ in range(READS_PER_ROUND):
            channel = self._dialled.get(socket)
            frames = None if channel is None else self._receive(socket)
            if channel is None or frames is None:
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
            if channel.handler is not None:
                self._guarded(channel, "its welcome", channel.handler.opened, channel, message)
        elif channel.handler is None:
            self._lose(channel, "nobody here takes its messages")
        else:
            what = f"its {type(message).__name__}"
            handler = channel.handler.message
            self._guarded(channel, what, handler, channel, message, frames[1:])

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
        channel.queued_bytes += sum(frame_size(f) for f in frames)
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
                channel.queued_bytes -= sum(frame_size(f) for f in channel.queue.popleft())
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
            self._guarded(None, "a lost channel", channel.handler.lost, channel, reason, final)

    def _forget(self, channel: Channel, linger: int = 0) -> None:
        channel.closed = True
        channel.queue.clear()
        self._backlog.discard(channel)
        if channel.identity is not None:
            self._servers[channel.socket][1].pop(channel.identity, None)
            return
        assert channel.monitor is not None  # it was dialled
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
        self._alarm.close()
        self.context.destroy()


def _is_late(data: bytes) -> bool:
    """A message that would be fine on a channel that is open."""
    try:
        return not isinstance(wire.decode(data), wire.Hello)
    except wire.BadMessage:
        return False
