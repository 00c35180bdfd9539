"""The prompt engine's side of hand-overs: `Sender`, the state machine that owns a request until it
is acknowledged.

What the engine does with blocks is behind `SourcePort`, who gets a request behind `Placement`, so
the same code is tested with fake engines and clocks. See protocol.py for the states and messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer_jax.disagg.messages import (
    Ack,
    Cancel,
    Deliver,
    Failed,
    Granted,
    Link,
    Message,
    PayloadKind,
    Refusal,
    Reserve,
)
from deepinfer_jax.disagg.protocol import (
    Handoff,
    HandoffConfig,
    HandoffState,
    Placement,
)
from deepinfer_jax.disagg.side import HandoverSide
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PageRange:
    """`count` pages of a hand-over from page `first` on (of its state rows: the only one), for the
    target's rank."""

    handoff: HandoffId
    first: int
    count: int
    rank: int


class SourcePort(Protocol):
    """What a Sender asks of its engine."""

    def ready_pages(self, attempt: AttemptId) -> int:
        """Leading pages whose KV is computed, or enqueued on the device."""
        ...

    def send_payloads(self, link: Link, kind: PayloadKind, ranges: list[PageRange]) -> None:
        """Enqueues the transfers; sends `Pages` messages."""
        ...

    def forget(self, attempt: AttemptId, error: str | None) -> None:
        """The request is not this engine's any more, and its blocks may be reused. error: why
        nobody took it over; None: it has been handed over."""
        ...


@dataclass(eq=False)
class Outgoing:
    attempt: AttemptId
    request: RequestState
    pages: int
    states: int
    tries: int = 0
    target: str | None = None  # asked, or agreed
    asked_until: float = 0.0
    handoff: Handoff | None = None
    rank: int = 0
    sent: int = 0
    states_sent: bool = False
    state: RequestState | None = None
    next_ask: float = 0.0
    excluded: set[str] = field(default_factory=set)

    @property
    def handoff_id(self) -> HandoffId:
        return self.attempt.handoff(self.tries)

    @property
    def asked(self) -> str:
        """The target; RuntimeError if none has been asked."""
        if self.target is None:
            raise RuntimeError(f"hand-over {self.handoff_id} has no target")
        return self.target

    @property
    def agreed(self) -> Handoff:
        """The record; RuntimeError if no target has agreed."""
        if self.handoff is None:
            raise RuntimeError(f"hand-over {self.handoff_id} is not agreed on")
        return self.handoff

    @property
    def deadline(self) -> float:
        if self.handoff is not None:
            return self.handoff.deadline
        return self.next_ask if self.target is None else self.asked_until

    def restart(self, next_ask: float) -> None:
        """Another target may get it: the KV is still here."""
        self.target = self.handoff = None
        self.sent, self.states_sent, self.next_ask = 0, False, next_ask


