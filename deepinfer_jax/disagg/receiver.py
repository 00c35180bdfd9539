"""The completion engine's side of hand-overs: `Receiver`, which reserves, collects and enqueues.
See sender.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer_jax.disagg.messages import (
    Ack,
    AnyBody,
    Cancel,
    Deliver,
    Failed,
    Granted,
    Message,
    Pages,
    Payload,
    PayloadKind,
    Refusal,
    Reserve,
    Segment,
)
from deepinfer_jax.disagg.protocol import (
    Handoff,
    HandoffConfig,
    HandoffState,
    Refused,
)
from deepinfer_jax.disagg.side import HandoverSide
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId


class TargetPort(Protocol):
    """What a Receiver asks of its engine."""

    def reserve(self, handoff: HandoffId, request: RequestState, pages: int, states: int) -> int:
        """Holds slot and blocks; the rank that does. Raises Refused; ValueError if pages or states
        are not those of the request."""
        ...

    def write(self, kind: PayloadKind, payload: Any, segments: Sequence[Segment]) -> None:
        """Enqueues writing the segments of a payload, which is of the links' own class; rows that
        none names are dropped."""
        ...

    def enqueue(self, handoff: HandoffId, state: RequestState) -> bool:
        """All KV is there: decode from now on. False if it was aborted meanwhile (its reservation
        is then released here). ValueError, with nothing changed, for another request's state."""
        ...

    def release(self, handoff: HandoffId) -> None:
        """Frees a reservation."""
        ...

    def abort(self, handoff: HandoffId) -> None:
        """Ends a request that decodes already (its source gave it up before it saw the
        acknowledgement)."""
        ...


@dataclass(eq=False)
class Incoming:
    handoff: Handoff
    pages: int
    states: int
    rank: int
    written: set[int] = field(default_factory=set)  # pages
    states_written: int = 0
    state: RequestState | None = None

    @property
    def complete(self) -> bool:
        return (
            self.state is not None
            and len(self.written) == self.pages
            and self.states_written == self.states
        )


