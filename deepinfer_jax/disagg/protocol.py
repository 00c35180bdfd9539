"""What passes from a prompt engine to a completion engine: the hand-over record, its states, its
messages, the layout check.

Pure Python: imports no JAX, so every rule here is tested in microseconds. The two state machines
that exchange these messages are in handoff_source.py and handoff_target.py, the engines that plug
into them in pd_engines.py, the bytes in kv_transfer.py.

    source (PE)                          target (CE)
    reserve  ->                                          slot and blocks are held, or the request is
    refused
             <-  granted | refused                       nothing has moved yet
    pages    ->  (as chunks are computed)                written into the reserved blocks
    deliver  ->                                          tokens, sampling and text state; once all
    pages are there: enqueued
             <-  ack                                     the source frees its blocks
    cancel   ->  / <-  failed                            from any state; the other side frees what
    it holds

The source's record is the one that counts until ACKED. Each side keeps its own record of the same
hand-over, with its own deadline, so that neither waits for a dead peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from deepinfer_jax.scheduler.roles import EngineType

PROTOCOL = 1
"""Version of the messages; compared at connect."""


class HandoffState(Enum):
    RESERVED = "reserved"  # the target holds a slot and blocks
    PREPARED = "prepared"  # part of the KV is computed (or on its way to the device), nothing sent
    SENDING = "sending"
    DELIVERED = (  # source: everything is given to the transport; target: everything has arrived
        "delivered"
    )
    ACKED = "acked"  # the target decodes it
    FAILED = "failed"


_S = HandoffState
LEGAL_TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    _S.RESERVED: frozenset({_S.PREPARED, _S.FAILED}),
    _S.PREPARED: frozenset({_S.SENDING, _S.FAILED}),
    _S.SENDING: frozenset({_S.DELIVERED, _S.FAILED}),
    _S.DELIVERED: frozenset({_S.ACKED, _S.FAILED}),
    _S.ACKED: frozenset(),
    _S.FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A hand-over was moved along an edge that LEGAL_TRANSITIONS does not have."""


class LayoutMismatch(ValueError):
    """The two sides of a connection could not understand each other's blocks; the message names
    both values."""


class PeerLost(RuntimeError):
    """The other end of a link is gone."""


