"""Prefill and decode apart in one process: N prompt and M completion engines on their own devices,
behind one engine-like face.

`DisaggregatedEngine` has the methods of LLMEngine that `LLM` uses. Each engine runs in its own
thread (pd_worker.py); the router (scheduler/routing/router.py) decides who gets what; a crash or a
stall of one engine ends or moves only what it held.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.disagg import mesh_link
from deepinfer_jax.disagg import snapshot as pd_snapshot
from deepinfer_jax.disagg.config import DisaggregationConfig, assign_devices, role_args
from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.engines import CompletionEngine, PromptEngine
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
from deepinfer_jax.scheduler.routing.router import Capacity, Router, RouterConfig
from deepinfer_jax.snapshot.job import SnapshotJob

LOOK_AGAIN = 0.2
"""Seconds between looks at stalled engines while the caller waits for outputs."""


class DisaggregatedEngine(Coordinator):
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
        super().__init__()
        self._counter = itertools.count()
        self.workers: dict[str, EngineWorker] = {}
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
        capacity = {e.name: _capacity(e) for e in self.completion_engines}
        self.router = Router(
            [e.name for e in self.prompt_engines], capacity, config.router or self._router_config()
        )
        for worker in self.workers.values():
            worker.start()

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
        engines = (*self.prompt_engines, *self.completion_engines)
        warm = all(e.config.warm_up for e in engines)
        handoff = c.handoff or HandoffConfig(timeout=HandoffConfig.timeout * (1 if warm else 10))
        for i, engine in enumerate(self.prompt_engines):
            engine.start_hand_over(f"PROMPT_{i}", self, handoff)
        for i, engine in enumerate(self.completion_engines):
            engine.start_hand_over(f"COMPLETION_{i}", handoff, c.reserve_fraction)
        for engine in (*self.prompt_engines, *self.completion_engines):
            self.workers[engine.name] = EngineWorker(engine, self._on_output, self._on_crash)
        self._links = {}
        for source in self.prompt_engines:
            for target in self.completion_engines:
                a, b = mesh_link.connect(source, target)
                a.on_arrival, b.on_arrival = (
                    self.workers[source.name].wake,
                    self.workers[target.name].wake,
                )
                self._links[source.name, target.name] = (a, b)

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
        with self._lock:
            request_id = str(next(self._counter)) if request_id is None else request_id
            params = params or SamplingParams()
            self.admission.check(request_id, params, self._requests)
            text, ids = self.admission.tokenize(request_id, prompt)
            arrival = time.time() if arrival_time is None else arrival_time
            request = FannedOutRequest.make(request_id, text, ids, params, self.seeds.draw, arrival)
            limit = self.prompt_engines[0].schedulers[0].config.prompt_limit
            if len(ids) > limit:
                self.refuse(request, "prompt_length_exceeded")
            else:
                self.submit(request, self.config.max_model_len)
            return request

    def step(self) -> list[RequestOutput]:
        """Waits for outputs and returns all there are; [] when a while has passed without any."""
        if not self.has_unfinished_requests():
            return []
        try:
            outputs = [self._outputs.get(timeout=LOOK_AGAIN)]
        except queue.Empty:
            self._check_stalls()
            with self._lock:
                self._dispatch()
            return []
        while not self._outputs.empty():
            outputs.append(self._outputs.get())
        return outputs

    def close_links(self, name: str, reason: str) -> None:
        for pair, (a, b) in self._links.items():
            if name in pair:
                (a if pair[0] == name else b).close(reason)

    def _check_stalls(self) -> None:
        limit = self.pd.stall_timeout
        for worker in self.workers.values():
            if limit is not None and worker.failed is None and worker.stuck_for() > limit:
                self._on_crash(worker, f"{worker.name}: no progress for {limit} s")

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
        handoff = {e.name: dict(e.sender.counters) for e in self.prompt_engines}
        handoff |= {e.name: dict(e.receiver.counters) for e in self.completion_engines}
        with self._lock:
            router = self.router.stats()
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
        engine = worker.engine
        with engine.lock:
            held = [str(seq) for s in engine.schedulers for seq in s.sequences]
        return held + [str(c) for c in worker._commands]

    def check_integrity(self) -> None:
        """Raises if a block or slot is lost or doubly used anywhere, or the router's loads disagree
        with its requests."""
        for worker in self.workers.values():
            with worker.engine.lock:
                worker.engine.check_integrity()
        with self._lock:
            self.router.check_integrity()

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
