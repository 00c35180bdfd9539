"""The transport within one process: control messages in memory, KV from device to device."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.inbox import Inbox
from deepinfer_jax.disagg.layout import check_layouts
from deepinfer_jax.disagg.messages import Link, Message
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.kv.block_mover import BlockMover


class MeshLink(Link):
    """One end. Payloads are sent to the target's devices when they are sent: nobody waits, the
    receiver asks `ready()`."""

    def __init__(self, peer: str, target: BlockMover | None) -> None:
        """target: the completion engine's, at the prompt engine's end."""
        self.peer = peer
        self.inbox = Inbox()
        self.other: MeshLink
        self._target = target

    def send(self, message: Message, rank: int = 0) -> None:
        if self.other.inbox.lost is not None or self.inbox.lost is not None:
            return  # poll() says so
        if message.payload is not None and self._target is not None:
            message = replace(message, payload=self._target.receive(message.payload, rank))
        self.other.inbox.put(message)

    def poll(self) -> list[Message]:
        return self.inbox.take()

    def close(self, reason: str = "closed") -> None:
        self.other.inbox.lose(reason)


def link_pair(source: str, target: str, mover: BlockMover | None) -> tuple[MeshLink, MeshLink]:
    """(source's, target's) ends of a link between two engines. mover: the target's."""
    a, b = MeshLink(target, mover), MeshLink(source, None)
    a.other, b.other = b, a
    return a, b


def connect(source: PromptEngine, target: CompletionEngine) -> tuple[MeshLink, MeshLink]:
    """Connects two engines of this process, whatever their meshes. Raises LayoutMismatch. Returns
    (source's, target's) ends."""
    check_layouts(source.layout(), target.layout())
    source.prepare_link(target.name, target.config.axes.tp)
    target.prepare_link(source.name, source.config.axes.tp)
    a, b = link_pair(source.name, target.name, target.ensure_mover())
    source.hand_overs.connect(a)
    target.hand_overs.connect(b)
    return a, b
