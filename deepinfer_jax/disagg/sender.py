"""The prompt engine's side of hand-overs: `Sender`, the state machine that owns a request until it
is acknowledged.

Driven by its engine's loop: `pump()` reads the links, moves every hand-over as far as it goes and
applies deadlines; nothing waits and nothing runs on its own. What the engine does with blocks is
behind `SourcePort`, so the same code is tested with fake engines and clocks. See handoff.py for the
messages and the table of states.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer_jax.disagg.protocol import (
    Handoff,
    HandoffConfig,
    HandoffState,
    Link,
    Message,
    PeerLost,
    Tombstones,
)

logger = logging.getLogger(__name__)


class SourcePort(Protocol):
    """What a Sender asks of its engine. key: the attempt id that was offered."""

    def choose_target(self, key: str, exclude: set[str]) -> str | None:
        """A link's name, or None while no completion engine has room."""
        ...

    def unchoose_target(self, key: str, target: str) -> None:
        """That target will not get it."""
        ...

    def ready_pages(self, key: str) -> int:
        """Leading pages whose KV is computed, or enqueued on the device."""
        ...

    def send_pages(self, link: Link, batch: list[tuple[str, str, int, int, int]]) -> None:
        """Enqueues one transfer of (handoff id, key, first page, count, target rank) ranges; sends
        "pages" messages."""
        ...

    def send_states(self, link: Link, batch: list[tuple[str, str, int]]) -> None:
        """The same for the state rows of (handoff id, key, target rank)."""
        ...

    def handed_over(self, key: str, target: str) -> None:
        """Acknowledged: the blocks may be reused."""
        ...

    def hand_over_failed(self, key: str, reason: str, retry: bool) -> None:
        """No completion engine will take this attempt. retry: computing it again elsewhere may
        help."""
        ...


@dataclass(eq=False)
class Outgoing:
    key: str
    request: dict[str, Any]
    pages: int
    states: int
    tries: int = 0
    target: str | None = None  # asked, or agreed
    asked_until: float = 0.0
    handoff: Handoff | None = None
    rank: int = 0
    sent: int = 0
    states_sent: bool = False
    state: dict[str, Any] | None = None
    next_ask: float = 0.0
    excluded: set[str] = field(default_factory=set)

    @property
    def handoff_id(self) -> str:
        return f"{self.key}/{self.tries}"


