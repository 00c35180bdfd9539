"""The transport between prompt and completion engines of different processes, staged through host
memory.

Pages are copied to the host on the prompt side, sent as raw frames on the link's own connection (so
they cannot overtake the messages around them), and put on the target rank's devices on the other
side. Works between any two meshes: whole entries travel, each side splits them over its own tp.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from deepinfer_jax.disagg.inbox import Inbox
from deepinfer_jax.disagg.messages import (
    Link,
    Message,
    Pages,
    PayloadKind,
    decode_body,
    encode_body,
)
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.kv.payload import Payload
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel

logger = logging.getLogger(__name__)


class NetLink(Link):
    """One end. Messages arrive in the hub's thread and are read by the engine's (`poll`)."""

    def __init__(
        self,
        peer: str,
        channel: Channel,
        wake: Callable[[], None],
        exporter: Exporter | None = None,
        importer: Importer | None = None,
        on_lost: Callable[[NetLink], None] = lambda link: None,
    ) -> None:
        """exporter: on the prompt side. importer: on the completion side. on_lost: called once, in
        the hub's thread, when the link has ended, whoever ended it."""
        self.peer, self.channel = peer, channel
        self.inbox = Inbox(wake)
        self._exporter, self._importer, self._on_lost = exporter, importer, on_lost

    # ---- Link (the engine's thread) --------------------------------------------------------------

    def send(self, message: Message, rank: int = 0) -> None:
        hand = wire.Hand(msgspec.Raw(encode_body(message.body)), rank)
        if self._exporter is None:
            self.channel.send(hand)
        else:
            self._exporter.put(self, hand, message.payload)

    def poll(self) -> list[Message]:
        return self.inbox.take()

    def close(self, reason: str = "closed") -> None:
        """From any thread."""
        self.channel.close(reason)
        self.channel.hub.call(lambda: self.lost(self.channel, reason, False))

    # ---- Handler (the hub's thread) --------------------------------------------------------------

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        """Raises ValueError for what no engine sends on a link."""
        if not isinstance(message, wire.Hand):
            raise ValueError(f"a {type(message).__name__} on a hand-over link")
        body = decode_body(message.body)
        payload = None
        if message.arrays or isinstance(body, Pages):
            payload = self._payload(message, body, frames)
        self.inbox.put(Message(body, payload))

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        if self.inbox.lost is None:
            self.inbox.lose(reason)
            self._on_lost(self)

    def _payload(self, hand: wire.Hand, body: Any, frames: Sequence[Any]) -> Payload:
        if self._importer is None or not isinstance(body, Pages):
            raise ValueError(f"a payload with a {type(body).__name__}")
        return self._importer.take(hand, body.kind, frames, self)


class Exporter(Protocol):
    """Prompt side of a transport: everything a prompt engine sends on its links passes it, in
    order."""

    sent_bytes: int

    def put(self, link: NetLink, hand: wire.Hand, payload: Payload | None) -> None: ...


class Importer(Protocol):
    """Completion side of a transport."""

    def take(
        self, hand: wire.Hand, kind: PayloadKind, frames: Sequence[Any], link: NetLink
    ) -> Payload:
        """What a `Pages` message has brought. Raises ValueError for what is no payload of this
        engine's; a fault that shows later closes the link."""
        ...


class HostImporter:
    """Completion side of the host-staged transport."""

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover

    def take(
        self, hand: wire.Hand, kind: PayloadKind, frames: Sequence[Any], link: NetLink
    ) -> Payload:
        if hand.remote is not None:
            raise ValueError("a payload by another transport than agreed")
        if len(frames) != len(hand.arrays):
            raise ValueError(f"{len(frames)} frames for {len(hand.arrays)} arrays")
        if hand.rank >= self._mover.ranks:
            raise ValueError(f"a payload for rank {hand.rank} of {self._mover.ranks}")
        arrays = {
            a.cache: np.frombuffer(frame.buffer, np.dtype(a.dtype)).reshape(a.shape)
            for a, frame in zip(hand.arrays, frames, strict=True)
        }
        (payload,) = self._mover.from_host(arrays, hand.rank, kind)
        return payload


class Stager:
    """A thread that waits for payloads to reach the host and sends them; everything a prompt engine
    sends passes it, in order."""

    def __init__(self, mover: BlockMover, name: str) -> None:
        self._mover = mover
        self._queue: queue.SimpleQueue[tuple[NetLink, wire.Hand, Payload | None] | None]
        self._queue = queue.SimpleQueue()
        self.sent_bytes = 0
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"stager-{name}", daemon=True)
        self._thread.start()

    def put(self, link: NetLink, hand: wire.Hand, payload: Payload | None) -> None:
        self._queue.put((link, hand, payload))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            link, hand, payload = item
            if link.channel.closed:
                continue
            try:
                frames = self._stage(hand, payload) if payload is not None else ()
            except Exception as error:
                # the device is in trouble: the engine's next step says so too
                logger.exception("cannot copy KV to the host")
                self.failed = f"{type(error).__name__}: {error}"
                link.close(f"cannot copy KV to the host: {error}")
                continue
            link.channel.send(hand, frames)

    def _stage(self, hand: wire.Hand, payload: Payload) -> list[memoryview]:
        arrays = self._mover.to_host(payload)
        hand.arrays = [
            wire.ArrayLayout(name, list(a.shape), a.dtype.name) for name, a in arrays.items()
        ]
        self.sent_bytes += sum(a.nbytes for a in arrays.values())
        return [
            memoryview(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in arrays.values()
        ]