class Refused(Exception):
    """A target cannot take a request. retry: it may later; otherwise it never will."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.reason, self.retry = reason, retry


class Tombstones:
    """How the newest ended hand-overs ended, so that late and duplicate messages are recognised."""

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._ended: OrderedDict[str, str] = OrderedDict()

    def add(self, handoff_id: str, how: str) -> None:
        self._ended[handoff_id] = how
        self._ended.move_to_end(handoff_id)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def get(self, handoff_id: str) -> str | None:
        """ "acked", the reason of a failure, or None."""
        return self._ended.get(handoff_id)


@dataclass(frozen=True)
class HandoffConfig:
    """timeout: seconds without progress after which a hand-over has failed. retry_delay: seconds
    before a request that was refused asks again. max_tries: hand-overs of one attempt, to different
    targets where there are."""

    timeout: float = 60.0
    retry_delay: float = 0.02
    max_tries: int = 3

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.retry_delay < 0 or self.max_tries < 1:
            raise ValueError(f"need timeout > 0, retry_delay >= 0, max_tries >= 1, got {self}")


@dataclass(eq=False)
class Handoff:
    """One request on its way. handoff_id: attempt id of the request and number of the try.
    deadline: seconds of the owner's clock; every progress moves it on."""

    handoff_id: str
    source: str
    target: str
    deadline: float
    state: HandoffState = HandoffState.RESERVED
    reason: str | None = None
    times: dict[HandoffState, float] = field(default_factory=dict)

    @property
    def is_terminal(self) -> bool:
        return not LEGAL_TRANSITIONS[self.state]

    @property
    def owner(self) -> str | None:
        """The engine whose blocks hold the request: the source until acknowledged; nobody once it
        has failed."""
        return {HandoffState.ACKED: self.target, HandoffState.FAILED: None}.get(
            self.state, self.source
        )

    def advance(
        self,
        state: HandoffState,
        now: float,
        deadline: float | None = None,
        reason: str | None = None,
    ) -> None:
        """Moves along the table. Raises IllegalTransition naming the hand-over and both states."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"hand-over {self.handoff_id}: {self.state.name} -> {state.name} (reason"
                f" {reason or self.reason!r})"
            )
        self.state, self.reason = state, reason
        self.times[state] = now
        if deadline is not None:
            self.deadline = deadline

    def complete(self, state: HandoffState, now: float, reason: str | None = None) -> bool:
        """Ends it, ACKED or FAILED; False, and nothing changes, if it had ended: a second
        completion is no error."""
        if self.is_terminal:
            return False
        self.advance(state, now, reason=reason)
        return True


# ---- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """kind: "reserve", "pages", "deliver", "cancel" (from the source); "granted", "refused", "ack",
    "failed" (from the target). body: plain values (msgpack and JSON can carry them). payload: only
    with "pages"; has `ready()` at the receiving end.

    Bodies: reserve {"request": see RequestState.reservation, "pages": n, "states": 0 | 1}; granted
    {"rank": r}; pages {"kind": "blocks" | "states", "segments": [[handoff id, first page, count,
    first row of the payload], ...]}; deliver {"state": RequestState.to_dict()}; refused and failed
    {"reason": text, "retry": bool}; cancel {"reason": text}.
    """

    kind: str
    handoff_id: str
    body: dict[str, Any]
    payload: Any = None


class Link(Protocol):
    """One end of a connection between a prompt engine and a completion engine: the transport.

    Messages of one direction arrive in order, or not at all once the peer is lost; nothing here
    waits. `connect` functions of the transports compare layouts (`check_layouts`) before they
    return a link.
    """

    peer: str
    """Name of the engine at the other end."""

    def send(self, message: Message, rank: int = 0) -> None:
        """Enqueues a message. With a payload: `rank` is the target's rank ("granted") whose devices
        it must reach."""
        ...

    def poll(self) -> list[Message]:
        """What has arrived. Raises PeerLost once everything that arrived has been returned and the
        peer is gone."""
        ...

    def close(self, reason: str = "closed") -> None:
        """The peer's poll() raises PeerLost(reason)."""
        ...


# ---- layout --------------------------------------------------------------------------------------


def make_layout(
    role: EngineType, fingerprint: str, blocks: Mapping[str, Any], max_model_len: int
) -> dict[str, Any]:
    """What one side is, as plain values, for `check_layouts`. blocks: `BlockMover.describe()`."""
    return {
        "protocol": PROTOCOL,
        "role": int(role),
        "roles": {r.name: int(r) for r in EngineType},
        "model": fingerprint,
        "block_size": blocks["block_size"],
        "caches": {
            c["name"]: {k: v for k, v in c.items() if k != "name"} for c in blocks["caches"]
        },
        "max_model_len": max_model_len,
    }


def check_layouts(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raises LayoutMismatch naming every difference with both values. source: the prompt engine's,
    target: the completion one's."""
    problems = [
        f"{name}: {source.get(name)!r} on the prompt side, {target.get(name)!r} on the completion"
        " side"
        for name in ("protocol", "roles", "model", "block_size", "max_model_len")
        if source.get(name) != target.get(name)
    ]
    ours, theirs = source.get("caches", {}), target.get("caches", {})
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            problems.append(f"cache {name!r}: {a} on the prompt side, {b} on the completion side")
            continue
        for key in dict.fromkeys((*a, *b)):
            if a.get(key) != b.get(key):
                problems.append(
                    f"cache {name!r} {key}: {a.get(key)!r} on the prompt side, {b.get(key)!r} on"
                    " the completion side"
                )
    for side, layout, role in (
        ("prompt", source, EngineType.PROMPT),
        ("completion", target, EngineType.COMPLETION),
    ):
        if layout.get("role") != int(role):
            problems.append(
                f"role of the {side} side: {layout.get('role')!r}, expected {role.name}={int(role)}"
            )
    if problems:
        raise LayoutMismatch("the engines cannot exchange KV: " + "; ".join(problems))
