"""Who is connected to a router: engines and clients, each the handler of its channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deepinfer_jax.disagg.layout import Layout
from deepinfer_jax.disagg.split_request import CompletionPart
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel
from deepinfer_jax.scheduler.routing.config import Capacity
from deepinfer_jax.scheduler.routing.ids import AttemptId


class MemberOwner(Protocol):
    """The router. Called in the hub's thread."""

    def on_engine(self, member: EngineMember, message: wire.WireMessage) -> None: ...

    def engine_lost(self, member: EngineMember, reason: str) -> None: ...

    def on_client(self, client: ClientMember, message: wire.WireMessage) -> None: ...

    def client_lost(self, client: ClientMember, reason: str) -> None: ...

    def room_made(self) -> None: ...


class EngineMember:
    """An engine in another process: a coordinator's EngineHandle."""

    def __init__(
        self, owner: MemberOwner, channel: Channel, hello: wire.Hello, layout: Layout
    ) -> None:
        self.channel, self.hello, self.layout = channel, hello, layout
        self.name, self.kind = hello.name, hello.kind
        self.active = False  # all processes of its job are there
        self.lost_reason: str | None = None
        self.draining = False
        self.linked = True  # False: a prompt engine that reaches no completion engine
        self._owner = owner

    @property
    def state(self) -> str:
        if not self.active:
            return "waiting for its job"
        return "draining" if self.draining else "serving" if self.linked else "without links"

    @property
    def capacity(self) -> Capacity | None:
        """None: not a completion engine."""
        return Capacity(*self.hello.capacity) if self.kind == "completion" else None

    # ---- EngineHandle ----------------------------------------------------------------------------

    def start(self, part: CompletionPart, attempt: AttemptId) -> None:
        params, arrival = part.params.to_dict(), part.arrival_time
        self.channel.send(wire.Start(attempt, part.prompt_token_ids, params, part.seed, arrival))

    def cancel(self, attempt: AttemptId, reason: str) -> None:
        self.channel.send(wire.CancelAttempt(attempt, reason))

    def wake(self) -> None:
        self._owner.room_made()

    # ---- Handler ---------------------------------------------------------------------------------

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        self._owner.on_engine(self, message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        self._owner.engine_lost(self, reason)


class ClientMember:
    """One client's channel and its unfinished requests (our names)."""

    def __init__(self, owner: MemberOwner, channel: Channel) -> None:
        self.channel, self._owner = channel, owner
        self.requests: set[str] = set()

    def own_name(self, request_id: str) -> str:
        """Two clients never meet."""
        return f"{self.channel.session}.{request_id}"

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        self._owner.on_client(self, message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        self._owner.client_lost(self, reason)
