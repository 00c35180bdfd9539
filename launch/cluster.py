"""The router process's core: who is there, who holds what, what clients are owed. One thread: the
hub's.

`Cluster` is the Coordinator of engines in other processes: what in one process are calls between
threads are messages here. Clients' requests are named `<session>.<client's id>`, so that two
clients never meet.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.protocol import check_layouts
from deepinfer_jax.disagg.split_request import FannedOutRequest
from deepinfer_jax.launch import cluster_status
from deepinfer_jax.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.hub import Channel, Hub, HubConfig, NotNow
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.routing.elastic import ElasticRouter
from deepinfer_jax.scheduler.routing.router import Capacity, RouterConfig, Verdict, split_attempt

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds between looks at deadlines."""
REMEMBERED = 64
"""Engines that have left and are still shown in the status."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """listen: where engines and clients connect. deadline: seconds a request waits for a missing
    role before it is given up. stall_timeout: seconds an engine's step may take before it counts as
    dead. max_requests: unfinished ones at a time."""

    listen: str = "tcp://127.0.0.1:0"
    deadline: float = 10.0
    stall_timeout: float = 30.0
    drain_timeout: float = 60.0
    max_requests: int = 65536
    router: RouterConfig = field(default_factory=RouterConfig)
    security: Security = field(default_factory=Security)
    hub: HubConfig = field(default_factory=lambda: HubConfig(max_frame=64 << 20))


class RemoteWorker:
    """An engine in another process, seen as pd_coordinator's Worker. Also its channel's handler."""

    def __init__(self, cluster: Cluster, channel: Channel, hello: wire.Hello) -> None:
        self.cluster, self.channel, self.hello = cluster, channel, hello
        self.name, self.kind = hello.name, hello.kind
        self.policy = EngineType[hello.kind.upper()].policy
        self.failed: str | None = None
        self.active = False  # all processes of its job are there
        self.draining = False
        self.linked = True  # False: a prompt engine that reaches no completion engine
        self.engine = self

    @property
    def state(self) -> str:
        if not self.active:
            return "waiting for its job"
        return "draining" if self.draining else "serving" if self.linked else "without links"

    def post(self, command: Callable[[], None]) -> None:
        command()

    def wake(self) -> None:
        pass

    def abort_request(self, key: str) -> None:
        self.channel.send(wire.Abort(key))

    def drop_attempt(self, key: str, reason: str) -> None:
        self.channel.send(wire.DropAttempt(key, reason))

    # ---- Handler ---------------------------------------------------------------------------------

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        self.cluster.on_engine(self, message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        self.cluster.engine_lost(self, reason)


class ClientHandler:
    """One client's channel and its unfinished requests (our names)."""

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self.cluster, self.channel = cluster, channel
        self.requests: set[str] = set()

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        self.cluster.on_client(self, message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        self.cluster.client_lost(self, reason)


class Cluster(Coordinator):
    def __init__(self, config: ClusterConfig) -> None:
        super().__init__()
        self.config = config
        self.router: ElasticRouter = ElasticRouter(config.router)
        self.workers: dict[str, RemoteWorker] = {}
        self.clients: dict[str, ClientHandler] = {}  # by session
        self.gone: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self.counters: Counter[str] = Counter()
        self.model: dict[str, Any] = {}
        self.draining = False
        self._drain_until = 0.0
        self._unplaced: dict[str, set[str]] = {}
        self._early: dict[str, list[tuple[RemoteWorker, RequestOutput]]] = {}
        self._starved_since: float | None = None
        self._last_seen: float | None = (
            None  # of an engine lost since the last look: nobody has been there since then
        )
        self._seeds = np.random.default_rng()
        self.last_progress = time.monotonic()
        self.hub = Hub("router", config.security, config.hub)
        self.endpoint = self.hub.listen(config.listen, self._accept)
        self.hub.every(LOOK_SECONDS, self._look)

    def start(self) -> None:
        self.hub.start()

    # ---- joining ---------------------------------------------------------------------------------

    def _accept(self, channel: Channel, hello: wire.Hello) -> wire.Welcome:
        if hello.kind == "client":
            channel.handler = ClientHandler(self, channel)
            self.clients[channel.session] = channel.handler
            return wire.Welcome("router", "", dict(self.model))
        if self.draining:
            raise ValueError("the router is draining")
        self._check_engine(hello)
        known = self.workers.get(hello.name)
        if known is not None and known.failed is None:
            if self.hub.clock() - known.channel.last_seen < 2 * self.config.hub.heartbeat + 0.1:
                raise NotNow(f"the name {hello.name!r} belongs to a living {known.kind} engine")
            known.channel.close("replaced by a newer process of the same name")
            self.engine_lost(known, "replaced by a newer process of the same name")
        worker = RemoteWorker(self, channel, hello)
        channel.handler = worker
        self.workers[hello.name] = worker
        self.model = self.model or dict(hello.model or {})
        self.hub.call(lambda: self._activate(worker.hello.job))
        return wire.Welcome("router", "")

    def _check_engine(self, hello: wire.Hello) -> None:
        """Raises ValueError naming what differs from the engines that are here."""
        if hello.layout is None or hello.capacity is None or hello.model is None:
            raise ValueError(f"a {hello.kind} engine must say its layout, capacity and model")
        for other in (w for w in self.workers.values() if w.failed is None):
            if (other.kind == "normal") != (hello.kind == "normal"):
                raise ValueError(
                    f"a {hello.kind} engine cannot join a deployment of {other.kind} engines"
                )
            ours, theirs = hello.layout, other.hello.layout
            if other.kind == hello.kind:
                different = [
                    k for k in dict.fromkeys((*ours, *theirs)) if ours.get(k) != theirs.get(k)
                ]
                if different:
                    pairs = "; ".join(
                        f"{k}: {ours.get(k)!r} here, {theirs.get(k)!r} on {other.name}"
                        for k in different
                    )
                    raise ValueError(f"engines of one deployment must agree: {pairs}")
            else:
                prompt, completion = (ours, theirs) if hello.kind == "prompt" else (theirs, ours)
                check_layouts(prompt, completion)

    def _activate(self, job: str) -> None:
        """Engines serve once every process of their job is here."""
        members = [w for w in self.workers.values() if w.hello.job == job and w.failed is None]
        if (
            not members
            or len(members) < members[0].hello.processes
            or all(w.active for w in members)
        ):
            return
        self.router.needs_completion = members[0].kind != "normal"
        for worker in members:
            worker.active = True
            self.counters["joined"] += 1
            self.router.join(
                worker.name,
                Capacity(*worker.hello.capacity) if worker.kind == "completion" else None,
            )
            logger.info("router: %s engine %s has joined", worker.kind, worker.name)
        self._tell_peers()
        self._dispatch()
        self._wake_prompt_engines()
        self._deliver()

    def _tell_peers(self) -> None:
        alive = [w for w in self.workers.values() if w.failed is None and w.active]
        peers = [
            wire.Peer(w.name, w.channel.session, w.hello.data)
            for w in alive
            if w.kind == "completion"
        ]
        for worker in alive:
            if worker.kind == "prompt":
                worker.channel.send(wire.Peers(peers))

    # ---- leaving ---------------------------------------------------------------------------------

    def engine_lost(self, worker: RemoteWorker, reason: str) -> None:
        """It, and the other processes of its job: what they held is queued again or ends."""
        if worker.failed is not None:
            return
        clean = worker.draining and not self._held_by(worker.name)
        logger.log(
            logging.INFO if clean else logging.WARNING,
            "router: %s engine %s is gone: %s",
            worker.kind,
            worker.name,
            reason,
        )
        self.counters["left" if clean else "lost"] += 1
        self._last_seen = worker.channel.last_seen
        self._on_crash(worker, f"{worker.name}: {reason}")
        self.gone.append(
            {"name": worker.name, "kind": worker.kind, "reason": reason, "time": time.time()}
        )
        others = [
            w for w in self.workers.values() if w.hello.job == worker.hello.job and w.failed is None
        ]
        for other in () if clean else others:  # a job that has drained leaves process by process
            other.channel.send(
                wire.JobLost(f"process {worker.hello.process} of the job is gone: {reason}")
            )
            other.channel.close(f"process {worker.hello.process} of the job is gone: {reason}")
            self.engine_lost(other, f"process {worker.hello.process} of its job is gone")
        self._tell_peers()
        self._deliver()

    def _held_by(self, name: str) -> bool:
        load = self.router.prompt.get(name) or self.router.completion.get(name)
        return load is not None and bool(load.jobs)

    def _on_crash(self, worker: RemoteWorker, reason: str) -> None:
        worker.failed = reason
        for verdict in self.router.leave(worker.name, reason):
            self._settle(verdict)
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
        self._dispatch()
        self._wake_prompt_engines()

    def client_lost(self, client: ClientHandler, reason: str) -> None:
        self.clients.pop(client.channel.session, None)
        self.counters["clients_lost"] += bool(client.requests)
        self.abort_request(list(client.requests))
        self._deliver()

    def begin_drain(self) -> None:
        """Nothing new; what is here finishes. Call `drained` until it says so."""
        self.draining, self._drain_until = True, time.monotonic() + self.config.drain_timeout

    @property
    def drained(self) -> bool:
        return self.draining and (not self._requests or time.monotonic() > self._drain_until)

    # ---- what engines say ------------------------------------------------------------------------

    def on_engine(self, worker: RemoteWorker, m: wire.WireMessage) -> None:
        match m:
            case wire.Result():
                self._on_result(worker, m.output)
            case wire.Place():
                self._place(worker, m.key, set(m.exclude))
            case wire.Unplace():
                self.unchoose_target(m.key, m.target)
            case wire.Progress():
                self.prefill_progress(m.key, m.tokens, m.seconds)
            case wire.Prefilled():
                self.prefilled(m.key)
                for early_worker, output in self._early.pop(m.key, ()):
                    self._on_result(early_worker, output)
            case wire.HandedOver():
                self.handed_over(m.key, m.target)
            case wire.HandOverFailed():
                self.hand_over_failed(m.key, m.reason, m.retry)
            case wire.Linked():
                self._on_linked(worker, m)
            case wire.Draining():
                self._drain_job(worker)
            case _:
                worker.channel.close(f"unexpected {type(m).__name__}", final=True)
                self.engine_lost(worker, f"sent an unexpected {type(m).__name__}")
        self.last_progress = time.monotonic()
        self._deliver()

    def _on_result(self, worker: RemoteWorker, output: RequestOutput) -> None:
        if len(output.outputs) != 1 or output.metrics is None:
            raise ValueError(
                f"a result of {worker.name} must have one completion and metrics, got {output}"
            )
        attempt = output.request_id.partition("/")[0]
        if worker.kind == "completion" and self._current(attempt) is not None:
            job = self.router.jobs[split_attempt(attempt)[0]]
            if job.prompt_engine is not None and not job.held:
                # The first token comes from the prompt engine on another connection, and must come
                # first.
                self._early.setdefault(attempt, []).append((worker, output))
                return
            self.router.delivered(attempt)
        self._on_output(worker, output)

    def _place(self, worker: RemoteWorker, key: str, exclude: set[str]) -> None:
        target = self.choose_target(key, exclude)
        if target is None and self._current(key) is not None:
            self._unplaced[key] = exclude
        else:
            self._unplaced.pop(key, None)
        worker.channel.send(wire.Placed(key, target))

    def _wake_prompt_engines(self) -> None:
        """Room may have been made: those who wait for a place, in the order they asked."""
        for key, exclude in list(self._unplaced.items()):
            if self._current(key) is None:
                del self._unplaced[key]
                continue
            target = self.choose_target(key, exclude)
            if target is not None:
                del self._unplaced[key]
                self.workers[self.router.jobs[split_attempt(key)[0]].prompt_engine].channel.send(
                    wire.Placed(key, target)
                )

    def _on_linked(self, worker: RemoteWorker, m: wire.Linked) -> None:
        """One that reaches no completion engine gets nothing new."""
        worker.linked = m.linked
        if not m.linked:
            self.router.drain(worker.name)
            self._last_seen = self.hub.clock() - m.seconds
            logger.warning(
                "router: prompt engine %s has reached no completion engine for %.1f s",
                worker.name,
                m.seconds,
            )
        elif not worker.draining:
            self.router.resume(worker.name)
            self._dispatch()

    def _drain_job(self, worker: RemoteWorker) -> None:
        for w in [
            w for w in self.workers.values() if w.hello.job == worker.hello.job and not w.draining
        ]:
            w.draining = True
            self.router.drain(w.name)
            if w is not worker:
                w.channel.send(wire.Drain())

    # ---- what clients say ------------------------------------------------------------------------

    def on_client(self, client: ClientHandler, m: wire.WireMessage) -> None:
        match m:
            case wire.Submit():
                self._submit(client, m)
            case wire.Cancel():
                self.abort_request([self._name(client, i) for i in m.request_ids])
            case wire.StatusQuery():
                client.channel.send(wire.StatusReply(self.status()))
            case _:
                client.channel.close(f"unexpected {type(m).__name__}", final=True)
                self.client_lost(client, f"sent an unexpected {type(m).__name__}")
        self._deliver()

    def _name(self, client: ClientHandler, request_id: str) -> str:
        return f"{client.channel.session}.{request_id}"

    def _submit(self, client: ClientHandler, m: wire.Submit) -> None:
        name = self._name(client, m.request_id)
        try:
            self._check_submit(name, m)
            params = SamplingParams.from_dict(m.params)
            request = FannedOutRequest.make(
                name, None, m.prompt_token_ids, params, self._draw_seed, m.arrival_time
            )
            client.requests.add(name)
            self.submit(request, self.model.get("max_model_len", 2**31))
        except ValueError as error:
            client.requests.discard(name)
            self.counters["rejected"] += 1
            completion = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
            client.channel.send(
                wire.Result(RequestOutput(m.request_id, None, [], None, [completion], True))
            )
        else:
            self.counters["submitted"] += 1

    def _check_submit(self, name: str, m: wire.Submit) -> None:
        if name in self._requests:
            raise ValueError(f"request {m.request_id!r}: a request with this id is already running")
        if "/" in m.request_id or not m.prompt_token_ids:
            raise ValueError(f"request {m.request_id!r}: an id without '/' and a prompt are needed")
        if self.draining:
            raise ValueError(f"request {m.request_id!r}: the router is draining")
        if len(self._requests) >= self.config.max_requests:
            raise ValueError(
                f"request {m.request_id!r}: {len(self._requests)} requests are unfinished, the"
                " limit is reached"
            )

    def _draw_seed(self) -> int:
        return int(self._seeds.integers(0, 2**64, dtype=np.uint64))

    def _deliver(self) -> None:
        """Outputs to their clients."""
        while True:
            try:
                output = self._outputs.get_nowait()
            except queue.Empty:
                return
            session, _, request_id = output.request_id.partition(".")
            client = self.clients.get(session)
            if output.finished:
                self.counters["finished"] += 1
            if client is not None:
                if output.finished:
                    client.requests.discard(output.request_id)
                client.channel.send(
                    wire.Result(
                        dataclasses.replace(output, request_id=request_id, prompt_token_ids=[])
                    )
                )

    # ---- Coordinator, with processes instead of threads ------------------------------------------

    def close_links(self, name: str, reason: str) -> None:
        pass  # `Peers` says so

    def _check_alive(self, request_id: str) -> None:
        pass  # requests wait for a missing role, for `deadline` seconds

    def _start(self, engine: RemoteWorker, part: Any, key: str) -> None:
        engine.channel.send(
            wire.Start(
                key, part.prompt_token_ids, part.params.to_dict(), part.seed, part.arrival_time
            )
        )

    def _tell(self, engines_to_notify: list[tuple[str, str]], reason: str) -> None:
        super()._tell(
            [(name, attempt) for name, attempt in engines_to_notify if name in self.workers], reason
        )

    # ---- deadlines -------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if not self._requests:
            self.last_progress = now
        for worker in list(self.workers.values()):
            if worker.channel.peer_ping.stuck > self.config.stall_timeout:
                reason = f"no progress for {worker.channel.peer_ping.stuck:.1f} s"
                worker.channel.close(reason)
                self.engine_lost(worker, reason)
        self._starved_since = (
            None if not self.router.starved() else (self._starved_since or self._last_seen or now)
        )
        self._last_seen = None
        if self._starved_since is not None and now - self._starved_since > self.config.deadline:
            missing = " and ".join(cluster_status.missing(self))
            for job in self.router.starved():
                reason = f"{missing} has been there for {self.config.deadline} s"
                engines_to_notify = tuple(self.router.cancel(job.request_id))
                self._settle(
                    Verdict(
                        job.request_id,
                        job.attempt_id,
                        reason,
                        False,
                        tuple(name for name, _ in engines_to_notify),
                    )
                )
            self._starved_since = None
        for key in [k for k in self._early if self._current(k) is None]:
            del self._early[key]
        self._deliver()

    # ---- seen from outside -----------------------------------------------------------------------

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Healthy: every role is there, no engine is stuck, and unfinished requests have moved
        within stall_timeout."""
        return cluster_status.health(self)

    def status(self) -> dict[str, Any]:
        """Plain values for `deepinfer-jax status`."""
        return cluster_status.status(self)
