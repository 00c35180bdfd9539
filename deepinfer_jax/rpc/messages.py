"""Messages between the processes of a deployment: router, engines, clients. Typed, versioned,
msgpack on the wire.

A message is one msgpack frame (`encode`/`decode`), followed by payload frames where its type says
so. Every number and length from outside has its bounds here, so that nobody behind `decode` has to
ask. Who talks to whom:

    engine -> router    Hello, then AssignDecode, ReleaseDecode, Progress, Prefilled, HandedOver,
                        HandOverFailed, Linked, Result, Draining, Ping
    router -> engine    Welcome | Refused, then Start, CancelAttempt, Assigned, Peers, Drain,
                        JobLost, Ping
    prompt <-> completion   Hello / Welcome | Refused, then Hand, Ping
    client -> router    Hello, then Submit, Cancel, StatusQuery, Ping
    router -> client    Welcome | Refused, then Result, StatusReply, Ping

The first message of a connection is Hello, whose fields "protocol" and "kind" keep their names and
types in every version, so that a mismatch can be named.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.scheduler.routing.ids import AttemptId

PROTOCOL = 3
"""Version of everything below; compared in the handshake."""

KINDS = ("prompt", "completion", "normal", "client")

MAX_IDS = 4096
"""Names, and tokens to stop at, that one message may list."""

Count = Annotated[int, Meta(ge=0, lt=2**40)]
Size = Annotated[int, Meta(ge=1, lt=2**40)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
Gauge = Annotated[float, Meta(ge=0, lt=1e18)]
Seed = Annotated[int, Meta(ge=0)]  # 64 bits is all that msgpack has
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Text = Annotated[str, Meta(max_length=65536)]


class BadMessage(ValueError):
    """Bytes that are no message of this protocol."""


class WireMessage(msgspec.Struct, tag_field="t", omit_defaults=True):
    """Base of all messages."""


class MeshShape(msgspec.Struct, frozen=True):
    """Sizes of the axes of an engine's mesh."""

    dp: Size = 1
    ep: Size = 1
    tp: Size = 1


class ModelInfo(msgspec.Struct, frozen=True):
    """What a client must know to check requests. model: where the engines read theirs."""

    model: str
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)]
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    eos_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    max_logprobs: Count
    enable_penalties: bool
    served_model_name: str | None = None
    mesh: MeshShape = MeshShape()


class Hello(WireMessage, tag="hello"):
    """kind: one of KINDS. name: what the peer calls itself, unique among the living. job: processes
    of one job fail together. layout: an engine's (disagg.layout), as plain values. capacity:
    (requests, tokens, max_len). data: endpoint where a completion engine takes hand-overs."""

    protocol: int
    kind: str
    name: Name
    job: Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")] = ""
    process: Annotated[int, Meta(ge=0, lt=65536)] = 0
    processes: Annotated[int, Meta(ge=1, le=65536)] = 1
    layout: dict[str, Any] | None = None
    capacity: tuple[Size, Size, Size] | None = None
    data: Annotated[str, Meta(max_length=1024)] = ""
    model: ModelInfo | None = None
    transports: Annotated[list[str], Meta(max_length=16)] = []


class Welcome(WireMessage, tag="welcome"):
    """name: the peer's. session: names this connection. model: for clients; None while no engine
    has joined. transport: the chosen one, for links."""

    name: str
    session: str = ""
    model: ModelInfo | None = None
    transport: str = "host"


class Refused(WireMessage, tag="refused"):
    """The connection ends here. final: asking again cannot help."""

    reason: str
    final: bool = True


class Gauges(msgspec.Struct, omit_defaults=True):
    """How an engine is, for the status table. cache: share of its blocks in use. hand_over_ms:
    median from reservation to acknowledgement."""

    waiting: Gauge = 0.0
    running: Gauge = 0.0
    cache: Gauge = 0.0
    hand_overs: Gauge = 0.0
    steps: Gauge = 0.0
    hand_over_ms: Gauge = 0.0


