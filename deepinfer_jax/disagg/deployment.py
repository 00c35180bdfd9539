"""Prefill and decode apart in one process: N prompt and M completion engines on their own devices,
behind one engine-like face.

`DisaggregatedEngine` has the methods of LLMEngine that `LLM` uses. Each engine runs in its own
thread (worker.py); the router (scheduler/routing/router.py) decides who gets what; a crash or a
stall of one engine ends or moves only what it held.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.disagg import mesh_link
from deepinfer_jax.disagg import snapshot as pd_snapshot
from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.config import DisaggregationConfig, assign_devices, role_args
from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.messages import Link
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.disagg.protocol import HandoffConfig
from deepinfer_jax.disagg.split_request import FannedOutRequest
from deepinfer_jax.disagg.worker import EngineWorker
from deepinfer_jax.engine.admission import Admission, PromptInput
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.models.loading import LoadedModel
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.routing.config import Capacity, RouterConfig
from deepinfer_jax.scheduler.routing.router import Router
from deepinfer_jax.snapshot.job import SnapshotJob

LOOK_AGAIN = 0.2
"""Seconds between looks at stalled engines while the caller waits for outputs."""


class DisaggregatedEngine:
    """An engine made of engines. Thread-safe; outputs are collected by whoever calls step()."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        config: DisaggregationConfig,
        devices: Seq[Any] | None = None,
    ) -> None:
        """fields: EngineArgs fields both roles share. Raises ValueError for an impossible layout,
        LayoutMismatch."""
        self.pd = config
        self._counter = itertools.count()
        args = {EngineType.PROMPT: role_args(fields, config, EngineType.PROMPT)}
        args[EngineType.COMPLETION] = role_args(fields, config, EngineType.COMPLETION)
        self._build(args, list(jax.devices() if devices is None else devices))
        first = self.prompt_engines[0]
        self.args, self.config, self.tokenizer = first.args, first.config, first.tokenizer
        self.model_config, self.eos_token_ids = first.model_config, first.eos_token_ids
        self.seeds = SeedSource(self.args.seed)
        self.admission = Admission(
            first.admission.limits, self.tokenizer, self.eos_token_ids, self.seeds
        )
        self.coordinator = Coordinator(Router(config=config.router or self._router_config()))
        self.workers: dict[str, EngineWorker] = {}
        self._connect()
        for worker in self.workers.values():
            worker.run()

    def _build(self, args: dict[EngineType, EngineArgs], devices: list[Any]) -> None:
        c = self.pd
        chosen = assign_devices(args, c, devices)
        weights: dict[
            Any, LoadedModel
        ] = {}  # engines on the same devices, with the same layout, share theirs

        def make(cls: type, role: EngineType, index: int) -> Any:
            source, mine = ModelSource.find(args[role]), chosen[role][index]
            engine_config = EngineConfig.resolve(args[role], source.config)
            key = (
                tuple(d.id for d in mine),
                (role, index) if engine_config.experts.moves else None,  # their order is their own
                repr(
                    (
                        engine_config.axes,
                        engine_config.dtype,
                        engine_config.quantization,
                        source.config,
                    )
                ),
            )
            if key not in weights:
                weights[key] = source.load(engine_config, make_mesh(engine_config.axes, mine))
            return cls(args[role], devices=mine, weights=weights[key])

        self.prompt_engines: list[PromptEngine] = [
            make(PromptEngine, EngineType.PROMPT, i) for i in range(c.prompt_engines)
        ]
        self.completion_engines: list[CompletionEngine] = [
            make(CompletionEngine, EngineType.COMPLETION, i) for i in range(c.completion_engines)
        ]

    def _connect(self) -> None:
        """Names, threads, links."""
        engines = (*self.prompt_engines, *self.completion_engines)
        warm = all(e.config.warm_up for e in engines)
        seconds = HandoffConfig.timeout * (1 if warm else 10)
        handoff = self.pd.handoff or HandoffConfig(timeout=seconds)
        for i, prompt in enumerate(self.prompt_engines):
            prompt.start_hand_over(f"PROMPT_{i}", self.coordinator, handoff)
            self._join(prompt, None)
        for i, completion in enumerate(self.completion_engines):
            completion.start_hand_over(f"COMPLETION_{i}", handoff, self.pd.reserve_fraction)
            self._join(completion, _capacity(completion))
        self._links: dict[tuple[str, str], tuple[Link, Link]] = {}
        for source in self.prompt_engines:
            for target in self.completion_engines:
                a, b = mesh_link.connect(source, target)
                a.inbox.on_arrival = self.workers[source.name].wake
                b.inbox.on_arrival = self.workers[target.name].wake
                self._links[source.name, target.name] = (a, b)

    def _join(self, engine: PromptEngine | CompletionEngine, capacity: Capacity | None) -> None:
        worker = EngineWorker(engine, self.coordinator, self._on_crash)
        self.workers[engine.name] = worker
        self.coordinator.join(worker, capacity)

    def _on_crash(self, name: str, reason: str) -> None:
        """Every engine connected to it must learn that it is gone."""
        self.workers[name].failed = reason
        for pair, (a, b) in self._links.items():
            if name in pair:
                (a if pair[0] == name else b).close(reason)
        self.coordinator.engine_failed(name, reason)

    def _router_config(self) -> RouterConfig:
        # Prompts beyond a few steps wait in the router: placed late, and not prefilled while no
        # completion engine has room.
        step = self.config.max_num_batched_tokens * len(self.prompt_engines[0].schedulers)
        return RouterConfig(
            max_queued_tokens=4 * step,
            expected_output_fraction=self.pd.reserve_fraction,
            affinity_block=self.config.block_size if self.args.enable_prefix_caching else 0,
        )

    # ---- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str | None,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
    ) -> FannedOutRequest:
        """Queues a request. Raises ValueError naming the request, the value and the limit;
        RuntimeError when no engine is left."""
        with self.coordinator.lock:
            request_id = str(next(self._counter)) if request_id is None else request_id
            params = params or SamplingParams()
            self.admission.check(request_id, params, self.coordinator.requests)
            text, ids = self.admission.tokenize(request_id, prompt)
            arrival = time.time() if arrival_time is None else arrival_time
            request = FannedOutRequest.make(request_id, text, ids, params, self.seeds.draw, arrival)
            limit = self.prompt_engines[0].schedulers[0].config.prompt_limit
            if len(ids) > limit:
                self.coordinator.refuse(request, "prompt_length_exceeded")
            else:
                self.coordinator.submit(request, self.config.max_model_len)
            return request

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """See `LLMEngine.abort_request`."""
        return self.coordinator.abort_request(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.coordinator.has_unfinished_requests()

    def is_active(self, request_id: str) -> bool:
        return self.coordinator.is_active(request_id)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.coordinator.requests)

    def step(self) -> list[RequestOutput]:
        """Waits for outputs and returns all there are; [] when a while has passed without any."""
        if not self.has_unfinished_requests():
            return []
        waiting = self.coordinator.outputs
        try:
            outputs = [waiting.get(timeout=LOOK_AGAIN)]
        except queue.Empty:
            self._check_stalls()
            self.coordinator.dispatch()
            return []
        while not waiting.empty():
            outputs.append(waiting.get())
        return outputs

    def _check_stalls(self) -> None:
        limit = self.pd.stall_timeout
        for worker in self.workers.values():
            if limit is not None and worker.failed is None and worker.loop.stuck_for() > limit:
                self._on_crash(worker.name, f"{worker.name}: no progress for {limit} s")

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self, path: str | Path) -> SnapshotJob:
        """All live requests, whichever engine has them, between two steps of all engines; see
        `snapshot.job.take`."""
        return pd_snapshot.take(self, path)

    def restore(self, path: str | Path, step: int | None = None) -> list[str]:
        """Takes over the requests of a snapshot of any deployment of this model; see
        `snapshot.restore.restore`."""
        return pd_snapshot.restore(self, path, step)

    # ---- the rest --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Of every engine by name, the router's, and the hand-overs' counters."""
        handoff = {n: dict(w.engine.hand_overs.counters) for n, w in self.workers.items()}
        with self.coordinator.lock:
            router = self.coordinator.router.stats()
        return {
            "engines": {name: w.engine.stats() for name, w in self.workers.items()},
            "failed": {name: w.failed for name, w in self.workers.items() if w.failed is not None},
            "router": router,
            "handoff": handoff,
        }

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Waits until every living engine has let go of everything; TimeoutError names what is
        left."""
        limit = time.monotonic() + timeout
        while any(self._held(w) for w in self.workers.values() if w.failed is None):
            if time.monotonic() > limit:
                held = {n: self._held(w) for n, w in self.workers.items()}
                raise TimeoutError(f"after {timeout} s still held: {held}")
            time.sleep(0.002)

    def _held(self, worker: EngineWorker) -> list[str]:
        waiting = worker.loop.num_commands
        return worker.engine.held() + ([f"{waiting} commands"] if waiting else [])

    def check_integrity(self) -> None:
        """Raises if a block or slot is lost or doubly used anywhere, or the router's loads disagree
        with its requests."""
        for worker in self.workers.values():
            worker.engine.check_integrity()
        with self.coordinator.lock:
            self.coordinator.router.check_integrity()

    def close(self) -> None:
        """Stops the threads, then frees device memory."""
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
            if not worker.thread.is_alive():
                worker.engine.close()


def _capacity(engine: CompletionEngine) -> Capacity:
    ranks, c = len(engine.schedulers), engine.config
    return Capacity(
        ranks * c.max_num_seqs, ranks * engine.runner.num_blocks * c.block_size, c.max_model_len
    )