class Sender:
    """Hand-overs of one prompt engine, to any number of completion engines."""

    def __init__(
        self,
        port: SourcePort,
        name: str,
        config: HandoffConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.port, self.name, self.config, self.clock = port, name, config or HandoffConfig(), clock
        self.links: dict[str, Link] = {}
        self.outgoing: dict[str, Outgoing] = {}
        self._ended = Tombstones()
        self.counters: Counter[str] = Counter()
        self.lost = "no completion engine was ever connected"  # why the last link went
        self.seconds: list[float] = []  # reserve to acknowledgement, newest last

    def connect(self, link: Link) -> None:
        self.links[link.peer] = link

    def offer(self, key: str, request: dict[str, Any], pages: int, states: int = 0) -> None:
        """A request is about to be prefilled: ask a completion engine for room. request:
        RequestState without outputs."""
        if key in self.outgoing:
            raise ValueError(f"request {key!r} is offered already")
        self.outgoing[key] = Outgoing(key, request, pages, states)

    def prefilled(self, key: str, state: dict[str, Any]) -> None:
        """Its first token is sampled; `state` goes with the last pages."""
        self.outgoing[key].state = state

    def cancel(self, key: str, reason: str) -> bool:
        """Aborted, or ended with its first token: the target, if any, is told to free what it
        holds. False if unknown."""
        out = self.outgoing.pop(key, None)
        if out is None:
            return False
        self._withdraw(out, reason)
        return True

    @property
    def next_deadline(self) -> float | None:
        """When pump() has something to do even if no message comes."""
        times = [
            o.handoff.deadline if o.handoff else o.asked_until if o.target else o.next_ask
            for o in self.outgoing.values()
        ]
        return min(times, default=None)

    def pump(self) -> None:
        """Reads links, asks for room, sends what is ready, applies deadlines."""
        for name in list(self.links):
            self._read(name)
        now = self.clock()
        for out in list(self.outgoing.values()):
            if out.handoff is not None and now >= out.handoff.deadline:
                self._failed(
                    out,
                    f"{out.target}: no progress of the hand-over within {self.config.timeout} s",
                    True,
                )
            elif out.handoff is None and out.target is not None and now >= out.asked_until:
                self._failed(
                    out,
                    f"{out.target}: no answer to a reservation within {self.config.timeout} s",
                    True,
                )
            if out.target is None and out.key in self.outgoing and now >= out.next_ask:
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
        target = self.port.choose_target(out.key, out.excluded)
        if target is None:  # back-pressure: everybody may be asked again
            out.excluded.clear()
            out.next_ask = now + self.config.retry_delay
            return
        if target not in self.links:
            self.port.unchoose_target(out.key, target)
            out.excluded.add(target)
            out.next_ask = now + self.config.retry_delay
            return
        out.tries += 1
        out.target, out.asked_until = target, now + self.config.timeout
        body = {"request": out.request, "pages": out.pages, "states": out.states}
        self.links[target].send(Message("reserve", out.handoff_id, body))

    def _send(self, now: float) -> None:
        pages: dict[str, list] = {}
        states: dict[str, list] = {}
        ready: list[Outgoing] = []
        for out in self.outgoing.values():
            if out.handoff is None or out.handoff.state is HandoffState.DELIVERED:
                continue
            count = min(self.port.ready_pages(out.key), out.pages) - out.sent
            if count > 0:
                if out.handoff.state is HandoffState.RESERVED:
                    out.handoff.advance(HandoffState.PREPARED, now)
                if out.handoff.state is HandoffState.PREPARED:
                    out.handoff.advance(HandoffState.SENDING, now)
                pages.setdefault(out.target, []).append(
                    (out.handoff_id, out.key, out.sent, count, out.rank)
                )
                out.sent += count
            if out.sent == out.pages and out.states and not out.states_sent:
                states.setdefault(out.target, []).append((out.handoff_id, out.key, out.rank))
                out.states_sent = True
            if out.sent == out.pages and out.state is not None:
                ready.append(out)
            if (
                count > 0 or out.state is None
            ):  # computing is progress of the source: only the target can be late
                out.handoff.deadline = now + self.config.timeout
        for name, batch in pages.items():
            self.port.send_pages(self.links[name], batch)
        for name, batch in states.items():
            self.port.send_states(self.links[name], batch)
        for out in ready:
            self.links[out.target].send(Message("deliver", out.handoff_id, {"state": out.state}))
            out.handoff.advance(HandoffState.DELIVERED, now, now + self.config.timeout)

    def _read(self, name: str) -> None:
        try:
            messages = self.links[name].poll()
        except PeerLost as lost:
            self.peer_lost(name, str(lost))
            return
        for message in messages:
            self._on_message(name, message)

    def _on_message(self, name: str, message: Message) -> None:
        key = message.handoff_id.rpartition("/")[0]
        out = self.outgoing.get(key)
        if out is None or out.handoff_id != message.handoff_id or out.target != name:
            self.counters["late"] += 1
            taken = self._ended.get(message.handoff_id) == "acked"
            if (
                message.kind == "granted" and not taken and name in self.links
            ):  # room nobody will use
                self.links[name].send(
                    Message("cancel", message.handoff_id, {"reason": "no longer needed"})
                )
            return
        now = self.clock()
        match message.kind:
            case "granted" if out.handoff is None:
                out.rank = message.body["rank"]
                out.handoff = Handoff(
                    message.handoff_id,
                    self.name,
                    name,
                    now + self.config.timeout,
                    times={HandoffState.RESERVED: now},
                )
            case "refused" if out.handoff is None:
                self._refused(out, message.body, now)
            case "ack" if out.handoff is not None and out.handoff.state is HandoffState.DELIVERED:
                out.handoff.complete(HandoffState.ACKED, now)
                del self.outgoing[key]
                self._ended.add(message.handoff_id, "acked")
                self.counters["acked"] += 1
                self.seconds.append(now - out.handoff.times[HandoffState.RESERVED])
                del self.seconds[:-4096]
                self.port.handed_over(key, name)
            case "failed":
                self._failed(
                    out, f"{name}: {message.body['reason']}", message.body["retry"], tell=False
                )
            case _:
                self.counters["duplicate"] += 1

    def _refused(self, out: Outgoing, body: dict[str, Any], now: float) -> None:
        self.counters["refused"] += 1
        self.port.unchoose_target(out.key, out.target)
        out.excluded.add(out.target)
        if body["retry"]:
            out.target, out.next_ask = None, now + self.config.retry_delay
        elif out.excluded >= self.links.keys():
            self._give_up(out, f"{out.target}: {body['reason']}", False)
        else:
            out.target, out.next_ask = None, now

    def _failed(self, out: Outgoing, reason: str, retry: bool, tell: bool = True) -> None:
        """This try is over; the KV is still here, so another target may get it."""
        target = out.target
        self._withdraw(out, reason, tell)
        out.excluded.add(target)
        self.counters["failed_tries"] += 1
        logger.warning("%s: hand-over %s failed: %s", self.name, out.handoff_id, reason)
        if not retry or out.tries >= self.config.max_tries or not self.links:
            self._give_up(out, reason, retry)
            return
        if out.excluded >= self.links.keys():
            out.excluded.clear()
        out.target = out.handoff = None
        out.sent, out.states_sent, out.next_ask = 0, False, self.clock() + self.config.retry_delay

    def _withdraw(self, out: Outgoing, reason: str, tell: bool = True) -> None:
        if out.target is None:
            return
        if tell and out.target in self.links:
            self.links[out.target].send(Message("cancel", out.handoff_id, {"reason": reason}))
        if out.handoff is not None:
            out.handoff.complete(HandoffState.FAILED, self.clock(), reason)
        self.port.unchoose_target(out.key, out.target)

    def _give_up(self, out: Outgoing, reason: str, retry: bool) -> None:
        self.outgoing.pop(out.key, None)
        self.counters["given_up"] += 1
        self.port.hand_over_failed(out.key, reason, retry)
