"""A prompt engine's links to completion engines: one to every engine its router knows, dialled
again when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.launch.links import NetLink
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.hub import Channel

if TYPE_CHECKING:
    from deepinfer_jax.launch.node import EngineServer

logger = logging.getLogger(__name__)


class PeerLinks:
    """Everything runs in the hub's thread. known: what the router said last, by name. reported:
    what the router was told of this engine, whether it has any link."""

    def __init__(self, node: EngineServer) -> None:
        self.node = node
        self.known: dict[str, wire.Peer] = {}
        self.reported = True
        self._links: dict[
            str, tuple[str, NetLink | None]
        ] = {}  # name -> (router's session of it, link)
        self._unlinked_since: float | None = None

    def look(self) -> None:
        """Ends links to engines the router does not know, dials those without one."""
        for name, (session, link) in list(self._links.items()):
            known = self.known.get(name)
            if known is None or known.session != session:
                del self._links[name]
                if link is not None:
                    link.close("the router says it is gone")
                    link.lost(link.channel, "gone, says the router", False)
        for peer in self.known.values():
            if peer.name not in self._links:
                self._links[peer.name] = (peer.session, None)
                self.node.hub.dial(peer.data, self.node.hello("prompt"), _Dialled(self, peer))
        self._report()

    def _report(self) -> None:
        """Without any link for as long as a peer may be silent: the router is told, and what waits
        here goes back."""
        now = time.monotonic()
        linked = not self.known or any(link is not None for _, link in self._links.values())
        self._unlinked_since = None if linked else (self._unlinked_since or now)
        seconds = 0.0 if linked else now - self._unlinked_since
        if self.reported != linked and (linked or seconds >= self.node.config.hub.peer_timeout):
            self.reported = linked
            self.node.tell(wire.Linked(linked, seconds))
        if not self.reported:
            self.node.post(self.node.return_waiting)

    def is_dialling(self, peer: wire.Peer) -> bool:
        return self._links.get(peer.name) == (peer.session, None)

    def up(self, peer: wire.Peer, link: NetLink) -> None:
        self._links[peer.name] = (peer.session, link)
        self.node.post(lambda: self.node.link_up(link))

    def not_up(self, peer: wire.Peer) -> None:
        """It is dialled again."""
        if self.is_dialling(peer):
            del self._links[peer.name]

    def lost(self, link: NetLink) -> None:
        entry = self._links.get(link.peer)
        if entry is not None and entry[1] is link:
            del self._links[link.peer]
            self._unlinked_since = link.channel.last_seen  # counts if there is no other link
            self._report()


class _Dialled:
    """A link on its way up."""

    def __init__(self, links: PeerLinks, peer: wire.Peer) -> None:
        self.links, self.peer = links, peer

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        links, node = self.links, self.links.node
        if not links.is_dialling(self.peer):
            channel.close("not wanted any more")
            return
        transport = welcome.info.get("transport", "host")
        exporter = node.device_exporter if transport == "device" else node.stager
        logger.info(
            "%s: hands over to %s by the %s transport", node.config.name, self.peer.name, transport
        )
        channel.handler = link = _ReportingLink(links, self.peer.name, channel, exporter)
        links.up(self.peer, link)

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        channel.close("no welcome")

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        logger.warning("%s: no link to %s: %s", self.links.node.config.name, self.peer.name, reason)
        if not final:
            self.links.not_up(self.peer)


class _ReportingLink(NetLink):
    """Says when it is lost."""

    def __init__(self, links: PeerLinks, peer: str, channel: Channel, exporter: Any) -> None:
        super().__init__(peer, channel, links.node.wake, exporter=exporter)
        self._links = links

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        super().lost(channel, reason, final)
        self._links.lost(self)
