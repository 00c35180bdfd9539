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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.disagg.protocol import Link, Message, PeerLost
from deepinfer_jax.kv.block_mover import BlockMover, Payload
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.hub import Channel

logger = logging.getLogger(__name__)

MESSAGES = frozenset(
    {"reserve", "pages", "deliver", "cancel", "granted", "refused", "ack", "failed"}
)


class NetLink(Link):
    """One end. Messages arrive in the hub's thread and are read by the engine's (`poll`)."""

    def __init__(
        self,
        peer: str,
        channel: Channel,
        wake: Callable[[], None],
        exporter: Exporter | None = None,
        importer: Any | None = None,
    ) -> None:
        """exporter: on the prompt side. importer: on the completion side, HostImporter or
        DeviceImporter."""
        self.peer, self.channel = peer, channel
        self._exporter, self._importer, self._wake = exporter, importer, wake
        self._inbox: deque[Message] = deque()
        self._lost: str | None = None

    # ---- Link (the engine's thread) --------------------------------------------------------------

    def send(self, message: Message, rank: int = 0) -> None:
        hand = wire.Hand(message.kind, message.handoff_id, message.body, rank)
        if self._exporter is None:
            self.channel.send(hand)
        else:
            self._exporter.put(self.channel, hand, message.payload)

    def poll(self) -> list[Message]:
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        if not messages and self._lost is not None:
            raise PeerLost(self._lost)
        return messages

    def close(self, reason: str = "closed") -> None:
        self.channel.close(reason)

    # ---- Handler (the hub's thread) --------------------------------------------------------------

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        pass

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        try:
            if not isinstance(message, wire.Hand) or message.kind not in MESSAGES:
                raise ValueError(f"unexpected {type(message).__name__} on a hand-over link")
            payload = self._payload(message, frames) if message.arrays else None
        except (ValueError, KeyError, TypeError) as error:
            self._fail(f"sent a payload that does not fit: {error}")
        else:
            self._inbox.append(Message(message.kind, message.handoff_id, message.body, payload))
        self._wake()

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        self._lost = reason
        self._wake()

    def _fail(self, reason: str) -> None:
        logger.warning("link to %s: %s", self.peer, reason)
        self.channel.close(reason)
        self._lost = reason
        self._wake()

    def _payload(self, message: wire.Hand, frames: Sequence[Any]) -> Payload:
        if self._importer is None:
            raise ValueError("a payload for a prompt engine")
        if message.remote is not None and hasattr(self._importer, "pull"):
            return self._importer.pull(message, lambda: self._lost, self._fail)
        if message.remote is not None or not hasattr(self._importer, "unpack"):
            raise ValueError("a payload by another transport than agreed")
        return self._importer.unpack(message, frames)


class Exporter(Protocol):
    """Prompt side of a transport: everything a prompt engine sends on its links passes it, in
    order."""

    sent_bytes: int

    def put(self, channel: Channel, hand: wire.Hand, payload: Payload | None) -> None: ...


class HostImporter:
    """Completion side of the host-staged transport."""

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover

    def unpack(self, message: wire.Hand, frames: Sequence[Any]) -> Payload:
        """Raises ValueError for frames that are no payload of this mover."""
        if len(frames) != len(message.arrays):
            raise ValueError(f"{len(frames)} frames for {len(message.arrays)} arrays")
        if not 0 <= message.rank < self._mover.ranks:
            raise ValueError(f"a payload for rank {message.rank} of {self._mover.ranks}")
        arrays = {
            name: np.frombuffer(frame.buffer, np.dtype(dtype)).reshape(shape)
            for (name, shape, dtype), frame in zip(message.arrays, frames, strict=True)
        }
        (payload,) = self._mover.from_host(arrays, message.rank, message.body["kind"])
        return payload


class Stager:
    """A thread that waits for payloads to reach the host and sends them; everything a prompt engine
    sends passes it, in order."""

    def __init__(self, mover: BlockMover, name: str) -> None:
        self._mover = mover
        self._queue: queue.SimpleQueue[tuple[Channel, wire.Hand, Payload | None] | None] = (
            queue.SimpleQueue()
        )
        self.sent_bytes = 0
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"stager-{name}", daemon=True)
        self._thread.start()

    def put(self, channel: Channel, hand: wire.Hand, payload: Payload | None) -> None:
        self._queue.put((channel, hand, payload))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            channel, hand, payload = item
            if channel.closed:
                continue
            try:
                frames = self._stage(hand, payload) if payload is not None else ()
            except (
                Exception
            ) as error:  # the device is in trouble: the engine's next step says so too
                logger.exception("cannot copy KV to the host")
                self.failed = f"{type(error).__name__}: {error}"
                channel.close(f"cannot copy KV to the host: {error}")
                continue
            channel.send(hand, frames)

    def _stage(self, hand: wire.Hand, payload: Payload) -> list[memoryview]:
        arrays = self._mover.to_host(payload)
        hand.arrays = [(name, list(a.shape), a.dtype.name) for name, a in arrays.items()]
        self.sent_bytes += sum(a.nbytes for a in arrays.values())
        return [
            memoryview(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in arrays.values()
        ]
