"""One engine in a process of its own: its loop, what its router asks, its links to engines of the
other role."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.engines import ServedEngine
from deepinfer_jax.disagg.layout import Layout, check_layouts
from deepinfer_jax.disagg.loop import EngineLoop
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.disagg.protocol import HandoffConfig
from deepinfer_jax.launch.links import NetLink
from deepinfer_jax.launch.peer_links import PeerLinks
from deepinfer_jax.launch.placement import RouterPlacement
from deepinfer_jax.launch.session import REDIAL_SECONDS, RouterSession
from deepinfer_jax.launch.transports import CompletionTransports, PromptTransports
from deepinfer_jax.launch.votes import SocketDPGroup
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel, HubConfig
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.routing.ids import AttemptId
from deepinfer_jax.snapshot.job import snapshot_on_sigterm
from deepinfer_jax.snapshot.job import take as take_snapshot

logger = logging.getLogger(__name__)

IDLE_POLL = 0.2


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """router: "tcp://host:port". name: unique among the living. job, process, processes: which part
    of which job this is. data: where a completion engine listens ("tcp://host:0": any port);
    advertise: the host others reach it by. transport: how KV travels, "host" (through host memory
    and this link's socket) or "device" (jax.experimental.transfer, where both sides want it and
    their shards match; else "host"). drain_timeout: seconds that requests get to finish after
    SIGTERM."""

    router: str
    name: str
    job: str = ""
    process: int = 0
    processes: int = 1
    data: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    security: Security = field(default_factory=Security)
    hub: HubConfig = field(default_factory=HubConfig)
    handoff: HandoffConfig = field(
        default_factory=lambda: HandoffConfig(timeout=10.0, retry_delay=0.002)
    )
    transport: str = "host"
    reserve_fraction: float = 1.0
    drain_timeout: float = 60.0
    snapshot_on_sigterm: str | None = None

    @property
    def host(self) -> str:
        """The address other processes reach this one by."""
        return self.advertise or self.data.removeprefix("tcp://").rpartition(":")[0]


class EngineServer:
    """Call `run()` in the main thread. group: votes with the other processes of the job (None:
    there are none)."""

    def __init__(
        self,
        engine: ServedEngine,
        config: NodeConfig,
        layout: Layout,
        group: SocketDPGroup | None = None,
    ) -> None:
        self.engine, self.config, self.layout, self.group = engine, config, layout, group
        self.name = config.name
        self.hub = Hub(config.name, config.security, config.hub, self._ping)
        self.loop = EngineLoop(engine, IDLE_POLL, group, self._leave_if_drained)
        kind = engine.config.role.name.lower()
        self.session = RouterSession(self, self.hub, config.router, kind)
        self.tell = self.session.tell
        self.draining = self._terminated = False
        self._drain_until = 0.0
        self._exit: tuple[int, str] | None = None
        self._waiting: list[wire.Start] = []  # until a completion engine is linked
        self._data = ""
        self.peers: PeerLinks | None = None
        engine.on_output = self._on_output
        device_host = config.host if config.transport == "device" else None
        if isinstance(engine, PromptEngine):
            self._prepare_prompt(engine, device_host)
        elif isinstance(engine, CompletionEngine):
            self._prepare_completion(engine, device_host)

    def _prepare_prompt(self, engine: PromptEngine, device_host: str | None) -> None:
        self.placement = RouterPlacement(self.tell, lambda: bool(engine.hand_overs.links))
        engine.start_hand_over(self.name, self.placement, self.config.handoff)
        self._sends_by = PromptTransports(engine.mover, self.name, device_host)
        self.peers = PeerLinks(self, self.config.hub.peer_timeout)

    def _prepare_completion(self, engine: CompletionEngine, device_host: str | None) -> None:
        c = self.config
        engine.start_hand_over(c.name, c.handoff, c.reserve_fraction)
        bound = self.hub.listen(c.data, self._accept_link)
        self._receives_by = CompletionTransports(engine.mover, device_host, c.handoff.timeout)
        port = bound.rpartition(":")[2]
        self._data = bound if c.advertise is None else f"tcp://{c.advertise}:{port}"
        print(f"{c.name}: takes hand-overs at {self._data}", flush=True)

    # ---- the engine's thread ---------------------------------------------------------------------

    def run(self) -> int:
        """Until drained or failed; the process's exit code."""
        folder = self.config.snapshot_on_sigterm
        if folder is None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        else:  # saves what is here, and ends the process
            snapshot_on_sigterm(partial(take_snapshot, self.engine), folder)
        self.hub.start()
        self.session.dial()
        if self.peers is not None:
            self.hub.every(REDIAL_SECONDS, self.peers.look)
        try:
            self.loop.run(self._going)
        except Exception as error:
            logger.exception("%s has crashed", self.name)
            self._exit = (1, f"crashed: {type(error).__name__}: {error}")
        self.hub.stop()
        code, reason = self._exit
        print(f"{self.name}: leaving: {reason}", flush=True)
        if code and self.group is not None:
            os._exit(code)  # jax.distributed would wait for processes that may be gone
        return code

    def _on_sigterm(self, *_: object) -> None:
        # nothing else: this interrupts the main thread anywhere, with any lock in its hands
        self._terminated = True

    def _going(self) -> bool:
        if self._terminated and not self.draining:
            self.begin_drain("SIGTERM")
        if self._exit is None and not self.hub.thread.is_alive():
            self._exit = (1, "the network thread has ended")
        return self._exit is None

    def stuck_for(self) -> float:
        return self.loop.stuck_for()

    def _on_output(self, output: RequestOutput) -> None:
        self.tell(wire.Result(dataclasses.replace(output, prompt=None, prompt_token_ids=[])))
        if output.finished and self.peers is not None:
            self.placement.forget(AttemptId.parse(output.request_id))

    def _start(self, m: wire.Start) -> None:
        if self.peers is not None and not self.engine.hand_overs.links:
            self._waiting.append(m)
            return
        try:
            params = SamplingParams.from_dict(m.params)
            ids, seed = m.prompt_token_ids, m.seed
            self.engine.add_attempt(m.attempt, ids, params, seed, m.arrival_time)
        except (ValueError, TypeError) as error:
            self.tell(wire.HandOverFailed(m.attempt, str(error), False))

    def _cancel(self, m: wire.CancelAttempt) -> None:
        self._waiting = [w for w in self._waiting if w.attempt != m.attempt]
        self.engine.cancel_attempt(m.attempt, m.reason)
        if self.peers is not None:
            self.placement.forget(m.attempt)

    def _connect(self, link: NetLink) -> None:
        self.engine.hand_overs.connect(link)
        self._take_waiting(self._start)

    def _return(self, m: wire.Start) -> None:
        self.tell(wire.HandOverFailed(m.attempt, "no completion engine can be reached", True))

    def _take_waiting(self, use: Callable[[wire.Start], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for m in waiting:
            use(m)

    def _reset(self) -> None:
        """The router is gone, and with it everybody who wanted what is here."""
        self._waiting.clear()
        self.engine.cancel_all("the router is gone")

    # ---- leaving ---------------------------------------------------------------------------------

    def begin_drain(self, reason: str) -> None:
        """Finish what is here, take nothing new, leave."""
        if not self.draining:
            self.draining, self._drain_until = True, time.monotonic() + self.config.drain_timeout
            print(f"{self.name}: draining ({reason})", flush=True)
            self.tell(wire.Draining())
        self.loop.wake()

    def _leave_if_drained(self) -> None:
        idle = not (self._waiting or self.engine.num_unfinished_requests or self._num_hand_overs())
        if self.loop.vote(self.draining and (idle or time.monotonic() > self._drain_until)):
            self._exit = (0, "drained" if idle else "not drained in time")
            self.engine.check_integrity()
            pools = [s.blocks for s in self.engine.schedulers]
            held, blocks = sum(p.num_used for p in pools), sum(p.num_blocks for p in pools)
            print(f"{self.name}: {held} of {blocks} blocks are held", flush=True)

    def _num_hand_overs(self) -> int:
        return 0 if self.engine.hand_overs is None else self.engine.hand_overs.num_open

    # ---- the router (the hub's thread) -----------------------------------------------------------

    def _ping(self) -> wire.Ping:
        schedulers = self.engine.schedulers
        gauges = wire.Gauges(
            waiting=sum(s.num_waiting for s in schedulers),
            running=sum(s.num_running + s.num_prompted for s in schedulers),
            cache=max(s.cache_usage for s in schedulers),
            hand_overs=self._num_hand_overs(),
            steps=sum(h.count for h in self.engine.stats_log.step_seconds.values()),
        )
        if isinstance(self.engine, PromptEngine) and self.engine.sender.seconds:
            gauges.hand_over_ms = 1000 * statistics.median(self.engine.sender.seconds[-256:])
        return wire.Ping(self.stuck_for(), gauges)

    def hello(self, kind: str) -> wire.Hello:
        c, e, ranks = self.config, self.engine.config, len(self.engine.schedulers)
        tokens = ranks * self.engine.runner.num_blocks * e.block_size
        return wire.Hello(
            wire.PROTOCOL,
            kind,
            c.name,
            job=c.job or c.name,
            process=c.process,
            processes=c.processes,
            layout=self.layout.to_plain(),
            capacity=(ranks * e.max_num_seqs, tokens, e.max_model_len),
            data=self._data,
            model=self._model(),
            transports=["host"] if self.peers is None else self._sends_by.offered,
        )

    def _model(self) -> wire.ModelInfo:
        engine, args, axes = self.engine, self.engine.args, self.engine.config.axes
        return wire.ModelInfo(
            model=str(args.model),
            max_model_len=engine.config.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            eos_token_ids=list(engine.eos_token_ids),
            max_logprobs=args.max_logprobs,
            enable_penalties=args.enable_penalties,
            served_model_name=args.served_model_name,
            mesh=wire.MeshShape(axes.dp, axes.ep, axes.tp),
        )

    def joined(self) -> None:
        if self.peers is not None:
            self.peers.reported = True  # a router takes engines for linked until they say otherwise
        if self.draining:
            self.tell(wire.Draining())

    def on_router(self, message: wire.WireMessage) -> None:
        match message:
            case wire.Start():
                self.loop.post(lambda: self._start(message))
            case wire.CancelAttempt():
                self.loop.post(lambda: self._cancel(message))
            case wire.Assigned() if self.peers is not None:
                self.loop.post(lambda: self.placement.assigned(message.attempt, message.target))
            case wire.Peers() if self.peers is not None:
                self.peers.known = {p.name: p for p in message.peers}
                self.peers.look()
            case wire.Drain():
                self.loop.post(lambda: self.begin_drain("asked by the router"))
            case wire.JobLost():
                self._abandon(message.reason)
            case _:
                raise ValueError(f"a router says no {type(message).__name__}")

    def router_lost(self, refused: str | None) -> None:
        if refused is not None and self._exit is None:
            self._exit = (2, f"refused by the router: {refused}")
        if not self.leaving:
            self.loop.post(self._reset)
        self.loop.wake()

    @property
    def leaving(self) -> bool:
        return self._exit is not None

    def _abandon(self, reason: str) -> None:
        """A part of a job cannot go on alone, and its main thread may hang in a collective: end the
        process."""
        if self._exit is None:
            print(f"{self.name}: leaving: {reason}", flush=True)
            os._exit(3)

    # ---- links (the hub's thread) ----------------------------------------------------------------

    def make_link(
        self, peer: str, channel: Channel, transport: str, on_lost: Callable[[NetLink], None]
    ) -> NetLink:
        """Prompt side."""
        exporter = self._sends_by.exporter(transport)
        return NetLink(peer, channel, self.loop.wake, exporter=exporter, on_lost=on_lost)

    def link_up(self, link: NetLink) -> None:
        self.loop.post(lambda: self._connect(link))

    def unlinked(self) -> None:
        self.loop.post(lambda: self._take_waiting(self._return))

    def _accept_link(self, channel: Channel, hello: wire.Hello) -> wire.Welcome:
        """Completion side."""
        if hello.kind != "prompt" or hello.layout is None:
            raise ValueError(
                f"a completion engine takes hand-overs from prompt engines, not from a {hello.kind}"
            )
        check_layouts(Layout.of_plain(hello.layout), self.layout)
        transport, importer = self._receives_by.importer(hello, self._model())
        link = NetLink(hello.name, channel, self.loop.wake, importer=importer)
        channel.handler = link
        self.link_up(link)
        return wire.Welcome(self.name, transport=transport)
