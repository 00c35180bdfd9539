"""Messages between the processes of a deployment: router, engines, clients. Typed, versioned,
msgpack on the wire.

A message is one msgpack frame (`encode`/`decode`), followed by payload frames where its type says
so. Who talks to whom:

    engine -> router    Hello, then Place, Unplace, Progress, Prefilled, HandedOver, HandOverFailed,
    Linked, Result, Draining, Ping
    router -> engine    Welcome | Refused, then Start, Abort, DropAttempt, Placed, Peers, Drain,
    JobLost, Ping
    prompt <-> completion   Hello / Welcome | Refused, then Hand (handoff.py's messages), Ping
    client -> router    Hello, then Submit, Cancel, StatusQuery, Ping
    router -> client    Welcome | Refused, then Result, StatusReply, Ping

Ids are those of pd_coordinator.py: `request#part@attempt/try`. The first message of a connection is
Hello, whose fields "protocol" and "kind" keep their names and types in every version, so that a
mismatch can be named.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from deepinfer_jax.outputs import RequestOutput

PROTOCOL = 2
"""Version of everything below; compared in the handshake."""

KINDS = ("prompt", "completion", "normal", "client")


class BadMessage(ValueError):
    """Bytes that are no message of this protocol."""


class WireMessage(msgspec.Struct, tag_field="t", omit_defaults=True):
    """Base of all messages."""


class Hello(WireMessage, tag="hello"):
    """kind: one of KINDS. name: what the peer calls itself, unique among the living. job: processes
    of one job fail together. layout: handoff.make_layout of an engine. capacity: (requests, tokens,
    max_len). data: endpoint where a completion engine takes hand-overs. model: what a client must
    know to check requests."""

    protocol: int
    kind: str
    name: str
    job: str = ""
    process: int = 0
    processes: int = 1
    layout: dict[str, Any] | None = None
    capacity: tuple[int, int, int] | None = None
    data: str = ""
    model: dict[str, Any] | None = None
    transports: list[str] = []


class Welcome(WireMessage, tag="welcome"):
    """name: the peer's. session: names this connection. info: model facts for clients, the chosen
    transport for links."""

    name: str
    session: str
    info: dict[str, Any] = {}


class Refused(WireMessage, tag="refused"):
    """The connection ends here. final: asking again cannot help."""

    reason: str
    final: bool = True


class Ping(WireMessage, tag="ping"):
    """Sent with every heartbeat. stuck: seconds that the sender's current step has taken; other
    gauges for the status table."""

    stuck: float = 0.0
    gauges: dict[str, float] = {}


class Start(WireMessage, tag="start"):
    key: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    seed: int
    arrival_time: float


class Abort(WireMessage, tag="abort"):
    key: str


class DropAttempt(WireMessage, tag="drop"):
    key: str
    reason: str


class Place(WireMessage, tag="place"):
    key: str
    exclude: list[str] = []


class Placed(WireMessage, tag="placed"):
    """target None: nobody has room; the router sends another Placed as soon as somebody has."""

    key: str
    target: str | None = None


class Unplace(WireMessage, tag="unplace"):
    key: str
    target: str


class Progress(WireMessage, tag="progress"):
    key: str
    tokens: int
    seconds: float


class Prefilled(WireMessage, tag="prefilled"):
    key: str


class HandedOver(WireMessage, tag="handed_over"):
    key: str
    target: str


class HandOverFailed(WireMessage, tag="hand_over_failed"):
    key: str
    reason: str
    retry: bool


class Result(WireMessage, tag="result"):
    """A RequestOutput without its prompt, which the receiver has."""

    output: RequestOutput


class Peer(msgspec.Struct):
    name: str
    session: str
    data: str


class Peers(WireMessage, tag="peers"):
    """All living completion engines."""

    peers: list[Peer]


class Linked(WireMessage, tag="linked"):
    """Whether a prompt engine reaches any of the completion engines it was told of; if not, for how
    many seconds."""

    linked: bool
    seconds: float = 0.0


class Drain(WireMessage, tag="drain"):
    """Nothing new will come: finish, then leave."""


class Draining(WireMessage, tag="draining"):
    """Send me nothing new."""


class JobLost(WireMessage, tag="job_lost"):
    """Another process of the receiver's job is gone: it cannot go on either."""

    reason: str


class Submit(WireMessage, tag="submit"):
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    arrival_time: float


class Cancel(WireMessage, tag="cancel"):
    request_ids: list[str]


class StatusQuery(WireMessage, tag="status?"):
    pass


class StatusReply(WireMessage, tag="status"):
    status: dict[str, Any]


class Hand(WireMessage, tag="hand"):
    """A handoff.Message. rank: the target's rank for payloads. arrays: (cache, shape, dtype) of
    each payload frame that follows. remote: how to fetch the payload where the transport pulls it.
    """

    kind: str
    handoff_id: str
    body: dict[str, Any]
    rank: int = 0
    arrays: list[tuple[str, list[int], str]] = []
    remote: dict[str, Any] | None = None


_ALL = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Start
    | Abort
    | DropAttempt
    | Place
    | Placed
    | Unplace
    | Progress
    | Prefilled
    | HandedOver
    | HandOverFailed
    | Result
    | Peers
    | Linked
    | Drain
    | Draining
    | JobLost
    | Submit
    | Cancel
    | StatusQuery
    | StatusReply
    | Hand
)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(_ALL)


def encode(message: WireMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> WireMessage:
    """Raises BadMessage for anything else than a message of this version."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(
            f"{len(data)} bytes are no message of protocol {PROTOCOL}: {error}"
        ) from error


def decode_hello(data: bytes) -> Hello:
    """A connection's first message. Raises BadMessage naming both versions if the peer speaks
    another one."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{len(data)} bytes are no message: {error}") from error
    if not isinstance(fields, dict) or fields.get("t") != "hello":
        raise BadMessage("the first message of a connection must be a hello")
    if fields.get("protocol") != PROTOCOL:
        raise BadMessage(
            f"protocol version {fields.get('protocol')!r}, this side speaks {PROTOCOL}"
        )
    if fields.get("kind") not in KINDS:
        raise BadMessage(f"kind {fields.get('kind')!r}, known: {', '.join(KINDS)}")
    return decode(data)
