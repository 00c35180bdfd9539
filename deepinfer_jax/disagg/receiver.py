"""The completion engine's side of hand-overs: `Receiver`, which reserves, collects and enqueues.
See handoff_source.py."""

from __future__ import annotations

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
    Refused,
    Tombstones,
)


class TargetPort(Protocol):
    """What a Receiver asks of its engine."""

    def reserve(self, handoff_id: str, request: dict[str, Any]) -> int:
        """Holds slot and blocks; the rank that does. Raises Refused."""
        ...

    def write(
        self, kind: str, payload: Any, segments: list[tuple[str, int, int, int]], live: set[str]
    ) -> None:
        """Enqueues writing (handoff id, first page, count, first payload row) segments; those not
        in `live` are dropped."""
        ...

    def enqueue(self, handoff_id: str, state: dict[str, Any]) -> bool:
        """All KV is there: decode from now on. False if it was aborted meanwhile (its reservation
        is then released here)."""
        ...

    def release(self, handoff_id: str, reason: str) -> None:
        """Frees a reservation."""
        ...

    def abort(self, handoff_id: str, reason: str) -> None:
        """Ends a request that decodes already (its source gave it up before it saw the
        acknowledgement)."""
        ...


@dataclass(eq=False)
class Incoming:
    handoff: Handoff
    link: Link
    pages: int
    states: int
    rank: int
    written: set[int] = field(default_factory=set)  # pages
    states_written: int = 0
    state: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return (
            self.state is not None
            and len(self.written) == self.pages
            and self.states_written == self.states
        )


