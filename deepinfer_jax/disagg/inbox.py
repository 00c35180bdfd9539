"""What has arrived at one end of a link and waits for the engine, and why no more will come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deepinfer_jax.disagg.messages import Message
from deepinfer_jax.disagg.protocol import PeerLost


def _nobody() -> None:
    pass


class Inbox:
    """`put` and `lose` may be called from any thread; `take` from the engine's."""

    def __init__(self, on_arrival: Callable[[], None] = _nobody) -> None:
        """on_arrival: called, in the thread that puts or loses, when there is something to take."""
        self.on_arrival = on_arrival
        self._messages: deque[Message] = deque()
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why the peer is gone; None while it is there."""
        return self._lost

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self.on_arrival()

    def lose(self, reason: str) -> None:
        """Nothing comes after this. The first reason counts."""
        if self._lost is None:
            self._lost = reason
            self.on_arrival()

    def take(self) -> list[Message]:
        """What has arrived, in order. Raises PeerLost once everything has been taken and the peer
        is gone."""
        lost = self._lost  # read first: whatever came before it is among the messages by now
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        if not messages and lost is not None:
            raise PeerLost(lost)
        return messages
