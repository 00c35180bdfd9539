"""LLMEngine: one class, three roles. `step()` is the whole story; the hooks are where
prefill/decode disaggregation attaches."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax import kernels_pallas
from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.engine.admission import Admission, PromptInput, RequestLimits
from deepinfer_jax.engine.faults import EngineStopped, neutral_row, reason_of
from deepinfer_jax.engine.kv_identity import KVIdentity, model_fingerprint
from deepinfer_jax.engine.live_requests import LiveRequests
from deepinfer_jax.engine.output_processor import OutputProcessor
from deepinfer_jax.engine.prefix_store import PrefixStore
from deepinfer_jax.engine.requests import Request, fill_sampling_row
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.engine.stats.metrics import EngineStats, StepRecord
from deepinfer_jax.engine.stats.profiling import StepProfiler
from deepinfer_jax.engine.stats.prometheus import MetricsServer
from deepinfer_jax.engine.step_boundary import StepBoundary
from deepinfer_jax.experts.balancer import ExpertBalancer, make_balancer
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.models.base import restart_positions
from deepinfer_jax.models.loading import LoadedModel
from deepinfer_jax.models.resolve import resolve_model_path
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_runner import InFlight, ModelRunner, Progress
from deepinfer_jax.runner.model_source import ModelSource, use_compilation_cache
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.group import DPGroup, LocalDPGroup, SchedulerGroup
from deepinfer_jax.scheduler.outputs import SchedulerOutputs, StepType
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.text.tokenizer import load_model_tokenizer

logger = logging.getLogger(__name__)

LOADING_POLL = 0.002
"""Seconds an idle step waits for a prefix on its way from the KV store."""


class LLMEngine:
    """Takes requests, steps, returns outputs. Thread-safe: calls from several threads are
    serialised.

    A subclass may override the hooks (see "hooks" below); their order is the contract of
    disaggregation.
    """

    mover: BlockMover | None = None
    """Copies blocks out of the pools and into them; made when something needs it."""
    prefix_store: PrefixStore | None = None
    """The engine's side of its KV store; None without one."""
    experts: ExpertBalancer | None = None
    """Counts tokens per expert and moves experts; None where nothing is counted."""
    failure: str | None = None
    """The error that has stopped the engine; None while it runs."""

    def __init__(
        self,
        args: EngineArgs,
        *,
        devices: Seq[Any] | None = None,
        dp_group: DPGroup | None = None,
        warm_up_progress: Progress | None = None,
        weights: LoadedModel | None = None,
    ) -> None:
        """warm_up_progress: called with (program, programs ready, programs in all) as warm-up goes
        on. weights: of another engine of the same model on the same mesh, to be shared; None:
        loaded here."""
        if args.compilation_cache:
            use_compilation_cache()
        source = ModelSource.find(args)
        self.args = args
        self.config = EngineConfig.resolve(args, source.config)
        self.model_config, self.model_class = source.config, source.model_class
        self.mesh = make_mesh(self.config.axes, devices)
        self.policy = self.config.policy
        self.name = self.policy.engine_name(self.mesh.devices.flat[0].id)
        self.lock = threading.RLock()
        with compile_watch().expected():
            agree = (dp_group or LocalDPGroup(1)).agree_min
            loaded = weights or source.load(self.config, self.mesh)
            self.runner = ModelRunner(self.config, loaded, self.mesh, agree)
            self._build_schedulers(dp_group)
            if self.policy.splits_prefill_decode:
                self.init_pd_split()
            self._open_prefix_store()
            self.experts = make_balancer(self.runner, self.dp_group)
            warm_up = self.config.warm_up
            self.warm_up_seconds = self.runner.warm_up(warm_up_progress) if warm_up else 0.0
        if warm_up:
            logger.info("%s: kernels chosen:\n%s", self.name, kernels_pallas.explain())
        if self.experts is not None:
            self.experts.start()
        self._build_request_side(source)

    def _build_schedulers(self, dp_group: DPGroup | None) -> None:
        programs, ranks = self.runner.programs, len(self.runner.placement.local_ranks)
        state_slots = programs.num_state_slots if programs.has_state_caches else 0
        restart = restart_positions(self.runner.cache_specs)
        scheduler_config = self.config.scheduler_config(
            self.runner.num_blocks, state_slots, restart
        )
        self.schedulers = [Scheduler(scheduler_config) for _ in range(ranks)]
        self.dp_group = dp_group or LocalDPGroup(ranks)
        self.group = SchedulerGroup(self.schedulers, self.dp_group)
        spans_processes = ranks < self.config.axes.dp
        self.boundary = StepBoundary(self.lock, self.dp_group, ranks, spans_processes)

    def _open_prefix_store(self) -> None:
        if self.config.uses_kv_store:
            mover, identity = self.ensure_mover(), self.kv_identity()
            self.prefix_store = PrefixStore.open(self.args, self.schedulers, mover, identity)

    def _build_request_side(self, source: ModelSource) -> None:
        args = self.args
        own = args.tokenizer == args.model
        tokenizer_folder = source.folder if own else resolve_model_path(args.tokenizer)
        self.tokenizer, eos = load_model_tokenizer(source.folder, tokenizer_folder)
        self.eos_token_ids, self.seeds = eos, SeedSource(args.seed)
        limits = RequestLimits.of(self.config, self.model_config.vocab_size)
        self.admission = Admission(
            limits, self.tokenizer, eos, self.seeds, choose_rank=self.least_loaded_rank
        )
        self.live = LiveRequests()
        self.stats_log = EngineStats(self)
        self.results = OutputProcessor(
            self.live,
            self.schedulers,
            self.stats_log,
            self.tokenizer,
            self.prefix_store,
            keeps_prefilled=not self.policy.does_decode,
        )
        self.profiler = StepProfiler()
        self.metrics_server: MetricsServer | None = None
        if args.metrics_port is not None:
            self.metrics_server = MetricsServer(self, args.metrics_host, args.metrics_port)
        self._dropped: list[Sequence] = []  # PROMPT: ended by other means, blocks still held
        self._pending: InFlight | None = None
        self._last_ready = 0.0  # when a result was last seen to be there
        self._counter = itertools.count()
        self.did_work = False  # the last step computed or processed something

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **kwargs: Any) -> LLMEngine:
        return cls(args, **kwargs)

    # ---- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str | None,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        enqueue: bool = True,
    ) -> Request:
        """Queues a request; request_id None draws one. Raises ValueError naming the request, the
        value and the limit.

        A prompt over the engine's limit is not an error: the request ends at once with
        finish_reason "prompt_length_exceeded". enqueue=False only registers it (a completion engine
        queues it when its KV has arrived).
        """
        with self.lock:
            self._check_running()
            request_id = str(next(self._counter)) if request_id is None else request_id
            params = params or SamplingParams()
            if enqueue and not self.policy.does_prefill:
                raise ValueError(
                    f"request {request_id!r}: a {self.config.role.name} engine takes requests by"
                    " hand-over only"
                )
            self.admission.check(request_id, params, self.live)
            request = self.admission.build(request_id, prompt, params, arrival_time)
            self.live.add(request)
            if enqueue:
                try:
                    self._enqueue(request)
                except Exception:
                    self._take_back(request)
                    raise
            return request

    def _enqueue(self, request: Request) -> None:
        for c in request.completions:
            if self.prefix_store is None:
                self.schedulers[c.rank].add_request(c.seq)
            else:
                self.prefix_store.enqueue(c)

    def _take_back(self, request: Request) -> None:
        """A request that could not be queued whole leaves nothing behind."""
        for c in request.completions:
            self.schedulers[c.rank].abort(c.seq.request_id)
        self.live.forget(request)

    def adopt_request(self, request: Request) -> None:
        """Takes over a restored request, whose sequences are queued already."""
        self.live.add(request)

    def least_loaded_rank(self) -> int:
        """The local DP rank for the next sequence: fewest queued and running sequences, then fewest
        tokens in cache."""
        loads = [
            (s.num_waiting + s.num_prompted + s.num_running, s.cache_usage, r)
            for r, s in enumerate(self.schedulers)
        ]
        return min(loads)[2]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Ends requests with finish_reason "abort"; returns the ids that were alive. Unknown and
        finished ids are no error."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self.lock:
            alive = [i for i in ids if i in self.live]
            for request in (self.live.requests[i] for i in alive):
                for c in request.completions:
                    if not c.finished:
                        self.schedulers[c.rank].abort(c.seq.request_id)
                    self.results.end(c)
            return alive

    def has_unfinished_requests(self) -> bool:
        """True while a step would change anything: requests, ended sequences to free, results to
        read."""
        loading = self.prefix_store is not None and self.prefix_store.loading
        if loading or self._pending is not None:
            return True
        if self.results.has_ended or self.boundary.needs_step:
            return True
        return any(s.has_unfinished() for s in self.schedulers)

    def is_active(self, request_id: str) -> bool:
        """Whether a request with this id has been added and has not ended."""
        return request_id in self.live

    @property
    def num_unfinished_requests(self) -> int:
        return sum(not r.finished for r in self.live.requests.values())

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedules and enqueues one step, then processes its results (with zero-overhead
        scheduling: the previous step's).

        An error that belongs to one request ends that request, with finish_reason "error". Any
        other is raised and stops the engine: later steps raise EngineStopped.
        """
        with self.lock:
            self._check_running()
            try:
                return self._step()
            except Exception as error:
                self.failure = reason_of(error)
                logger.critical(
                    "%s stops with %d live requests: %s",
                    self.name,
                    self.num_unfinished_requests,
                    self.failure,
                )
                raise

    def _check_running(self) -> None:
        if self.failure is not None:
            raise EngineStopped(f"{self.name} has stopped: {self.failure}")

    def _step(self) -> list[RequestOutput]:
        self.boundary.begin_step()
        if self.prefix_store is not None:
            self._queue_loaded(self.prefix_store)
        start = time.perf_counter()
        substeps = self._schedule()
        in_flight = self._dispatch(substeps)
        if self.experts is not None and in_flight is not None:
            self.experts.after_dispatch(in_flight.is_prefill, len(substeps))
        self.pre_sampler_sync(substeps)
        record = StepRecord.of(substeps, in_flight, start, time.perf_counter())
        done = self._take_turn(in_flight, record)
        outputs = self.boundary.take_undelivered() + self.post_process(done, record)
        if not self.policy.does_decode:
            self.send_processed_prompts()
        outputs += self._deliver(self.results.take_ended(substeps))
        self.stats_log.record(record)
        self.did_work = in_flight is not None or done is not None
        if self.profiler.active:
            self.profiler.after_step()
        self.boundary.end_step()
        return outputs

    def _queue_loaded(self, store: PrefixStore) -> None:
        """Queues sequences whose stored prefix has arrived. With nothing else to do, waits a moment
        for one."""
        idle = self._pending is None and not any(s.has_unfinished() for s in self.schedulers)
        for seq in store.queue_loaded(LOADING_POLL if idle else 0.0):
            self.release_seq(seq)

    def _take_turn(self, dispatched: InFlight | None, record: StepRecord) -> InFlight | None:
        """The step whose results are due: with zero-overhead scheduling the one before, while
        `dispatched` runs."""
        before = self._pending
        if dispatched is not None and self._last_ready and (before is None or before.ready()):
            record.device_idle = dispatched.dispatched - self._last_ready
        if not self.config.zos:
            return dispatched
        self._pending = dispatched
        return before

    def _schedule(self) -> list[list[SchedulerOutputs]]:
        """One step's outputs per local rank; several steps' (num_decode_steps) while nothing but
        decoding is going on. What the first admits is admitted before the next is scheduled, which
        may take its slot and blocks away again."""
        outputs = self._schedule_one()
        self._admit(outputs)
        substeps = [outputs]
        more = self.args.num_decode_steps - 1
        if more and outputs[0].step_type is StepType.DECODE:
            idle = [s.num_waiting + s.num_prompted == 0 for s in self.schedulers]
            if self.dp_group.all_reduce_min([int(i) for i in idle]):
                substeps += [self._schedule_one() for _ in range(more)]
        return substeps

    def _schedule_one(self) -> list[SchedulerOutputs]:
        outputs = self.group.schedule()
        for kind in ("clone_blocks", "clone_states"):
            pairs = [getattr(o, kind) for o in outputs]
            if any(pairs):
                self.runner.clone(kind, pairs)
        if any(o.zero_states for o in outputs):
            self.runner.clone(
                "zero_states", [[(0, slot) for slot in o.zero_states] for o in outputs]
            )
        self.post_schedule(outputs)
        if self.copies_state and outputs[0].step_type is StepType.DECODE:
            copying = [seq for o in outputs for seq in o.seqs if self.should_copy_state(seq)]
            if copying:
                self.do_copy_state(copying)
        return outputs

    def _dispatch(self, substeps: list[list[SchedulerOutputs]]) -> InFlight | None:
        """Enqueues the forward pass and sampling. None if no rank of the group has anything to
        compute."""
        outputs = substeps[0]
        busy = self.dp_group.all_reduce_min([int(o.is_empty) for o in outputs]) == 0
        if outputs[0].step_type is StepType.PREFILL:
            tokens = -self.dp_group.all_reduce_min([-o.num_tokens for o in outputs])
            return (
                self.runner.dispatch_prefill(outputs, self._wants_prompt_logprobs, tokens)
                if busy
                else None
            )
        if not self.policy.does_decode and busy:
            raise RuntimeError(
                f"{self.name}: a {self.config.role.name} engine was given a decode step: {outputs}"
            )
        rows = -self.dp_group.all_reduce_min([-len(o.slots) for o in outputs])
        return self.runner.dispatch_decode(substeps, rows) if busy else None

    def _admit(self, outputs: list[SchedulerOutputs]) -> None:
        admitted = [o.admitted for o in outputs]
        if any(admitted):
            tables = [s.block_tables for s in self.schedulers]
            self.runner.admit(admitted, tables, self._fill_row)
        for rank, seqs in enumerate(admitted):
            if seqs:
                self.stats_log.admitted(rank, [seq.slot for seq in seqs], time.time())
            for seq in seqs:
                c = self.live.of(seq)
                try:
                    self.results.admitted(rank, seq)
                    if c.params.has_penalties:
                        self.runner.fill_counts(rank, seq)
                except Exception as error:
                    self.results.fail(c, error)

    def _fill_row(self, seq: Sequence, view: dict[str, np.ndarray], row: int) -> None:
        c = self.live.of(seq)
        try:
            fill_sampling_row(c, view, row, seq.eos_token_ids, self.config.force_top_k)
        except Exception as error:
            neutral_row(view, row)
            self.results.fail(c, error)

    def _wants_prompt_logprobs(self, seq: Sequence) -> bool:
        c = self.live.of(seq)
        return c.index == 0 and c.params.prompt_logprobs is not None

    def pre_sampler_sync(self, substeps: list[list[SchedulerOutputs]]) -> None:
        """Runs after the sampler is enqueued and before its result is waited for."""
        scheduled = [seq for o in substeps[0] for seq in o.seqs] if self.reads_scheduled else []
        finished = [seq for outputs in substeps for o in outputs for seq in o.finished]
        if substeps[0][0].step_type is StepType.PREFILL:
            self.pe_prepare_save_kvcache(scheduled, finished)
        else:
            self.do_save_kvcache(scheduled, finished)
        if self.policy.finalizes_finished:
            for seq in finished:
                self.finalize_seq(seq)
        else:
            self._dropped += finished

    def post_process(
        self, done: InFlight | None, record: StepRecord | None = None
    ) -> list[RequestOutput]:
        """Waits for a step's tokens and turns them into request outputs."""
        if done is None:
            return []
        wait_start = time.perf_counter()
        results = done.wait()
        self._last_ready = time.perf_counter()
        if record is not None:
            record.device_wait = self._last_ready - wait_start
        if done.is_prefill:
            scheduled = [seq for o in done.substeps[0] for seq in o.seqs]
            self.pe_do_save_kvcache(scheduled, [seq for seq in scheduled if seq.is_finished])
        return self._deliver(self.results.process(done, results, time.time()))

    def _deliver(self, requests: list[Request]) -> list[RequestOutput]:
        outputs = []
        for request in requests:
            try:
                if request.finished:
                    self.forget_request(request)
                outputs.append(self.process_output(request.output()))
            except Exception as error:
                for c in request.completions:
                    self.results.fail(c, error)
                self.forget_request(request)
                outputs.append(request.output())
        return outputs

    def forget_request(self, request: Request) -> None:
        """A request's last output is about to be returned."""
        self.live.forget(request)
        self.stats_log.finished(c.finish_reason for c in request.completions)

    # ---- hooks: names, order and meaning of the reference ----------------------------------------

    copies_state = False
    """Set by a subclass that overrides should_copy_state: otherwise no step asks."""
    reads_scheduled = False
    """Set by a subclass whose hooks look at the scheduled sequences: otherwise a decode step need
    not list them."""

    def init_pd_split(self) -> None:
        """PROMPT and COMPLETION: caches exist, nothing is compiled yet. Allocate hand-over buffers
        here."""

    def post_schedule(self, outputs: list[SchedulerOutputs]) -> None:
        """The step is scheduled (one output per local rank), nothing is dispatched."""

    def should_copy_state(self, seq: Sequence) -> bool:
        """Decode steps: whether to copy this sequence's state aside before the step changes it."""
        return False

    def do_copy_state(self, seqs: list[Sequence]) -> None:
        """Enqueues the copies; waits for nothing."""

    def pe_prepare_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """Prefill steps, before the sampler is waited for: start moving KV, wait for nothing."""
        self.save_tails(finished)

    def do_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """Decode steps, before the sampler is waited for: save KV of what finished."""
        self.save_tails(finished)

    def pe_do_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """Prefill steps, once the sample is there: wait for the transfer and book it."""

    def finalize_seq(self, seq: Sequence) -> None:
        """NORMAL and COMPLETION: a finished sequence gives its slot and blocks back. Never called
        by PROMPT."""
        self.release_seq(seq)

    def send_processed_prompts(self) -> None:
        """PROMPT: hand prefilled requests on and drop them. Here nobody takes them: each ends with
        its first token."""
        for c in self.results.take_prefilled():
            if not c.seq.is_finished:
                self.schedulers[c.rank].finish(c.seq, SequenceStatus.FINISHED_LENGTH, "length")
                self.results.end(c)
        self.drop_finished_prompts()

    def drop_finished_prompts(self) -> None:
        """PROMPT: frees sequences that ended here (aborted, complete with their first token) and
        are not handed over."""
        dropped, self._dropped = self._dropped, []
        for seq in dropped:
            self.release_seq(seq)

    def process_output(self, output: RequestOutput) -> RequestOutput:
        """Last look at every output before the caller gets it."""
        return output

    # ---- blocks ----------------------------------------------------------------------------------

    def release_seq(self, seq: Sequence) -> None:
        """Gives a finished sequence's slot and blocks back to its rank."""
        rank = self.live.rank_of(seq)
        self.live.drop_rank(seq)
        self.schedulers[rank].free_seq(seq)

    def save_tails(self, finished: list[Sequence]) -> None:
        """Saves the KV of ended sequences, whose blocks are still theirs: their conversation's next
        turn starts from it."""
        if self.prefix_store is not None and self.policy.does_decode:
            for seq in finished:
                self.prefix_store.save(seq, self.live.rank_of(seq))

    def ensure_mover(self) -> BlockMover:
        """The engine's BlockMover. Made here unless the role or the KV store has made it: then its
        programs are compiled now if warm-up is over."""
        if self.mover is None:
            self.mover = BlockMover(self.runner)
            if self.runner.programs.warm:
                self.runner.compile_missing()
        return self.mover

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal checkpoints."""
        return model_fingerprint(resolve_model_path(self.args.model))

    def kv_identity(self) -> KVIdentity:
        """What must be equal for KV to be exchanged with this engine."""
        return KVIdentity.of(self.fingerprint, self.config, self.ensure_mover())

    # ---- the rest --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Reads the step in flight, if any; its outputs are returned by the next step()."""
        done, self._pending = self._pending, None
        self.boundary.undelivered += self.post_process(done)
        self.boundary.undelivered += self._deliver(self.results.take_ended())

    def stats(self) -> dict[str, Any]:
        """Counters and recent step records, as plain values."""
        return self.stats_log.summary()

    def start_profile(self, folder: str | Path, num_steps: int | None = None) -> None:
        """Traces the next steps with jax.profiler into `folder` (TensorBoard, Perfetto),
        `num_steps` of them or until stop_profile.

        RuntimeError if a trace is running already.
        """
        with self.lock:
            self.profiler.start(folder, num_steps)

    def stop_profile(self) -> None:
        """Ends a trace and writes it; does nothing if none is running."""
        with self.lock:
            self.profiler.stop()

    def check_integrity(self) -> None:
        """Raises if a block or slot is lost or doubly used on any local rank."""
        for scheduler in self.schedulers:
            scheduler.check_integrity()

    def close(self) -> None:
        """Waits for what is in flight and drops device memory."""
        if self._pending is not None and self.failure is None:
            self._pending.wait()
        self._pending = None
        if self.prefix_store is not None:
            self.prefix_store.close()
        if self.experts is not None:
            self.experts.close()
        self.profiler.stop()
        if self.metrics_server is not None:
            self.metrics_server.close()
            self.metrics_server = None
        self.runner.close()
