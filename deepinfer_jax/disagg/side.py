"""What both sides of hand-overs share: their links, and what a bad message does to them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from deepinfer_jax.disagg.messages import Link, Message
from deepinfer_jax.disagg.protocol import HandoffConfig, PeerLost, Tombstones

logger = logging.getLogger(__name__)


class HandoverSide:
    """Driven by its engine's loop: `pump` reads the links and moves every hand-over as far as it
    goes. Nothing waits and nothing runs on its own."""

    def __init__(
        self,
        name: str,
        config: HandoffConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.config, self.clock = name, config or HandoffConfig(), clock
        self.links: dict[str, Link] = {}
        self.counters: Counter[str] = Counter()
        self._ended = Tombstones()

    def connect(self, link: Link) -> None:
        """A link to `link.peer`. An older one to the same peer has ended with this."""
        old = self.links.get(link.peer)
        if old is not None and old is not link:
            self.peer_lost(link.peer, "replaced by a new connection")
        self.links[link.peer] = link

    def pump(self) -> None:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        """Hand-overs that have not ended."""
        raise NotImplementedError

    @property
    def next_deadline(self) -> float | None:
        """When pump() has something to do even if no message comes."""
        raise NotImplementedError

    @property
    def has_arriving(self) -> bool:
        """Bytes are on their way: pump() again soon."""
        return False

    def peer_lost(self, name: str, reason: str) -> None:
        raise NotImplementedError

    def _on_message(self, name: str, message: Message) -> None:
        """Raises ValueError, TypeError or LookupError for a message that the peer must not send."""
        raise NotImplementedError

    def _read_links(self) -> None:
        """The one place where what a peer has sent is handled: a message that cannot be ends the
        link, and nothing else."""
        for name, link in list(self.links.items()):
            try:
                messages = link.poll()
            except PeerLost as lost:
                self.peer_lost(name, str(lost))
                continue
            for message in messages:
                if self.links.get(name) is not link:
                    break  # the rest is of a link that has ended meanwhile
                self._handle(name, link, message)

    def _handle(self, name: str, link: Link, message: Message) -> None:
        try:
            self._on_message(name, message)
        except (ValueError, TypeError, LookupError) as error:
            kind = type(message.body).__name__
            logger.exception("%s: %s of %s cannot be handled", self.name, kind, name)
            self.end_link(name, link, f"sent a {kind} that cannot be handled: {error}")

    def end_link(self, name: str, link: Link, reason: str) -> None:
        """The peer has done what no engine does."""
        self.counters["bad_messages"] += 1
        link.close(reason)
        if self.links.get(name) is link:
            self.peer_lost(name, reason)