class Receiver(HandoverSide):
    """Hand-overs into one completion engine, from any number of prompt engines."""

    def __init__(
        self,
        port: TargetPort,
        name: str,
        config: HandoffConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, config, clock)
        self.port = port
        self.incoming: dict[HandoffId, Incoming] = {}
        self._arriving: list[tuple[Pages, Payload]] = []  # whose bytes are on their way

    @property
    def num_open(self) -> int:
        return len(self.incoming)

    @property
    def next_deadline(self) -> float | None:
        return min((i.handoff.deadline for i in self.incoming.values()), default=None)

    @property
    def has_arriving(self) -> bool:
        return bool(self._arriving)

    def pump(self) -> None:
        """Reads links, writes what has arrived, enqueues what is complete, frees what is late."""
        self._read_links()
        self._write_arrived()
        now = self.clock()
        for handoff_id, incoming in list(self.incoming.items()):
            if incoming.complete:
                self._enqueue(handoff_id, incoming, now)
            elif now >= incoming.handoff.deadline:
                source = incoming.handoff.source
                reason = f"no progress from {source} within {self.config.timeout} s"
                self._fail(handoff_id, reason, retry=True)

    def peer_lost(self, name: str, reason: str) -> None:
        """A prompt engine is gone: what it has not delivered is freed; what it has, decodes on."""
        self.links.pop(name, None)
        for handoff_id in [i for i, x in self.incoming.items() if x.handoff.source == name]:
            self._fail(handoff_id, reason if name in reason else f"{name}: {reason}", retry=True)

    def drop(self, attempt: AttemptId, reason: str) -> None:
        """The caller has cancelled the request: frees the reservations of all tries and tells their
        sources."""
        for handoff_id in [i for i in self.incoming if i.attempt == attempt]:
            self._fail(handoff_id, reason, retry=False)

    def drop_all(self, reason: str) -> None:
        """Nobody wants any of it."""
        for handoff_id in list(self.incoming):
            self._fail(handoff_id, reason, retry=False)

    def _on_message(self, name: str, message: Message) -> None:
        body = message.body
        match body:
            case Reserve():
                self._reserve(name, body)
            case Pages():
                self._check_segments(name, body, message.payload)
                self._arriving.append((body, message.payload))
                for handoff_id in {segment.handoff for segment in body.segments}:
                    self._touch(name, handoff_id)
            case Deliver():
                if self._touch(name, body.handoff):
                    self.incoming[body.handoff].state = body.state
                else:
                    self._answer_late(name, body.handoff)
            case Cancel():
                self._cancel(name, body.handoff, body.reason)
            case _:
                raise ValueError(f"a completion engine is sent no {type(body).__name__}")

    def _check_segments(self, name: str, pages: Pages, payload: Payload | None) -> None:
        """Raises ValueError for rows that the payload has not, and for pages nobody reserved."""
        if payload is None:
            raise ValueError("pages without a payload")
        for s in pages.segments:
            if s.row + s.count > payload.count:
                raise ValueError(f"{s}: the payload has {payload.count} rows")
            incoming = self._of(name, s.handoff)
            if incoming is None:
                continue
            limit = incoming.states if pages.kind == "states" else incoming.pages
            if s.first + s.count > limit:
                raise ValueError(f"{s}: {limit} {pages.kind} are reserved for it")

    def _of(self, name: str, handoff_id: HandoffId) -> Incoming | None:
        """A live hand-over of this peer; ValueError for another one's."""
        incoming = self.incoming.get(handoff_id)
        if incoming is not None and incoming.handoff.source != name:
            raise ValueError(f"hand-over {handoff_id} is {incoming.handoff.source}'s")
        return incoming

    def _reserve(self, name: str, body: Reserve) -> None:
        handoff_id, now = body.handoff, self.clock()
        known = self._of(name, handoff_id)
        if known is not None:  # asked twice: answered twice
            self._reply(name, Granted(handoff_id, known.rank))
            return
        if self._ended.get(handoff_id) is not None:
            self._answer_late(name, handoff_id)
            return
        try:
            rank = self.port.reserve(handoff_id, body.request, body.pages, body.states)
        except Refused as refused:
            self.counters["refused"] += 1
            self._reply(name, Refusal(handoff_id, refused.reason, refused.retry))
            return
        deadline, times = now + self.config.timeout, {HandoffState.RESERVED: now}
        handoff = Handoff(handoff_id, name, self.name, deadline, times=times)
        self.incoming[handoff_id] = Incoming(handoff, body.pages, body.states, rank)
        self._reply(name, Granted(handoff_id, rank))

    def _touch(self, name: str, handoff_id: HandoffId) -> bool:
        """Progress of a live hand-over; False for one that has ended or never began."""
        incoming = self._of(name, handoff_id)
        if incoming is None:
            self.counters["late"] += 1
            return False
        now, handoff = self.clock(), incoming.handoff
        for state in (HandoffState.PREPARED, HandoffState.SENDING):
            if handoff.state is not HandoffState.SENDING:
                handoff.advance(state, now)
        handoff.deadline = now + self.config.timeout
        return True

    def _write_arrived(self) -> None:
        arriving, self._arriving = self._arriving, []
        for pages, payload in arriving:
            if payload.ready():
                self._write(pages, payload)
            else:
                self._arriving.append((pages, payload))

    def _write(self, pages: Pages, payload: Payload) -> None:
        segments = [s for s in pages.segments if s.handoff in self.incoming]
        if segments:
            self.port.write(pages.kind, payload, segments)
        for s in segments:
            incoming = self.incoming[s.handoff]
            if pages.kind == "states":
                incoming.states_written = 1
            else:
                incoming.written.update(range(s.first, s.first + s.count))

    def _enqueue(self, handoff_id: HandoffId, incoming: Incoming, now: float) -> None:
        incoming.handoff.advance(HandoffState.DELIVERED, now)
        try:
            assert incoming.state is not None  # complete
            enqueued = self.port.enqueue(handoff_id, incoming.state)
        except ValueError as error:  # what it delivered does not fit what it reserved
            self._fail(handoff_id, f"{incoming.handoff.source} delivered: {error}", retry=False)
            return
        if not enqueued:
            self._end(handoff_id, "aborted", retry=False)
            return
        incoming.handoff.complete(HandoffState.ACKED, now)
        del self.incoming[handoff_id]
        self._ended.add(handoff_id, "acked")
        self.counters["acked"] += 1
        self._reply(incoming.handoff.source, Ack(handoff_id))

    def _cancel(self, name: str, handoff_id: HandoffId, reason: str) -> None:
        incoming = self._of(name, handoff_id)
        if incoming is not None:
            self.port.release(handoff_id)
            del self.incoming[handoff_id]
            incoming.handoff.complete(HandoffState.FAILED, self.clock(), reason)
        elif self._ended.get(handoff_id) == "acked":
            self.port.abort(handoff_id)
        self._ended.add(handoff_id, reason)

    def _fail(self, handoff_id: HandoffId, reason: str, retry: bool) -> None:
        self.port.release(handoff_id)
        self._end(handoff_id, reason, retry)

    def _end(self, handoff_id: HandoffId, reason: str, retry: bool) -> None:
        incoming = self.incoming.pop(handoff_id)
        incoming.handoff.complete(HandoffState.FAILED, self.clock(), reason)
        self._ended.add(handoff_id, reason)
        self.counters["failed"] += 1
        self._reply(incoming.handoff.source, Failed(handoff_id, reason, retry))

    def _answer_late(self, name: str, handoff_id: HandoffId) -> None:
        ended = self._ended.get(handoff_id) or "unknown hand-over"
        if ended == "acked":
            self._reply(name, Ack(handoff_id))
        else:
            self._reply(name, Failed(handoff_id, ended, retry=True))

    def _reply(self, name: str, body: AnyBody) -> None:
        if name in self.links:
            self.links[name].send(Message(body))