class Receiver:
    """Hand-overs into one completion engine, from any number of prompt engines."""

    def __init__(
        self,
        port: TargetPort,
        name: str,
        config: HandoffConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.port, self.name, self.config, self.clock = port, name, config or HandoffConfig(), clock
        self.links: dict[str, Link] = {}
        self.incoming: dict[str, Incoming] = {}
        self._arriving: list[Message] = []  # "pages" whose bytes are still on their way
        self._ended = Tombstones()
        self.counters: Counter[str] = Counter()

    def connect(self, link: Link) -> None:
        self.links[link.peer] = link

    @property
    def next_deadline(self) -> float | None:
        return min((i.handoff.deadline for i in self.incoming.values()), default=None)

    @property
    def has_arriving(self) -> bool:
        """Bytes are on their way: pump() again soon."""
        return bool(self._arriving)

    def pump(self) -> None:
        """Reads links, writes what has arrived, enqueues what is complete, frees what is late."""
        for name in list(self.links):
            try:
                messages = self.links[name].poll()
            except PeerLost as lost:
                self.peer_lost(name, str(lost))
                continue
            for message in messages:
                self._on_message(name, message)
        self._write_arrived()
        now = self.clock()
        for handoff_id, incoming in list(self.incoming.items()):
            if incoming.complete:
                self._enqueue(handoff_id, incoming, now)
            elif now >= incoming.handoff.deadline:
                reason = (
                    f"no progress from {incoming.handoff.source} within {self.config.timeout} s"
                )
                self._fail(handoff_id, reason, retry=True)

    def peer_lost(self, name: str, reason: str) -> None:
        """A prompt engine is gone: what it has not delivered is freed; what it has, decodes on."""
        self.links.pop(name, None)
        for handoff_id in [i for i, x in self.incoming.items() if x.handoff.source == name]:
            self._fail(handoff_id, reason if name in reason else f"{name}: {reason}", retry=True)

    def drop(self, handoff_id: str, reason: str) -> bool:
        """The caller has cancelled the request: frees a reservation and tells the source. False if
        there is none."""
        if handoff_id not in self.incoming:
            return False
        self._fail(handoff_id, reason, retry=False)
        return True

    def drop_request(self, key: str, reason: str) -> None:
        """drop() for every try of an attempt."""
        for handoff_id in [i for i in self.incoming if i.rpartition("/")[0] == key]:
            self.drop(handoff_id, reason)

    def _on_message(self, name: str, message: Message) -> None:
        match message.kind:
            case "reserve":
                self._reserve(name, message)
            case "pages":
                self._arriving.append(message)
                for handoff_id, *_ in message.body["segments"]:
                    self._touch(handoff_id)
            case "deliver":
                if self._touch(message.handoff_id):
                    self.incoming[message.handoff_id].state = message.body["state"]
                else:
                    self._answer_late(name, message.handoff_id)
            case "cancel":
                self._cancel(message.handoff_id, message.body["reason"])
            case _:
                self.counters["unknown"] += 1

    def _reserve(self, name: str, message: Message) -> None:
        handoff_id, body, now = message.handoff_id, message.body, self.clock()
        if handoff_id in self.incoming:  # asked twice: answered twice
            self._reply(name, "granted", handoff_id, rank=self.incoming[handoff_id].rank)
            return
        if self._ended.get(handoff_id) is not None:
            self._answer_late(name, handoff_id)
            return
        try:
            rank = self.port.reserve(handoff_id, body["request"])
        except Refused as refused:
            self.counters["refused"] += 1
            self._reply(name, "refused", handoff_id, reason=refused.reason, retry=refused.retry)
            return
        handoff = Handoff(
            handoff_id,
            name,
            self.name,
            now + self.config.timeout,
            times={HandoffState.RESERVED: now},
        )
        self.incoming[handoff_id] = Incoming(
            handoff, self.links[name], body["pages"], body["states"], rank
        )
        self._reply(name, "granted", handoff_id, rank=rank)

    def _touch(self, handoff_id: str) -> bool:
        """Progress of a live hand-over; False for one that has ended or never began."""
        incoming = self.incoming.get(handoff_id)
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
        waiting = []
        for message in self._arriving:
            if not message.payload.ready():
                waiting.append(message)
                continue
            segments = [tuple(s) for s in message.body["segments"]]
            live = {s[0] for s in segments if s[0] in self.incoming}
            if live:
                self.port.write(message.body["kind"], message.payload, segments, live)
            for handoff_id, first, count, _ in segments:
                if handoff_id not in live:
                    continue
                if message.body["kind"] == "states":
                    self.incoming[handoff_id].states_written = 1
                else:
                    self.incoming[handoff_id].written.update(range(first, first + count))
        self._arriving = waiting

    def _enqueue(self, handoff_id: str, incoming: Incoming, now: float) -> None:
        incoming.handoff.advance(HandoffState.DELIVERED, now)
        if self.port.enqueue(handoff_id, incoming.state):
            incoming.handoff.complete(HandoffState.ACKED, now)
            del self.incoming[handoff_id]
            self._ended.add(handoff_id, "acked")
            self.counters["acked"] += 1
            self._reply(incoming.handoff.source, "ack", handoff_id)
        else:
            self._end(handoff_id, "aborted", retry=False)

    def _cancel(self, handoff_id: str, reason: str) -> None:
        if handoff_id in self.incoming:
            self.port.release(handoff_id, reason)
            self.incoming.pop(handoff_id).handoff.complete(
                HandoffState.FAILED, self.clock(), reason
            )
        elif self._ended.get(handoff_id) == "acked":
            self.port.abort(handoff_id, reason)
        self._ended.add(handoff_id, reason)

    def _fail(self, handoff_id: str, reason: str, retry: bool) -> None:
        self.port.release(handoff_id, reason)
        self._end(handoff_id, reason, retry)

    def _end(self, handoff_id: str, reason: str, retry: bool) -> None:
        incoming = self.incoming.pop(handoff_id)
        incoming.handoff.complete(HandoffState.FAILED, self.clock(), reason)
        self._ended.add(handoff_id, reason)
        self.counters["failed"] += 1
        self._reply(incoming.handoff.source, "failed", handoff_id, reason=reason, retry=retry)

    def _answer_late(self, name: str, handoff_id: str) -> None:
        ended = self._ended.get(handoff_id) or "unknown hand-over"
        if ended == "acked":
            self._reply(name, "ack", handoff_id)
        else:
            self._reply(name, "failed", handoff_id, reason=ended, retry=True)

    def _reply(self, name: str, kind: str, handoff_id: str, **body: Any) -> None:
        if name in self.links:
            self.links[name].send(Message(kind, handoff_id, body))
