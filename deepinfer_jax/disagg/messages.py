"""The messages of a hand-over, as types with bounds: what a peer sends is checked when it is read.

A `Message` is a body and, with `Pages`, a payload that travels beside it. Bodies are msgpack on
every transport that leaves the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.scheduler.routing.ids import HandoffId

Count = Annotated[int, Meta(ge=0, lt=2**31)]
PayloadKind = Literal["blocks", "states"]
"""What a payload holds: entries of paged caches, or rows of per-sequence state caches."""


class BadHandoff(ValueError):
    """Bytes, or a message, that no engine of this version sends."""


class Body(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages."""


class Reserve(Body, frozen=True, tag="reserve"):
    """Source: hold a slot and blocks. request: without outputs. pages: of its prompt. states: 1 if
    the model has per-sequence state caches."""

    handoff: HandoffId
    request: RequestState
    pages: Count
    states: Annotated[int, Meta(ge=0, le=1)] = 0


class Granted(Body, frozen=True, tag="granted"):
    """Target: room is held on this rank of it."""

    handoff: HandoffId
    rank: Annotated[int, Meta(ge=0, lt=2**16)]


class Refusal(Body, frozen=True, tag="refused"):
    """Target: no room. retry: there may be some later."""

    handoff: HandoffId
    reason: str
    retry: bool


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`count` pages of one hand-over from page `first` on, in the payload's rows from `row` on."""

    handoff: HandoffId
    first: Count
    count: Annotated[int, Meta(ge=1, lt=2**31)]
    row: Count


class Pages(Body, frozen=True, tag="pages"):
    """Source: a payload's content, of one or several hand-overs."""

    kind: PayloadKind
    segments: tuple[Segment, ...]


class Deliver(Body, frozen=True, tag="deliver"):
    """Source: everything has been sent; the request goes on from here."""

    handoff: HandoffId
    state: RequestState


class Ack(Body, frozen=True, tag="ack"):
    """Target: it decodes the request; the source may free it."""

    handoff: HandoffId


class Cancel(Body, frozen=True, tag="cancel"):
    """Source: free what is held of it."""

    handoff: HandoffId
    reason: str


class Failed(Body, frozen=True, tag="failed"):
    """Target: it holds nothing of it any more. retry: another try may do better."""

    handoff: HandoffId
    reason: str
    retry: bool


AnyBody = Reserve | Granted | Refusal | Pages | Deliver | Ack | Cancel | Failed


class Payload(Protocol):
    """What travels with `Pages`; see kv.block_mover."""

    @property
    def count(self) -> int:
        """Rows in use."""
        ...

    def ready(self) -> bool:
        """Its bytes have arrived. Waits for nothing."""
        ...


@dataclass(frozen=True)
class Message:
    body: AnyBody
    payload: Any = None  # a Payload, with Pages


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyBody)


def encode_body(body: AnyBody) -> bytes:
    return _encoder.encode(body)


def decode_body(data: bytes | memoryview) -> AnyBody:
    """Raises BadHandoff for anything that `encode_body` does not make."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHandoff(f"no message of a hand-over: {error}") from error


class Link(Protocol):
    """One end of a connection between a prompt engine and a completion engine: the transport.

    Messages of one direction arrive in order, or not at all once the peer is lost; nothing here
    waits. `connect` functions of the transports compare layouts (`check_layouts`) before they
    return a link.
    """

    peer: str
    """Name of the engine at the other end."""

    def send(self, message: Message, rank: int = 0) -> None:
        """Enqueues a message. With a payload: `rank` is the target's rank (`Granted`) whose devices
        it must reach."""
        ...

    def poll(self) -> list[Message]:
        """What has arrived. Raises PeerLost once everything that arrived has been returned and the
        peer is gone."""
        ...

    def close(self, reason: str = "closed") -> None:
        """The peer's poll() raises PeerLost(reason)."""
        ...
