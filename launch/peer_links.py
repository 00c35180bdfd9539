"""A prompt engine's links to completion engines: one to every engine its router knows, made again
when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepinfer_jax.launch.links import NetLink
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel
from deepinfer_jax.rpc.hub import Hub

logger = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The engine's process."""

    name: str
    hub: Hub

    def hello(self, kind: str) -> wire.Hello: ...

    def make_link(
        self, peer: str, channel: Channel, transport: str, on_lost: Callable[[NetLink], None]
    ) -> NetLink:
        """ValueError for a transport that this side has not."""
        ...

    def link_up(self, link: NetLink) -> None: ...

    def unlinked(self) -> None:
        """No completion engine can be reached: what waits for one goes back."""
        ...

    def tell(self, message: wire.WireMessage) -> None:
        """To the router."""
        ...


class PeerLinks:
    """Everything runs in the hub's thread. known: what the router said last, by name. reported:
    what the router was told of this engine, whether it has any link."""

    def __init__(self, owner: LinkOwner, patience: float) -> None:
        """patience: seconds without any link before the router is told."""
        self.owner, self.patience = owner, patience
        self.known: dict[str, wire.Peer] = {}
        self.reported = True
        # name -> (the router's session of it, link; None: on its way up)
        self._links: dict[str, tuple[str, NetLink | None]] = {}
        self._unlinked_since: float | None = None

    def look(self) -> None:
        """Ends links to engines the router does not know, dials those without one."""
        for name, (session, link) in list(self._links.items()):
            known = self.known.get(name)
            if known is None or known.session != session:
                del self._links[name]
                if link is not None:
                    link.close("the router says it is gone")
        for peer in self.known.values():
            if peer.name not in self._links:
                self._links[peer.name] = (peer.session, None)
                hello = self.owner.hello("prompt")
                self.owner.hub.dial(peer.data, hello, _Dialled(self, peer))
        self._report()

    def _report(self) -> None:
        """Without any link for too long: the router is told, and what waits here goes back."""
        now = time.monotonic()
        linked = not self.known or any(link is not None for _, link in self._links.values())
        self._unlinked_since = None if linked else (self._unlinked_since or now)
        seconds = 0.0 if linked else now - self._unlinked_since
        if self.reported != linked and (linked or seconds >= self.patience):
            self.reported = linked
            self.owner.tell(wire.Linked(linked, seconds))
        if not self.reported:
            self.owner.unlinked()

    def is_dialling(self, peer: wire.Peer) -> bool:
        return self._links.get(peer.name) == (peer.session, None)

    def up(self, peer: wire.Peer, channel: Channel, transport: str) -> None:
        link = self.owner.make_link(peer.name, channel, transport, self.lost)
        channel.handler = link
        self._links[peer.name] = (peer.session, link)
        self.owner.link_up(link)

    def not_up(self, peer: wire.Peer) -> None:
        """The next look tries again."""
        if self.is_dialling(peer):
            del self._links[peer.name]

    def lost(self, link: NetLink) -> None:
        entry = self._links.get(link.peer)
        if entry is not None and entry[1] is link:
            del self._links[link.peer]
            self._unlinked_since = link.channel.last_seen  # counts if there is no other link
            self._report()


class _Dialled:
    """The handler of a link on its way up."""

    def __init__(self, links: PeerLinks, peer: wire.Peer) -> None:
        self.links, self.peer = links, peer

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        if not self.links.is_dialling(self.peer):
            channel.close("not wanted any more")
            return
        name, transport = self.links.owner.name, welcome.transport
        logger.info("%s: hands over to %s by the %s transport", name, self.peer.name, transport)
        self.links.up(self.peer, channel, transport)

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        raise ValueError(f"a {type(message).__name__} before the welcome")

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        logger.warning("%s: no link to %s: %s", self.links.owner.name, self.peer.name, reason)
        if not final:
            self.links.not_up(self.peer)
