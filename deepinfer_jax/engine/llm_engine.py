"""LLMEngine: one class, three roles. `step()` is the whole story; the hooks are where
prefill/decode disaggregation attaches."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from deepinfer_jax import kernels_pallas
from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.engine.admission import PromptInput, build_request, check_request
from deepinfer_jax.engine.output_processor import EngineResultsMixin
from deepinfer_jax.engine.requests import Completion, Request, fill_sampling_row
from deepinfer_jax.engine.stats.metrics import EngineStats, StepRecord
from deepinfer_jax.engine.stats.profiling import StepProfiler
from deepinfer_jax.engine.stats.prometheus import MetricsServer
from deepinfer_jax.engine.step_boundary import EngineStateMixin
from deepinfer_jax.models.loading import LoadedModel
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

logger = logging.getLogger(__name__)


class LLMEngine(EngineResultsMixin, EngineStateMixin):
    """Takes requests, steps, returns outputs. Thread-safe: calls from several threads are
    serialised.

    A subclass may override the hooks (see "hooks" below); their order is the contract of
    disaggregation.
    """

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
        self.init_state()
        self.config = EngineConfig.resolve(args, source.config)
        self.model_config, self.model_class = source.config, source.model_class
        self.mesh = make_mesh(self.config.axes, devices)
        self.tokenizer, self.eos_token_ids = source.load_tokenizer(args)
        self.policy = self.config.policy
        self.name = self.policy.engine_name(self.mesh.devices.flat[0].id)
        with compile_watch().expected():
            agree = (dp_group or LocalDPGroup(1)).agree_min
            self.runner = ModelRunner(
                self.config, weights or source.load(self.config, self.mesh), self.mesh, agree
            )
            if self.policy.splits_prefill_decode:
                self.init_pd_split()
            self.init_kv()
            self.warm_up_seconds = self.runner.warm_up(warm_up_progress) if args.warm_up else 0.0
        if args.warm_up:
            logger.info("%s: kernels chosen:\n%s", self.name, kernels_pallas.explain())
        ranks = self.runner.placement.local_ranks
        self.dp_group = dp_group or LocalDPGroup(len(ranks))
        programs = self.runner.programs
        state_slots = programs.num_state_slots if programs.has_state_caches else 0
        scheduler_config = self.config.scheduler_config(self.runner.num_blocks, state_slots)
        self.schedulers = [Scheduler(scheduler_config) for _ in ranks]
        self.group = SchedulerGroup(self.schedulers, self.dp_group)
        self.stats_log = EngineStats(self)
        self.profiler = StepProfiler()
        self.metrics_server = (
            None
            if args.metrics_port is None
            else MetricsServer(self, args.metrics_host, args.metrics_port)
        )
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, Completion] = {}  # by sequence id
        self._ranks: dict[str, int] = {}  # by sequence id, until its blocks are free
        self._processed: list[
            Completion
        ] = []  # PROMPT: prefilled since the last send_processed_prompts
        self._dropped: list[Sequence] = []  # PROMPT: ended by other means, blocks still held
        self._watch = [
            np.zeros(self.config.max_num_seqs, bool) for _ in ranks
        ]  # slots whose every token is looked at
        self._pending: InFlight | None = None
        self.did_work = False  # the last step computed or processed something
        self._last_ready = 0.0  # when a result was last seen to be there
        self._ended: list[Request] = []  # requests that ended outside a step (aborts)
        self._seeds = np.random.default_rng(args.seed)
        self._lock = threading.RLock()
        self._counter = itertools.count()
        if args.snapshot_on_sigterm is not None:
            self.snapshot_on_sigterm(args.snapshot_on_sigterm)

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
        with self._lock:
            request_id = str(next(self._counter)) if request_id is None else request_id
            params = params or SamplingParams()
            if enqueue and not self.policy.does_prefill:
                raise ValueError(
                    f"request {request_id!r}: a {self.config.role.name} engine takes requests by"
                    " hand-over only"
                )
            check_request(self, request_id, params)
            request = build_request(self, request_id, prompt, params, arrival_time)
            self._requests[request_id] = request
            for completion in request.completions:
                self._completions[completion.seq.request_id] = completion
                self._ranks[completion.seq.request_id] = completion.rank
                if enqueue:
                    self._enqueue(completion)
            return request

    def least_loaded_rank(self) -> int:
        """The local DP rank for the next sequence: fewest queued and running sequences, then fewest
        tokens in cache."""
        loads = [
            (s.num_waiting + s.num_prompted + s.num_running, s.cache_usage, r)
            for r, s in enumerate(self.schedulers)
        ]
        return min(loads)[2]

    def draw_seed(self) -> int:
        return int(self._seeds.integers(0, 2**64, dtype=np.uint64))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Ends requests with finish_reason "abort"; returns the ids that were alive. Unknown and
        finished ids are no error."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._lock:
            alive = [i for i in ids if i in self._requests]
            for request in (self._requests[i] for i in alive):
                for c in request.completions:
                    if not c.finished:
                        self.schedulers[c.rank].abort(c.seq.request_id)
                        self._end(c)
                self._ended.append(request)
            return alive

    def has_unfinished_requests(self) -> bool:
        """True while a step would change anything: requests, ended sequences to free, results to
        read."""
        if (
            self._ended
            or self._undelivered
            or self._common
            or self._pending is not None
            or (self.kv is not None and self.kv.loading)
        ):
            return True
        return any(s.has_unfinished() for s in self.schedulers)

    def is_active(self, request_id: str) -> bool:
        """Whether a request with this id has been added and has not ended."""
        return request_id in self._requests

    @property
    def num_unfinished_requests(self) -> int:
        return sum(not r.finished for r in self._requests.values())

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedules and enqueues one step, then processes its results (with zero-overhead
        scheduling: the previous step's)."""
        with self._lock:
            self._before_step()
            self._stepping = True
            if self.kv is not None:
                self._take_loaded()
            start = time.perf_counter()
            substeps = self._schedule()
            in_flight = self._dispatch(substeps)
            self.pre_sampler_sync(substeps)
            record = StepRecord.of(substeps, in_flight, start, time.perf_counter())
            if (
                in_flight is not None
                and self._last_ready
                and (self._pending is None or self._pending.ready())
            ):
                record.device_idle = in_flight.dispatched - self._last_ready
            done, self._pending = (
                (self._pending, in_flight) if self.config.zos else (in_flight, None)
            )
            results = self._take_undelivered() + self.post_process(done, record)
            if not self.policy.does_decode:
                self.send_processed_prompts()
            results += self._outputs_outside_steps(substeps)
            self.stats_log.record(record)
            self.did_work = in_flight is not None or done is not None
            if self.profiler.active:
                self.profiler.after_step()
            self._stepping = False
            return results

    def _schedule(self) -> list[list[SchedulerOutputs]]:
        """One step's outputs per local rank; several steps' (num_decode_steps) while nothing but
        decoding is going on."""
        outputs = self._schedule_one()
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
        if self._copies_state and outputs[0].step_type is StepType.DECODE:
            copying = [seq for o in outputs for seq in o.seqs if self.should_copy_state(seq)]
            if copying:
                self.do_copy_state(copying)
        return outputs

    def _dispatch(self, substeps: list[list[SchedulerOutputs]]) -> InFlight | None:
        """Admits, then enqueues the forward pass and sampling. None if no rank of the group has
        anything to compute."""
        outputs = substeps[0]
        self._admit(outputs)
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
                c = self._completions[seq.request_id]
                self._watch[rank][seq.slot] = c.needs_every_step()
                if c.params.has_penalties:
                    self.runner.fill_counts(rank, seq)

    def _fill_row(self, seq: Sequence, view: dict[str, np.ndarray], row: int) -> None:
        fill_sampling_row(self._completions[seq.request_id], view, row, seq.eos_token_ids)

    def _wants_prompt_logprobs(self, seq: Sequence) -> bool:
        c = self._completions[seq.request_id]
        return c.index == 0 and c.params.prompt_logprobs is not None

    def pre_sampler_sync(self, substeps: list[list[SchedulerOutputs]]) -> None:
        """Runs after the sampler is enqueued and before its result is waited for."""
        scheduled = [seq for o in substeps[0] for seq in o.seqs] if self._reads_scheduled else []
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
            record.device_wait = time.perf_counter() - wait_start
        now = time.time()
        touched: dict[str, Request] = {}
        if done.is_prefill:
            outputs = done.substeps[0]
            scheduled = [seq for o in outputs for seq in o.seqs]
            self.pe_do_save_kvcache(scheduled, [seq for seq in scheduled if seq.is_finished])
            self._take_prompt_logprobs(done)
            for rank, (o, rows) in enumerate(zip(outputs, results[0], strict=True)):
                self._process_prefill(rank, o, rows, now, touched)
        else:
            for outputs, step_results in zip(done.substeps, results, strict=True):
                for rank, (o, rows) in enumerate(zip(outputs, step_results, strict=True)):
                    self._process_decode(rank, o, rows, now, touched)
        return [
            self.process_output(self._request_output(r)) for r in touched.values() if self._due(r)
        ]

    # ---- hooks: names, order and meaning of the reference ----------------------------------------

    _copies_state = False
    """Set by a subclass that overrides should_copy_state: otherwise no step asks."""
    _reads_scheduled = False
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
        processed, self._processed = self._processed, []
        for c in processed:
            if not c.seq.is_finished:
                self.schedulers[c.rank].finish(c.seq, SequenceStatus.FINISHED_LENGTH, "length")
                self._end(c)
                self._ended.append(c.request)
        self.drop_finished_prompts()

    def drop_finished_prompts(self) -> None:
        """PROMPT: frees sequences that ended here (aborted, complete with their first token) and
        are not handed over."""
        dropped, self._dropped = self._dropped, []
        for seq in dropped:
            self.release_seq(seq)

    def release_seq(self, seq: Sequence) -> None:
        """Gives a finished sequence's slot and blocks back to its rank."""
        self.schedulers[self._ranks.pop(seq.request_id)].free_seq(seq)

    def process_output(self, output: RequestOutput) -> RequestOutput:
        """Last look at every output before the caller gets it."""
        return output

    # ---- the rest --------------------------------------------------------------------------------

    def rank_of(self, seq: Sequence) -> int:
        """Index of the local rank that owns a sequence."""
        return self._ranks[seq.request_id]

    def stats(self) -> dict[str, Any]:
        """Counters and recent step records, as plain values."""
        return self.stats_log.summary()

    def start_profile(self, folder: str, num_steps: int | None = None) -> None:
        """Traces the next steps with jax.profiler into `folder` (TensorBoard, Perfetto),
        `num_steps` of them or until stop_profile.

        RuntimeError if a trace is running already.
        """
        with self._lock:
            self.profiler.start(folder, num_steps)

    def stop_profile(self) -> None:
        """Ends a trace and writes it; does nothing if none is running."""
        with self._lock:
            self.profiler.stop()

    def check_integrity(self) -> None:
        """Raises if a block or slot is lost or doubly used on any local rank."""
        for scheduler in self.schedulers:
            scheduler.check_integrity()

    def close(self) -> None:
        """Waits for what is in flight and drops device memory."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.kv is not None:
            self.kv.close()
        self.profiler.stop()
        if self.metrics_server is not None:
            self.metrics_server.close()
            self.metrics_server = None
        self.runner.close()
