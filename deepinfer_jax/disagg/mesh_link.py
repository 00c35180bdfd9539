"""The transport within one process: control messages in memory, KV from device to device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from deepinfer_jax.disagg.engines import CompletionEngine, PromptEngine
from deepinfer_jax.disagg.protocol import Link, Message, PeerLost, check_layouts
from deepinfer_jax.kv.block_mover import BlockMover


class MeshLink(Link):
    """One end. Payloads are sent to the target's devices when they are sent: nobody waits, the
    receiver asks `ready()`."""

    def __init__(self, peer: str, target: BlockMover | None) -> None:
        self.peer = peer
        self._target = target
        self._inbox: deque[Message] = deque()
        self._lost: str | None = None
        self.other: MeshLink
        self.on_arrival: Callable[[], None] = lambda: None
        """Called, in the sender's thread, when something has arrived at this end."""

    def send(self, message: Message, rank: int = 0) -> None:
        if self.other._lost is not None or self._lost is not None:
            return  # poll() says so
        if message.payload is not None and self._target is not None:
            message = replace(message, payload=self._target.receive(message.payload, rank))
        self.other._inbox.append(message)
        self.other.on_arrival()

    def poll(self) -> list[Message]:
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        if not messages and self._lost is not None:
            raise PeerLost(self._lost)
        return messages

    def close(self, reason: str = "closed") -> None:
        if self.other._lost is None:
            self.other._lost = reason
            self.other.on_arrival()


def connect(source: PromptEngine, target: CompletionEngine) -> tuple[MeshLink, MeshLink]:
    """Connects two engines of this process, whatever their meshes. Raises LayoutMismatch. Returns
    (source's, target's) ends."""
    check_layouts(source.layout(), target.layout())
    source.prepare_link(target.name, target.config.axes.tp)
    target.prepare_link(source.name, source.config.axes.tp)
    a, b = MeshLink(target.name, target.mover), MeshLink(source.name, None)
    a.other, b.other = b, a
    source.sender.connect(a)
    target.receiver.connect(b)
    return a, b