class Ping(WireMessage, tag="ping"):
    """Sent with every heartbeat. stuck: seconds that the sender's current step has taken."""

    stuck: Seconds = 0.0
    gauges: Gauges = msgspec.field(default_factory=Gauges)


class Start(WireMessage, tag="start"):
    attempt: AttemptId
    prompt_token_ids: list[TokenId]
    params: dict[str, Any]
    seed: Seed
    arrival_time: Seconds


class CancelAttempt(WireMessage, tag="cancel_attempt"):
    """Drop whatever is held of it."""

    attempt: AttemptId
    reason: str


class AssignDecode(WireMessage, tag="assign"):
    """Which completion engine may take it?"""

    attempt: AttemptId
    exclude: Annotated[list[str], Meta(max_length=MAX_IDS)] = []


class Assigned(WireMessage, tag="assigned"):
    """target None: nobody has room; the router sends another one as soon as somebody has."""

    attempt: AttemptId
    target: str | None = None


class ReleaseDecode(WireMessage, tag="release"):
    """That engine will not get it."""

    attempt: AttemptId
    target: str


class Progress(WireMessage, tag="progress"):
    attempt: AttemptId
    tokens: Count
    seconds: Seconds


class Prefilled(WireMessage, tag="prefilled"):
    attempt: AttemptId


class HandedOver(WireMessage, tag="handed_over"):
    attempt: AttemptId
    target: str


class HandOverFailed(WireMessage, tag="hand_over_failed"):
    attempt: AttemptId
    reason: Text
    retry: bool


class Result(WireMessage, tag="result"):
    """A RequestOutput without its prompt, which the receiver has."""

    output: RequestOutput


class Peer(msgspec.Struct):
    name: Name
    session: str
    data: str


class Peers(WireMessage, tag="peers"):
    """All living completion engines."""

    peers: list[Peer]


class Linked(WireMessage, tag="linked"):
    """Whether a prompt engine reaches any of the completion engines it knows of; if not, for how
    many seconds."""

    linked: bool
    seconds: Seconds = 0.0


class Drain(WireMessage, tag="drain"):
    """Nothing new will come: finish, then leave."""


class Draining(WireMessage, tag="draining"):
    """Send me nothing new."""


class JobLost(WireMessage, tag="job_lost"):
    """Another process of the receiver's job is gone: it cannot go on either."""

    reason: str


class Submit(WireMessage, tag="submit"):
    request_id: Annotated[str, Meta(max_length=4096)]
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    params: dict[str, Any]
    arrival_time: Seconds


class Cancel(WireMessage, tag="cancel"):
    request_ids: list[str]


class StatusQuery(WireMessage, tag="status?"):
    pass


class StatusReply(WireMessage, tag="status"):
    status: dict[str, Any]


class ArrayLayout(msgspec.Struct, frozen=True, array_like=True):
    """One payload frame. cache: whose entries it holds."""

    cache: str
    shape: Annotated[list[Count], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=32)]


class Remote(msgspec.Struct, frozen=True):
    """How to fetch a payload where the transport pulls it. number: under which it is offered.
    count: rows in use. size: the bucket."""

    number: Annotated[int, Meta(ge=0)]
    count: Size
    size: Size


class Hand(WireMessage, tag="hand"):
    """A message of a hand-over. body: its own encoding (disagg.messages). rank: the target's rank,
    for payloads. arrays: of each payload frame that follows."""

    body: msgspec.Raw
    rank: Annotated[int, Meta(ge=0, lt=65536)] = 0
    arrays: Annotated[list[ArrayLayout], Meta(max_length=MAX_IDS)] = []
    remote: Remote | None = None


_ALL = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Start
    | CancelAttempt
    | AssignDecode
    | Assigned
    | ReleaseDecode
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
    hello = decode(data)
    assert isinstance(hello, Hello)  # by its tag
    return hello
