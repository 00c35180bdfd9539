"""One engine in a process of its own: its loop, its session with the router, its links to engines
of the other role."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepinfer_jax.disagg.engines import CompletionEngine, PromptEngine
from deepinfer_jax.disagg.protocol import HandoffConfig, check_layouts
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.launch.links import HostImporter, NetLink, Stager
from deepinfer_jax.launch.peer_links import PeerLinks
from deepinfer_jax.launch.placement import RouterPlacement
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.hub import Channel, Hub, HubConfig
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.snapshot.job import snapshot_on_sigterm
from deepinfer_jax.snapshot.job import take as take_snapshot

logger = logging.getLogger(__name__)

ARRIVAL_POLL = 0.0005
IDLE_POLL = 0.2
GROUP_IDLE = 0.02
"""Most seconds between the votes of an idle job of several processes: a request at one of them
waits for the others' next vote."""
STUCK_SECONDS = 5.0
"""Seconds of one round after which this process does not join a router until the round has ended.
"""
REDIAL_SECONDS = 0.5
"""Seconds between attempts to reach a router, or a completion engine that the router knows."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """router: "tcp://host:port". name: unique among the living. job, process, processes: which part
    of which job this is. data: where a completion engine listens ("tcp://host:0": any port);
    advertise: the host others reach it by. transport: how KV travels, "host" (through host memory
    and this link's socket) or "device" (jax.experimental.transfer, where both sides want it and
    their shards match; else "host"). drain_timeout: seconds that requests get to finish after
    SIGTERM; with snapshot_on_sigterm they are saved into that folder instead."""

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


class EngineServer:
    """Call `run()` in the main thread. group: votes with the other processes of the job (None:
    there are none)."""

    def __init__(
        self, engine: LLMEngine, config: NodeConfig, layout: dict[str, Any], group: Any = None
    ) -> None:
        self.engine, self.config, self.layout, self.group = engine, config, layout, group
        self.hub = Hub(config.name, config.security, config.hub, self._ping)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self.wake = self._wake.set
        self._busy_since: float | None = None
        self._last_busy = 0.0
        self._router: Channel | None = None
        self._lost_reason = ""
        self._waiting: list[wire.Start] = []  # until a completion engine is linked
        self.peers: PeerLinks | None = None
        self.draining = self._terminated = False
        self._drain_until = 0.0
        self._exit: tuple[int, str] | None = None
        self.stager: Stager | None = None
        self.device_exporter: Any = None
        self._transfer_server: Any = None
        self.data = ""
        self.kind = engine.config.role.name.lower()
        engine.process_output = self._emit  # type: ignore[method-assign]
        self._prepare_role()

    def _prepare_role(self) -> None:
        c, engine = self.config, self.engine
        if isinstance(engine, PromptEngine):
            self.placement = RouterPlacement(self.tell, lambda: bool(engine.sender.links))
            engine.start_hand_over(c.name, self.placement, c.handoff)
            self.stager = Stager(engine.mover, c.name)
            self.peers = PeerLinks(self)
            if c.transport == "device":
                from deepinfer_jax.launch.device_links import DeviceExporter

                self.device_exporter = DeviceExporter(_host_of(c))
        elif isinstance(engine, CompletionEngine):
            engine.start_hand_over(c.name, c.handoff, c.reserve_fraction)
            bound = self.hub.listen(c.data, self._accept_link)
            if c.transport == "device":
                from deepinfer_jax.launch.device_links import start_server

                self._transfer_server = start_server(_host_of(c))
            self.data = (
                bound if c.advertise is None else f"tcp://{c.advertise}:{bound.rpartition(':')[2]}"
            )
            print(f"{c.name}: takes hand-overs at {self.data}", flush=True)

    # ---- the engine's thread ---------------------------------------------------------------------

    def run(self) -> int:
        """Until drained or failed; the process's exit code."""
        folder = self.config.snapshot_on_sigterm
        if folder is None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        else:  # saves what is here, and ends the process
            snapshot_on_sigterm(partial(take_snapshot, self.engine), folder)
        self.hub.start()
        self._dial_router()
        if self.peers is not None:
            self.hub.every(REDIAL_SECONDS, self.peers.look)
        try:
            while self._exit is None:
                self._wake.clear()
                self._busy_since = time.monotonic()
                progressed = self._round()
                self._busy_since = None
                if not progressed and not self._commands:
                    self._wake.wait(self._idle_seconds())
                if not self.hub.thread.is_alive():
                    self._exit = (1, "the network thread has ended")
        except Exception as error:
            logger.exception("%s has crashed", self.config.name)
            self._exit = (1, f"crashed: {type(error).__name__}: {error}")
        self.hub.stop()
        code, reason = self._exit
        print(f"{self.config.name}: leaving: {reason}", flush=True)
        if code and self.group is not None:
            os._exit(code)  # jax.distributed would wait for processes that may be gone
        return code

    def _on_sigterm(self, *_: object) -> None:
        # nothing else: this interrupts the main thread anywhere, with any lock in its hands
        self._terminated = True

    def _round(self) -> bool:
        if self._terminated and not self.draining:
            self.begin_drain("SIGTERM")
        while self._commands:
            self._commands.popleft()()
        if self.engine.policy.splits_prefill_decode:
            self.engine.pump()
        busy = self.engine.has_unfinished_requests()
        if self.group is not None:
            busy = self.group.all_reduce_min([int(not busy)] * len(self.group.local_ranks)) == 0
        if not busy:
            self._leave_if_drained()
            return False
        self._last_busy = time.monotonic()
        self.engine.step()
        return self.engine.did_work

    def _idle_seconds(self) -> float:
        if self.group is not None:
            return min(GROUP_IDLE, max(ARRIVAL_POLL, (time.monotonic() - self._last_busy) / 10))
        engine = self.engine
        if engine.has_unfinished_requests():  # prompts that wait for blocks
            return 0.005
        if not engine.policy.splits_prefill_decode:
            return IDLE_POLL
        control = engine.sender if isinstance(engine, PromptEngine) else engine.receiver
        if isinstance(engine, CompletionEngine) and control.has_arriving:
            return ARRIVAL_POLL
        deadline = control.next_deadline
        return (
            IDLE_POLL
            if deadline is None
            else min(max(deadline - time.monotonic(), 0.001), IDLE_POLL)
        )

    def post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _emit(self, output: RequestOutput) -> RequestOutput:
        self.tell(wire.Result(dataclasses.replace(output, prompt=None, prompt_token_ids=[])))
        if output.finished and self.stager is not None:
            self.placement.forget(output.request_id)
        return output

    def _start(self, m: wire.Start) -> None:
        if isinstance(self.engine, PromptEngine) and not self.engine.sender.links:
            self._waiting.append(m)
            return
        try:
            params = SamplingParams.from_dict(m.params)
            request = self.engine.add_request(
                m.key, {"prompt_token_ids": m.prompt_token_ids}, params, arrival_time=m.arrival_time
            )
            request.completions[0].seed = m.seed
        except ValueError as error:
            self.tell(wire.HandOverFailed(m.key, str(error), False))

    def _abort(self, key: str) -> None:
        self._waiting = [m for m in self._waiting if m.key != key]
        self.engine.abort_request(key)
        if self.stager is not None:
            self.placement.forget(key)

    def link_up(self, link: NetLink) -> None:
        control = (
            self.engine.sender if isinstance(self.engine, PromptEngine) else self.engine.receiver
        )
        old = control.links.get(link.peer)
        if old is not None and old is not link:
            control.peer_lost(link.peer, "replaced by a new connection")
        control.connect(link)
        waiting, self._waiting = self._waiting, []
        for m in waiting:
            self._start(m)

    def return_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for m in waiting:
            self.tell(wire.HandOverFailed(m.key, "no completion engine can be reached", True))

    def _reset(self) -> None:
        """The router is gone, and with it everybody who wanted what is here."""
        self._waiting.clear()
        if isinstance(self.engine, CompletionEngine):
            for handoff_id in list(self.engine.receiver.incoming):
                self.engine.receiver.drop(handoff_id, "the router is gone")
        self.engine.abort_request(list(self.engine.live.requests))

    # ---- leaving ---------------------------------------------------------------------------------

    def begin_drain(self, reason: str) -> None:
        """Finish what is here, take nothing new, leave."""
        if not self.draining:
            self.draining, self._drain_until = True, time.monotonic() + self.config.drain_timeout
            print(f"{self.config.name}: draining ({reason})", flush=True)
            self.tell(wire.Draining())
        self._wake.set()

    def _leave_if_drained(self) -> None:
        idle = (
            not self._waiting
            and self.engine.num_unfinished_requests == 0
            and not self._hand_overs()
        )
        done = self.draining and (idle or time.monotonic() > self._drain_until)
        if self.group is not None:
            done = self.group.all_reduce_min([int(done)] * len(self.group.local_ranks)) == 1
        if done:
            self._exit = (0, "drained" if idle else "not drained in time")
            self.engine.check_integrity()
            schedulers = self.engine.schedulers
            held, blocks = (
                sum(s.blocks.num_used for s in schedulers),
                sum(s.blocks.num_blocks for s in schedulers),
            )
            print(f"{self.config.name}: {held} of {blocks} blocks are held", flush=True)

    def _hand_overs(self) -> int:
        if isinstance(self.engine, PromptEngine):
            return len(self.engine.sender.outgoing)
        return (
            len(self.engine.receiver.incoming) if isinstance(self.engine, CompletionEngine) else 0
        )

    # ---- the router (the hub's thread) -----------------------------------------------------------

    def tell(self, message: wire.WireMessage) -> None:
        channel = self._router
        if channel is not None:
            channel.send(message)

    def _ping(self) -> wire.Ping:
        since, engine = self._busy_since, self.engine
        gauges = {
            "waiting": sum(s.num_waiting for s in engine.schedulers),
            "running": sum(s.num_running + s.num_prompted for s in engine.schedulers),
            "cache": max(s.cache_usage for s in engine.schedulers),
            "hand_overs": self._hand_overs(),
            "steps": sum(h.count for h in engine.stats_log.step_seconds.values()),
        }
        if isinstance(engine, PromptEngine) and engine.sender.seconds:
            gauges["hand_over_ms"] = 1000 * statistics.median(
                engine.sender.seconds[-256:]
            )  # reservation to acknowledgement
        return wire.Ping(0.0 if since is None else time.monotonic() - since, gauges)

    def hello(self, kind: str) -> wire.Hello:
        c, e = self.config, self.engine
        ranks = len(e.schedulers)
        return wire.Hello(
            wire.PROTOCOL,
            kind,
            c.name,
            job=c.job or c.name,
            process=c.process,
            processes=c.processes,
            layout=self.layout,
            capacity=(
                ranks * e.config.max_num_seqs,
                ranks * e.runner.num_blocks * e.config.block_size,
                e.config.max_model_len,
            ),
            data=self.data,
            model={
                "model": str(e.args.model),
                "served_model_name": e.args.served_model_name,
                "max_model_len": e.config.max_model_len,
                "vocab_size": e.model_config.vocab_size,
                "eos_token_ids": list(e.eos_token_ids),
                "max_logprobs": e.args.max_logprobs,
                "enable_penalties": e.args.enable_penalties,
                "mesh": {"dp": e.config.axes.dp, "ep": e.config.axes.ep, "tp": e.config.axes.tp},
            },
            transports=(
                ["host"]
                if self.device_exporter is None
                else ["host", f"device {self.device_exporter.address}"]
            ),
        )

    def _dial_router(self) -> None:
        since = self._busy_since
        if (
            since is not None and time.monotonic() - since > STUCK_SECONDS
        ):  # it would be given work that it cannot do
            threading.Timer(REDIAL_SECONDS, self._dial_router).start()
            return
        self.hub.dial(self.config.router, self.hello(self.kind), self)

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        self._router, self._lost_reason = channel, ""
        if self.peers is not None:
            self.peers.reported = True  # a router takes engines for linked until they say otherwise
        print(f"{self.config.name}: joined the router at {self.config.router}", flush=True)
        if self.draining:
            channel.send(wire.Draining())

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        match message:
            case wire.Start():
                self.post(lambda: self._start(message))
            case wire.Abort():
                self.post(lambda: self._abort(message.key))
            case wire.DropAttempt():
                self.post(lambda: self.engine.drop_attempt(message.key, message.reason))
            case wire.Placed():
                self.post(lambda: self.placement.placed(message.key, message.target))
            case wire.Peers() if self.peers is not None:
                self.peers.known = {p.name: p for p in message.peers}
                self.peers.look()
            case wire.Drain():
                self.post(lambda: self.begin_drain("asked by the router"))
            case wire.JobLost():
                self._abandon(message.reason)
            case _:
                channel.close(f"unexpected {type(message).__name__}")
                self.lost(channel, f"sent an unexpected {type(message).__name__}", False)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        was_open, self._router = self._router is not None, None
        if final:
            self._exit = (2, f"refused by the router: {reason}")
        elif self._exit is not None:
            return  # leaving anyway
        else:
            if reason != self._lost_reason:
                print(
                    f"{self.config.name}: {'lost the' if was_open else 'no'} router: {reason}",
                    flush=True,
                )
                self._lost_reason = reason
            if was_open:
                self.post(self._reset)
            threading.Timer(REDIAL_SECONDS, self._dial_router).start()
        self._wake.set()

    def _abandon(self, reason: str) -> None:
        """A part of a job cannot go on alone, and its main thread may hang in a collective: end the
        process."""
        if self._exit is None:
            print(f"{self.config.name}: leaving: {reason}", flush=True)
            os._exit(3)

    # ---- links (the hub's thread) ----------------------------------------------------------------

    def _accept_link(self, channel: Channel, hello: wire.Hello) -> wire.Welcome:
        """Completion side."""
        if hello.kind != "prompt" or hello.layout is None:
            raise ValueError(
                f"a completion engine takes hand-overs from prompt engines, not from a {hello.kind}"
            )
        check_layouts(hello.layout, self.layout)
        importer = self._importer(hello)
        link = NetLink(hello.name, channel, self.wake, importer=importer)
        channel.handler = link
        self.post(lambda: self.link_up(link))
        return wire.Welcome(
            self.config.name,
            "",
            {"transport": "host" if isinstance(importer, HostImporter) else "device"},
        )

    def _importer(self, hello: wire.Hello) -> Any:
        """The transport of a link: the device one where both sides have it and their
        shards match."""
        address = next(
            (t.partition(" ")[2] for t in hello.transports if t.startswith("device ")), None
        )
        if self._transfer_server is None or address is None:
            return HostImporter(self.engine.mover)
        from deepinfer_jax.launch.device_links import DeviceImporter, compatible

        if not compatible(self.hello(self.kind).model, hello.model):
            return HostImporter(self.engine.mover)
        return DeviceImporter(
            self._transfer_server, address, self.engine.mover, self.config.handoff.timeout
        )


def _host_of(config: NodeConfig) -> str:
    """The address other processes reach this one by."""
    return config.advertise or config.data.removeprefix("tcp://").rpartition(":")[0]