class Sender(HandoverSide):
    """Hand-overs of one prompt engine, to any number of completion engines."""

    def __init__(
        self,
        port: SourcePort,
        placement: Placement,
        name: str,
        config: HandoffConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, config, clock)
        self.port, self.placement = port, placement
        self.outgoing: dict[AttemptId, Outgoing] = {}
        self.lost = "no completion engine was ever connected"  # why the last link went
        self.seconds: list[float] = []  # reserve to acknowledgement, newest last

    def offer(self, attempt: AttemptId, request: RequestState, pages: int, states: int = 0) -> None:
        """A request is about to be prefilled: ask a completion engine for room. request: without
        outputs. pages: of its prompt. states: its rows of state caches, 0 or 1."""
        if attempt in self.outgoing:
            raise ValueError(f"request {attempt}: it is offered already")
        self.outgoing[attempt] = Outgoing(attempt, request, pages, states)

    def prefilled(self, attempt: AttemptId, state: RequestState) -> None:
        """Its first token is sampled; `state` goes with the last pages."""
        self.outgoing[attempt].state = state

    def cancel(self, attempt: AttemptId, reason: str) -> bool:
        """Aborted, or ended with its first token: the target, if any, is told to free what it
        holds. False if unknown."""
        out = self.outgoing.pop(attempt, None)
        if out is None:
            return False
        self._withdraw(out, reason)
        return True

    @property
    def num_open(self) -> int:
        return len(self.outgoing)

    @property
    def next_deadline(self) -> float | None:
        return min((o.deadline for o in self.outgoing.values()), default=None)

    def pump(self) -> None:
        """Reads links, asks for room, sends what is ready, applies deadlines."""
        self._read_links()
        now = self.clock()
        for out in list(self.outgoing.values()):
            if out.target is not None and now >= out.deadline:
                what = "no answer to a reservation"
                if out.handoff is not None:
                    what = "no progress of the hand-over"
                self._failed(out, f"{out.target}: {what} within {self.config.timeout} s", True)
            if out.target is None and out.attempt in self.outgoing and now >= out.next_ask:
                self._ask(out, now)
        self._send(now)

    def peer_lost(self, name: str, reason: str) -> None:
        """A completion engine is gone: its hand-overs go elsewhere."""
        self.links.pop(name, None)
        self.lost = reason if name in reason else f"{name}: {reason}"
        for out in [o for o in self.outgoing.values() if o.target == name]:
            self._failed(out, self.lost, True)

    def _ask(self, out: Outgoing, now: float) -> None:
        if not self.links:
            self._give_up(out, f"no completion engine is left: {self.lost}", False)
            return
        target = self.placement.assign_decode(out.attempt, out.excluded)
        if target is None:  # back-pressure: everybody may be asked again
            out.excluded.clear()
            out.next_ask = now + self.config.retry_delay
            return
        if target not in self.links:
            self.placement.release_decode(out.attempt, target)
            out.excluded.add(target)
            out.next_ask = now + self.config.retry_delay
            return
        out.tries += 1
        out.target, out.asked_until = target, now + self.config.timeout
        reserve = Reserve(out.handoff_id, out.request, out.pages, out.states)
        self.links[target].send(Message(reserve))

    def _send(self, now: float) -> None:
        pages: dict[str, list[PageRange]] = {}
        states: dict[str, list[PageRange]] = {}
        ready: list[tuple[Outgoing, RequestState]] = []
        for out in self.outgoing.values():
            if out.handoff is None or out.handoff.state is HandoffState.DELIVERED:
                continue
            count = min(self.port.ready_pages(out.attempt), out.pages) - out.sent
            if count > 0:
                self._start_sending(out.handoff, now)
                part = PageRange(out.handoff_id, out.sent, count, out.rank)
                pages.setdefault(out.asked, []).append(part)
                out.sent += count
            if out.sent == out.pages and out.states and not out.states_sent:
                row = PageRange(out.handoff_id, 0, 1, out.rank)
                states.setdefault(out.asked, []).append(row)
                out.states_sent = True
            if out.sent == out.pages and out.state is not None:
                ready.append((out, out.state))
            if count > 0 or out.state is None:
                # computing is progress of the source: only the target can be late
                out.handoff.deadline = now + self.config.timeout
        for name, ranges in pages.items():
            self.port.send_payloads(self.links[name], "blocks", ranges)
        for name, ranges in states.items():
            self.port.send_payloads(self.links[name], "states", ranges)
        for out, state in ready:
            self.links[out.asked].send(Message(Deliver(out.handoff_id, state)))
            out.agreed.advance(HandoffState.DELIVERED, now, now + self.config.timeout)

    def _start_sending(self, handoff: Handoff, now: float) -> None:
        if handoff.state is HandoffState.RESERVED:
            handoff.advance(HandoffState.PREPARED, now)
        if handoff.state is HandoffState.PREPARED:
            handoff.advance(HandoffState.SENDING, now)

    def _on_message(self, name: str, message: Message) -> None:
        body = message.body
        if not isinstance(body, Granted | Refusal | Ack | Failed):
            raise ValueError(f"a prompt engine is sent no {type(body).__name__}")
        out = self.outgoing.get(body.handoff.attempt)
        if out is None or out.handoff_id != body.handoff or out.target != name:
            self._late(name, body)
            return
        now, delivered = self.clock(), HandoffState.DELIVERED
        match body:
            case Granted() if out.handoff is None:
                out.rank = body.rank
                deadline, times = now + self.config.timeout, {HandoffState.RESERVED: now}
                out.handoff = Handoff(body.handoff, self.name, name, deadline, times=times)
            case Refusal() if out.handoff is None:
                self._refused(out, body, now)
            case Ack() if out.handoff is not None and out.handoff.state is delivered:
                self._acknowledged(out, now)
            case Failed():
                self._failed(out, f"{name}: {body.reason}", body.retry, tell=False)
            case _:
                self.counters["duplicate"] += 1

    def _late(self, name: str, body: Granted | Refusal | Ack | Failed) -> None:
        self.counters["late"] += 1
        taken = self._ended.get(body.handoff) == "acked"
        if isinstance(body, Granted) and not taken and name in self.links:  # room nobody will use
            self.links[name].send(Message(Cancel(body.handoff, "no longer needed")))

    def _acknowledged(self, out: Outgoing, now: float) -> None:
        handoff = out.agreed
        handoff.complete(HandoffState.ACKED, now)
        del self.outgoing[out.attempt]
        self._ended.add(out.handoff_id, "acked")
        self.counters["acked"] += 1
        self.seconds.append(now - handoff.times[HandoffState.RESERVED])
        del self.seconds[:-4096]
        self.port.forget(out.attempt, None)
        self.placement.handed_over(out.attempt, out.asked)

    def _refused(self, out: Outgoing, refusal: Refusal, now: float) -> None:
        self.counters["refused"] += 1
        self.placement.release_decode(out.attempt, out.asked)
        out.excluded.add(out.asked)
        if refusal.retry:
            out.target, out.next_ask = None, now + self.config.retry_delay
        elif out.excluded >= self.links.keys():
            self._give_up(out, f"{out.target}: {refusal.reason}", False)
        else:
            out.target, out.next_ask = None, now

    def _failed(self, out: Outgoing, reason: str, retry: bool, tell: bool = True) -> None:
        """This try is over; the KV is still here, so another target may get it."""
        self._withdraw(out, reason, tell)
        out.excluded.add(out.asked)
        self.counters["failed_tries"] += 1
        logger.warning("%s: hand-over %s failed: %s", self.name, out.handoff_id, reason)
        if not retry or out.tries >= self.config.max_tries or not self.links:
            self._give_up(out, reason, retry)
            return
        if out.excluded >= self.links.keys():
            out.excluded.clear()
        out.restart(self.clock() + self.config.retry_delay)

    def _withdraw(self, out: Outgoing, reason: str, tell: bool = True) -> None:
        if out.target is None:
            return
        if tell and out.target in self.links:
            self.links[out.target].send(Message(Cancel(out.handoff_id, reason)))
        if out.handoff is not None:
            out.handoff.complete(HandoffState.FAILED, self.clock(), reason)
        self.placement.release_decode(out.attempt, out.target)

    def _give_up(self, out: Outgoing, reason: str, retry: bool) -> None:
        self.outgoing.pop(out.attempt, None)
        self.counters["given_up"] += 1
        self.port.forget(out.attempt, reason)
        self.placement.hand_over_failed(out.attempt, reason, retry)
