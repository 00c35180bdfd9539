"""An engine's session with its router: connects, reconnects, and passes on what is said."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel
from deepinfer_jax.rpc.hub import Hub

REDIAL_SECONDS = 0.5
"""Seconds between attempts to reach a router, or a completion engine that the router knows."""
STUCK_SECONDS = 5.0
"""Seconds of one round after which this process does not join a router until the round has ended.
"""


class SessionOwner(Protocol):
    """The engine's process. All but `stuck_for` are called in the hub's thread."""

    name: str

    def hello(self, kind: str) -> wire.Hello: ...

    def stuck_for(self) -> float:
        """Seconds of the engine's current round."""
        ...

    def joined(self) -> None: ...

    def on_router(self, message: wire.WireMessage) -> None:
        """Raises ValueError for what no router says."""
        ...

    def router_lost(self, refused: str | None) -> None:
        """An open session has ended. refused: the router does not want this engine: the reason."""
        ...

    @property
    def leaving(self) -> bool: ...


class RouterSession:
    """The handler of the channel to the router."""

    def __init__(self, owner: SessionOwner, hub: Hub, endpoint: str, kind: str) -> None:
        self._owner, self._hub, self._endpoint, self._kind = owner, hub, endpoint, kind
        self._channel: Channel | None = None
        self._lost_reason = ""

    def dial(self) -> None:
        """From any thread."""
        if self._owner.stuck_for() > STUCK_SECONDS:  # it would be given work that it cannot do
            threading.Timer(REDIAL_SECONDS, self.dial).start()
            return
        self._hub.dial(self._endpoint, self._owner.hello(self._kind), self)

    def tell(self, message: wire.WireMessage) -> None:
        """From any thread; swallowed while there is no router."""
        channel = self._channel
        if channel is not None:
            channel.send(message)

    # ---- Handler ---------------------------------------------------------------------------------

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        self._channel, self._lost_reason = channel, ""
        print(f"{self._owner.name}: joined the router at {self._endpoint}", flush=True)
        self._owner.joined()

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        self._owner.on_router(message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        was_open, self._channel = self._channel is not None, None
        if final or was_open:
            self._owner.router_lost(reason if final else None)
        if self._owner.leaving:
            return
        if reason != self._lost_reason:
            what = "lost the" if was_open else "no"
            print(f"{self._owner.name}: {what} router: {reason}", flush=True)
            self._lost_reason = reason
        threading.Timer(REDIAL_SECONDS, self.dial).start()
