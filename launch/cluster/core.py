"""The router process's core: who is there, who holds what, what clients are owed. One thread: the
hub's.

A `Cluster` has a Coordinator whose engines are in other processes: what in one process are calls
between threads are messages here. Clients' requests are named `<session>.<client's id>`, so that
two clients never meet.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.launch.cluster import status
from deepinfer_jax.launch.cluster.admission import check_engine
from deepinfer_jax.launch.cluster.clients import ClientDesk
from deepinfer_jax.launch.cluster.desk import PlacementDesk
from deepinfer_jax.launch.cluster.members import ClientMember, EngineMember
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel, HubConfig, NotNow
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.scheduler.routing.config import RouterConfig
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, attempt_of, parse_id
from deepinfer_jax.scheduler.routing.router import Router

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds between looks at deadlines."""
REMEMBERED = 64
"""Engines that have left and are still shown in the status."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """listen: where engines and clients connect. deadline: seconds a request waits for a missing
    role before it is given up. stall_timeout: seconds an engine's step may take before it counts as
    dead. max_requests: unfinished completions at a time; a request has n of them. max_n: of one
    request."""

    listen: str = "tcp://127.0.0.1:0"
    deadline: float = 10.0
    stall_timeout: float = 30.0
    drain_timeout: float = 60.0
    max_requests: int = 65536
    max_n: int = 1024
    router: RouterConfig = field(default_factory=RouterConfig)
    security: Security = field(default_factory=Security)
    hub: HubConfig = field(default_factory=lambda: HubConfig(max_frame=64 << 20))


class Cluster:
    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.router = Router(config=config.router)
        self.coordinator = Coordinator(self.router, waits=True)
        self.members: dict[str, EngineMember] = {}  # by name, those that are there
        self.gone: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self.counters: Counter[str] = Counter()
        self.model: wire.ModelInfo | None = None
        self.draining = False
        self._drain_until = 0.0
        self.desk = PlacementDesk(self.coordinator)
        self.clients = ClientDesk(self.coordinator, config.max_requests, config.max_n)
        self.early: dict[AttemptId, list[tuple[EngineMember, RequestOutput]]] = {}
        self._room = False  # there may be room for who waits for a place
        self._starved_since: float | None = None
        self._last_seen: float | None = None  # of an engine lost since the last look
        self.last_progress = time.monotonic()
        self.hub = Hub("router", config.security, config.hub)
        self.endpoint = self.hub.listen(config.listen, self._accept)
        self.hub.every(LOOK_SECONDS, self._look)

    def start(self) -> None:
        self.hub.start()

    # ---- joining ---------------------------------------------------------------------------------

    def _accept(self, channel: Channel, hello: wire.Hello) -> wire.Welcome:
        if hello.kind == "client":
            channel.handler = client = ClientMember(self, channel)
            self.clients.join(client)
            return wire.Welcome("router", model=self.model)
        if self.draining:
            raise ValueError("the router is draining")
        layout = check_engine(hello, self.members.values())
        known = self.members.get(hello.name)
        if known is not None:
            if self.hub.clock() - known.channel.last_seen < 2 * self.config.hub.heartbeat + 0.1:
                raise NotNow(f"the name {hello.name!r} belongs to a living {known.kind} engine")
            known.channel.close("replaced by a newer process of the same name")
            self.engine_lost(known, "replaced by a newer process of the same name")
        if not self.members or self.model is None:
            self.model = hello.model
        member = EngineMember(self, channel, hello, layout)
        channel.handler = member
        self.members[hello.name] = member
        self.hub.call(lambda: self._activate(member.hello.job))
        return wire.Welcome("router")

    def _job(self, job: str) -> list[EngineMember]:
        return [m for m in self.members.values() if m.hello.job == job]

    def _activate(self, job: str) -> None:
        """Engines serve once every process of their job is here."""
        members = self._job(job)
        if not members or len(members) < members[0].hello.processes or members[0].active:
            return
        self.router.needs_completion = members[0].kind != "normal"
        for member in members:
            member.active = True
            self.counters["joined"] += 1
            self.coordinator.join(member, member.capacity)
            logger.info("router: %s engine %s has joined", member.kind, member.name)
        self._tell_peers()
        self.coordinator.dispatch()
        self.room_made()
        self._flush()

    def _tell_peers(self) -> None:
        alive = [m for m in self.members.values() if m.active]
        peers = [
            wire.Peer(m.name, m.channel.session, m.hello.data)
            for m in alive
            if m.kind == "completion"
        ]
        for member in alive:
            if member.kind == "prompt":
                member.channel.send(wire.Peers(peers))

    # ---- leaving ---------------------------------------------------------------------------------

    def engine_lost(self, member: EngineMember, reason: str) -> None:
        """It, and the other processes of its job: what they held is queued again or ends."""
        if member.lost_reason is not None:
            return
        member.lost_reason = reason
        load = self.router.load_of(member.name)
        clean = member.draining and not (load is not None and load.jobs)
        logger.log(
            logging.INFO if clean else logging.WARNING,
            "router: %s engine %s is gone: %s",
            member.kind,
            member.name,
            reason,
        )
        self.counters["left" if clean else "lost"] += 1
        self._last_seen = member.channel.last_seen
        del self.members[member.name]
        self.coordinator.engine_left(member.name, f"{member.name}: {reason}")
        self.gone.append(
            {"name": member.name, "kind": member.kind, "reason": reason, "time": time.time()}
        )
        process = member.hello.process
        # a job that has drained leaves process by process
        for other in () if clean else self._job(member.hello.job):
            why = f"process {process} of the job is gone: {reason}"
            other.channel.send(wire.JobLost(why))
            other.channel.close(why)
            self.engine_lost(other, f"process {process} of its job is gone")
        self._tell_peers()
        self._flush()

    def client_lost(self, client: ClientMember, reason: str) -> None:
        self.counters["clients_lost"] += bool(client.requests)
        self.clients.leave(client)
        self._flush()

    def begin_drain(self) -> None:
        """Nothing new; what is here finishes. Call `drained` until it says so."""
        self.draining = self.clients.draining = True
        self._drain_until = time.monotonic() + self.config.drain_timeout

    @property
    def drained(self) -> bool:
        idle = not self.coordinator.requests
        return self.draining and (idle or time.monotonic() > self._drain_until)

    # ---- what engines say ------------------------------------------------------------------------

    def on_engine(self, member: EngineMember, m: wire.WireMessage) -> None:
        """Raises ValueError for what no engine of its kind may say."""
        match m:
            case wire.Result():
                self._on_result(member, m.output)
            case wire.Linked() if member.kind == "prompt":
                self._on_linked(member, m)
            case wire.Draining():
                self._drain_job(member)
            case (
                wire.AssignDecode()
                | wire.ReleaseDecode()
                | wire.Progress()
                | wire.Prefilled()
                | wire.HandedOver()
                | wire.HandOverFailed()
            ) if member.kind != "completion":
                if member.name in self.router.holders(m.attempt):
                    self._on_prompt_engine(member, m)
                else:
                    self.counters["late"] += 1
            case _:
                raise ValueError(f"a {member.kind} engine says no {type(m).__name__}")
        self.last_progress = time.monotonic()
        self._flush()

    def _on_prompt_engine(self, member: EngineMember, m: wire.WireMessage) -> None:
        """About an attempt that it holds."""
        match m:
            case wire.AssignDecode():
                self.desk.ask(m.attempt, set(m.exclude), member.channel.send)
            case wire.ReleaseDecode():
                self.coordinator.release_decode(m.attempt, m.target)
            case wire.Progress():
                self.coordinator.prefill_progress(m.attempt, m.tokens, m.seconds)
            case wire.Prefilled():
                self.coordinator.prefilled(m.attempt)
                for early_member, output in self.early.pop(m.attempt, ()):
                    self._on_result(early_member, output)
            case wire.HandedOver():
                self.coordinator.handed_over(m.attempt, m.target)
            case wire.HandOverFailed():
                self.coordinator.hand_over_failed(m.attempt, m.reason, m.retry)

    def _on_result(self, member: EngineMember, output: RequestOutput) -> None:
        """Raises ValueError for a result that no engine of its kind has."""
        output_of = parse_id(output.request_id)
        if isinstance(output_of, HandoffId) != (member.kind == "completion"):
            raise ValueError(f"a {member.kind} engine has no result of {output.request_id!r}")
        if len(output.outputs) != 1 or output.metrics is None:
            raise ValueError(f"a result must have one completion and metrics, got {output}")
        attempt = attempt_of(output_of)
        if member.kind == "completion" and member.name in self.router.holders(attempt):
            job = self.router.jobs[attempt.part_id]
            if job.prompt_engine is not None and not job.held:
                # The first token comes from the prompt engine on another connection, and must come
                # first.
                self.early.setdefault(attempt, []).append((member, output))
                return
            self.router.delivered(attempt)
        if not self.coordinator.on_output(member.name, output):
            self.counters["late"] += 1

    def _on_linked(self, member: EngineMember, m: wire.Linked) -> None:
        """One that reaches no completion engine gets nothing new."""
        member.linked = m.linked
        if not m.linked:
            self.router.drain(member.name)
            self._last_seen = self.hub.clock() - m.seconds
            logger.warning(
                "router: prompt engine %s has reached no completion engine for %.1f s",
                member.name,
                m.seconds,
            )
        elif not member.draining:
            self.router.engine_recovered(member.name)
            self.coordinator.dispatch()

    def _drain_job(self, member: EngineMember) -> None:
        for m in [m for m in self._job(member.hello.job) if not m.draining]:
            m.draining = True
            self.router.drain(m.name)
            if m is not member:
                m.channel.send(wire.Drain())

    # ---- what clients say ------------------------------------------------------------------------

    def on_client(self, client: ClientMember, m: wire.WireMessage) -> None:
        """Raises ValueError for what no client may say."""
        match m:
            case wire.Submit():
                error = self.clients.submit(client, m, self.model)
                self.counters["submitted" if error is None else "rejected"] += 1
            case wire.Cancel():
                self.coordinator.abort_request([client.own_name(i) for i in m.request_ids])
            case wire.StatusQuery():
                client.channel.send(wire.StatusReply(self.status()))
            case _:
                raise ValueError(f"a client says no {type(m).__name__}")
        self._flush()

    def room_made(self) -> None:
        self._room = True

    def _flush(self) -> None:
        """At the end of every event: outputs to their clients, places to who waits for one."""
        while self._room:
            self._room = False
            self.desk.answer_waiting()
        self.counters["finished"] += self.clients.deliver()

    # ---- deadlines -------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if not self.coordinator.requests:
            self.last_progress = now
        for member in list(self.members.values()):
            stuck = member.channel.peer_ping.stuck
            if stuck > self.config.stall_timeout and member.lost_reason is None:
                member.channel.close(f"no progress for {stuck:.1f} s")
                self.engine_lost(member, f"no progress for {stuck:.1f} s")
        starved, since = self.router.starved(), self._starved_since
        self._starved_since = (since or self._last_seen or now) if starved else None
        self._last_seen = None
        if self._starved_since is not None and now - self._starved_since > self.config.deadline:
            missing = " and ".join(status.missing(self.router, self.members.values()))
            self.coordinator.give_up_starved(
                f"{missing} has been there for {self.config.deadline} s"
            )
            self._starved_since = None
        for attempt in [a for a in self.early if not self.router.is_current(a)]:
            del self.early[attempt]
        self._flush()

    # ---- seen from outside -----------------------------------------------------------------------

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Healthy: every role is there, no engine is stuck, and unfinished requests have moved
        within stall_timeout."""
        return status.health(self)

    def status(self) -> dict[str, Any]:
        """Plain values for `deepinfer-jax status`."""
        return status.status(self)
