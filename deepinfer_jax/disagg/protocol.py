"""A hand-over from a prompt engine to a completion engine: its record, and the states it may take.

Imports no JAX, so every rule here is tested in microseconds. The two state machines are in
sender.py and receiver.py, their messages in messages.py, the engines that plug into them in
engines.py, the bytes in kv/block_mover.py.

    source (PE)                          target (CE)
    Reserve  ->                       slot and blocks are held, or the request is refused
             <-  Granted | Refusal    nothing has moved yet
    Pages    ->                       (as chunks are computed) written into the reserved blocks
    Deliver  ->                       tokens and text state; with all pages there: enqueued
             <-  Ack                  the source frees its blocks
    Cancel   ->  / <-  Failed         from any state; the other side frees what it holds

The source's record is the one that counts until ACKED. Each side keeps its own record of the same
hand-over, with its own deadline, so that neither waits for a dead peer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId


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
        self._ended: OrderedDict[HandoffId, str] = OrderedDict()

    def add(self, handoff_id: HandoffId, how: str) -> None:
        self._ended[handoff_id] = how
        self._ended.move_to_end(handoff_id)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def get(self, handoff_id: HandoffId) -> str | None:
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
    """One request on its way. deadline: seconds of the owner's clock; every progress moves it
    on."""

    handoff_id: HandoffId
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


class Placement(Protocol):
    """Who decides which completion engine takes a request, and is told what became of it. Called
    from the prompt engine's thread.

    In one process that is the coordinator; in a process of its own, the engine's side of the
    router's connection.
    """

    def assign_decode(self, attempt: AttemptId, exclude: set[str]) -> str | None:
        """A completion engine with room; None while none of those that are not excluded has any."""
        ...

    def release_decode(self, attempt: AttemptId, target: str) -> None:
        """That engine will not get it."""
        ...

    def prefill_progress(self, attempt: AttemptId, tokens: int, seconds: float) -> None: ...

    def prefilled(self, attempt: AttemptId) -> None: ...

    def handed_over(self, attempt: AttemptId, target: str) -> None: ...

    def hand_over_failed(self, attempt: AttemptId, reason: str, retry: bool) -> None:
        """No completion engine will take this attempt. retry: computing it again elsewhere may
        help."""
        ...
