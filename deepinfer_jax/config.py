"""EngineArgs: what a user may set. EngineConfig: the frozen, validated result, one field per
decision.

Imports: environ, expert_options, models, scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from deepinfer_jax import environ
from deepinfer_jax.expert_options import ExpertOptions
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.roles import EngineType, RolePolicy

logger = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
QUANTISATIONS = (None, "int8", "int4", "fp8")
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass
class EngineArgs:
    """Arguments of an engine, with the reference's names where it has them.

    model: a Hugging Face folder, a .gguf file, or "demo". Sizes are tokens, sequences or blocks;
    memory is bytes. engine_type takes an EngineType, its name or its integer value.
    """

    model: str
    """A Hugging Face folder, a .gguf file, a hub id ("org/name"), or "demo"."""
    tokenizer: str | None = None
    """Folder of the tokenizer, where it is not the model's."""
    trust_remote_code: bool = False
    """Accepted so that scripts port; a warning says that no code of a checkpoint is ever run."""
    served_model_name: str = "deepinfer-model"
    """The model's name in metrics and log lines."""
    load_format: str = "auto"
    """Where weights come from: "auto" reads the checkpoint, "dummy" makes random weights from
    config.json alone."""
    dtype: str = "auto"
    """Of weights and activations: float32, bfloat16, float16, or auto (float32 on CPUs, else
    bfloat16)."""
    kv_cache_dtype: str = "auto"
    """Of the KV cache; auto: the same as dtype."""
    index_cache_dtype: str = "auto"
    """Of the keys by which DeepSeek-V3.2 chooses keys: auto (the KV cache's) or fp8, with a factor
    per key."""
    quantization: str | None = None
    """Of the linear layers' weights: int8, int4 or fp8."""
    seed: int = 0
    """Seeds the seeds of requests that bring none."""
    engine_type: EngineType | str | int = EngineType.NORMAL
    """The role: NORMAL, PROMPT or COMPLETION."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and output together; by default the model's limit, 4096 at
    most."""
    max_num_batched_tokens: int | None = None
    """Most tokens of a prefill step; without chunked_prefill at least max_model_len, which is the
    default's lower bound."""
    max_num_seqs: int = 256
    """Most sequences decoded together, per data-parallel rank."""
    block_size: int = 16
    """Tokens per block of the KV cache."""
    num_blocks: int | None = None
    """Blocks of the KV cache per rank; by default what fits into memory."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, programs and caches may take."""
    device_memory_bytes: int | None = None
    """Memory of one device, where it cannot be asked or should not be believed."""
    chunked_prefill: bool = False
    """Cut prompts that do not fit into a prefill step."""
    stop_preempted_request: bool = True
    """End a preempted request instead of computing it again."""
    enable_prefix_caching: bool = False
    """Share the blocks of equal prompt beginnings."""
    state_in_blocks: bool | None = None
    """Keep what a model has per sequence (DeepSeek-V4's windows) in blocks, so that a sequence may
    start at any block's end; None: where prompt beginnings are shared. Both ends of a hand-over
    need the same."""
    data_parallel_size: int = 0
    """Attention replicas, each with its own scheduler and cache; 0: as many as
    expert_parallel_size."""
    expert_parallel_size: int = 1
    """Ranks that the experts are spread over."""
    tensor_parallel_size: int = 1
    """Ranks that one replica's weights are split over."""
    context_parallel_size: int = 1
    """Ranks that one prompt is split over."""
    num_redundant_experts: int | None = None
    """Physical experts beyond the model's own, per layer, raised so that all divide over the ranks;
    None: DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS (0)."""
    expert_rearrangement_interval: int | None = None
    """Counted steps between two rearrangements of experts by their load: 0 never, -1 as the role
    says (PROMPT 1,000, others 10,000); None: DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL (0)."""
    expert_layers_per_step: int = 1
    """The most layers whose experts move between two steps."""
    expert_nodes: int = 1
    """Hosts that the ranks are on, where groups of experts should stay in one; 1: no such limit."""
    expert_placement: str | None = None
    """File with an expert placement: read at start where it exists, kept up to date from then
    on."""
    moe_dispatch: str = "auto"
    zero_overhead_scheduling: bool | None = None
    """Dispatch a step before the tokens of the one before are read; None:
    DEEPINFER_ZERO_OVERHEAD_SCHEDULING, else as the role says."""
    num_decode_steps: int = 1
    """Decode steps per dispatch."""
    max_logprobs: int = 20
    """The most log-probabilities per token a request may ask for."""
    max_completions: int = 1024
    """The most completions (n) one request may ask for."""
    enable_penalties: bool = True
    """Keep token counts per slot on the device, which repetition, presence and frequency penalties
    need."""
    prefill_buckets: tuple[int, ...] | None = None
    """Token counts that prefill programs are compiled for."""
    decode_buckets: tuple[int, ...] | None = None
    """Sequence counts that decode programs are compiled for."""
    warm_up: bool = True
    """Compile every program at construction."""
    compilation_cache: bool = True
    """Keep compiled programs on disk."""
    strict_compiles: bool = False
    """Make a compile after warm-up an error."""
    disable_log_stats: bool = False
    """No log line every DEEPINFER_LOGGING_INTERVAL_STEP steps."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port (0: any free one); by default none."""
    metrics_host: str = "127.0.0.1"
    """The address the metrics are served on."""
    snapshot_on_sigterm: str | None = None
    """Folder for a snapshot of all live requests that SIGTERM takes before the process ends,
    instead of waiting for them."""
    prefill_attempt_interval: int | None = None
    """NORMAL: decode steps between two votes to prefill if all ranks want to; None:
    DEEPINFER_PREFILL_ATTEMPT_INTERVAL (70)."""
    prefill_any_attempt_interval: int | None = None
    """NORMAL: the same if any rank wants to; None: DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL (100)."""
    kv_store: str | None = None
    """Folder of a KV store: computed prefixes are saved there, and read instead of computed;
    processes may share it."""
    kv_store_bytes: int | None = None
    """The most bytes the KV store may take on disk, least recently used ones going first; None: no
    limit."""
    kv_host_bytes: int = 0
    """Host memory for computed prefixes, in front of the KV store or without one; 0: none."""
    kv_store_write: str = "through"
    """When saved prefixes reach the disk: "through" at once, "back" when host memory is full or the
    engine closes."""
    kv_store_namespace: str = "shared"
    """Who may read what is saved: "shared" everybody (cache_salt keeps apart), "user" only requests
    of the same user_id."""
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    """Further fields of SchedulerConfig."""

    def __post_init__(self) -> None:
        self.engine_type = parse_engine_type(self.engine_type)
        if self.tokenizer is None:
            self.tokenizer = self.model

    @property
    def reuses_prefixes(self) -> bool:
        """Prompt beginnings are shared, on the device or by way of a store."""
        stored = self.kv_store is not None or self.kv_host_bytes > 0
        return self.enable_prefix_caching or stored

    @property
    def keeps_state_in_blocks(self) -> bool:
        return self.reuses_prefixes if self.state_in_blocks is None else self.state_in_blocks


def parse_engine_type(value: EngineType | str | int) -> EngineType:
    """EngineType.PROMPT, "prompt", "PROMPT" or 1 -> EngineType.PROMPT; anything else is a
    ValueError."""
    try:
        return EngineType[value.upper()] if isinstance(value, str) else EngineType(value)
    except (KeyError, ValueError):
        known = ", ".join(f"{t.name}={t.value}" for t in EngineType)
        raise ValueError(f"unknown engine_type {value!r}; known: {known}") from None


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine decides at construction. Built by `EngineConfig.resolve`, never changed
    afterwards."""

    args: EngineArgs
    role: EngineType
    axes: ParallelAxes
    context_parallel_size: int
    dtype: Any
    kv_dtype: Any
    quantization: str | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    zos: bool
    warm_up: bool
    num_state_slots: int
    """Rows of each per-sequence cache: for every sequence that may be alive, and the null row 0."""
    force_top_k: int
    """Every request draws from this many tokens at most; 0: off."""
    banned_token_ids: tuple[int, ...]
    """Never sampled."""
    num_speculative_tokens: int
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    experts: ExpertOptions

    @property
    def policy(self) -> RolePolicy:
        return self.role.policy

    @property
    def uses_kv_store(self) -> bool:
        return self.args.kv_store is not None or self.args.kv_host_bytes > 0

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive bound of every position, optimistic draft and in-flight rows included."""
        return (
            self.max_model_len
            + self.num_speculative_tokens
            + (self.num_speculative_tokens + 1 if self.zos else 0)
            + self.num_speculative_tokens
        )

    @property
    def max_pages(self) -> int:
        return math.ceil((self.runtime_max_model_len + 1) / self.block_size)

    @classmethod
    def resolve(cls, args: EngineArgs, model_config: Any) -> EngineConfig:
        """Check `args` against the model and the role; raises ValueError with the value and the
        limit."""
        environ.check()
        if args.trust_remote_code:
            logger.warning("trust_remote_code=True has no effect: no code of a checkpoint is run")
        role = parse_engine_type(args.engine_type)
        policy = role.policy
        axes = _axes(args)
        if args.context_parallel_size != 1:
            if not policy.allows_context_parallel:
                raise ValueError(
                    f"a {role.name} engine refuses context parallelism, got"
                    f" context_parallel_size={args.context_parallel_size}"
                )
            raise ValueError(
                "context_parallel_size must be 1 with the models here, got"
                f" {args.context_parallel_size}"
            )
        if args.quantization not in QUANTISATIONS:
            raise ValueError(f"unknown quantization {args.quantization!r}; known: {QUANTISATIONS}")
        if not 0 < args.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {args.gpu_memory_utilization}"
            )
        for name in ("max_num_seqs", "block_size", "num_decode_steps", "max_completions"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(args, name)}")
        if role.policy.allows_recompute is False and not args.stop_preempted_request:
            raise ValueError(
                f"a {role.name} engine cannot recompute preempted requests: it needs"
                " stop_preempted_request=True"
            )
        if args.kv_store_write not in ("through", "back") or args.kv_store_namespace not in (
            "shared",
            "user",
        ):
            raise ValueError(
                "kv_store_write must be through or back, kv_store_namespace shared or user, got"
                f" {args.kv_store_write!r} and {args.kv_store_namespace!r}"
            )
        if args.kv_store_write == "back" and not args.kv_host_bytes:
            raise ValueError(
                "kv_store_write='back' keeps prefixes in host memory first: it needs kv_host_bytes"
            )
        num_speculative_tokens = (
            0  # no draft head is loaded by the models here; the scheduler takes any number
        )
        limit = model_config.max_position_embeddings
        max_model_len = args.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)
        if not 1 < max_model_len <= limit:
            raise ValueError(
                f"max_model_len must be in [2, {limit}] (the model's max_position_embeddings, as"
                f" its rope scaling extends it), got {max_model_len}"
            )
        batched = args.max_num_batched_tokens or max(
            max_model_len, DEFAULT_MAX_MODEL_LEN, args.max_num_seqs * (1 + num_speculative_tokens)
        )
        dtype = _dtype("dtype", args.dtype)
        return cls(
            args=args,
            role=role,
            axes=axes,
            context_parallel_size=args.context_parallel_size,
            dtype=dtype,
            kv_dtype=(
                dtype
                if args.kv_cache_dtype == "auto"
                else _dtype("kv_cache_dtype", args.kv_cache_dtype)
            ),
            quantization=args.quantization,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            max_num_seqs=args.max_num_seqs,
            block_size=args.block_size,
            zos=zero_overhead_scheduling(args, policy),
            warm_up=args.warm_up and not environ.get("ENFORCE_EAGER", bool),
            num_state_slots=int(args.max_num_seqs * environ.get("NUM_STATE_SLOTS_RATIO", float))
            + 2,
            force_top_k=environ.get("SAMPLER_FORCE_TOPK", int),
            banned_token_ids=_banned_token_ids(model_config.vocab_size),
            num_speculative_tokens=num_speculative_tokens,
            prefill_buckets=(
                _buckets("prefill_buckets", args.prefill_buckets, 16, batched)
                if policy.does_prefill
                else ()
            ),
            decode_buckets=(
                _buckets("decode_buckets", args.decode_buckets, 1, args.max_num_seqs)
                if policy.does_decode
                else ()
            ),
            experts=ExpertOptions.resolve(
                policy,
                axes.ep,
                hasattr(model_config, "moe"),
                interval=args.expert_rearrangement_interval,
                layers_per_step=args.expert_layers_per_step,
                nodes=args.expert_nodes,
                placement_file=args.expert_placement,
            ),
        )

    def scheduler_config(
        self, num_blocks: int, num_state_slots: int = 0, state_restart: int = 0
    ) -> SchedulerConfig:
        """The scheduler's view of this engine, one per DP rank. num_state_slots: rows of the
        StateCaches, 0 without any; state_restart: see `models.base.restart_positions`."""
        a = self.args
        return SchedulerConfig(
            role=self.role,
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            chunked_prefill=a.chunked_prefill,
            stop_preempted_request=a.stop_preempted_request,
            num_speculative_tokens=self.num_speculative_tokens,
            zos=self.zos,
            context_parallel_size=self.context_parallel_size,
            num_state_slots=num_state_slots,
            state_restart=state_restart,
            enable_prefix_caching=a.enable_prefix_caching
            or (self.uses_kv_store and self.policy.does_prefill),
            prefill_attempt_interval=_or_environment(
                a.prefill_attempt_interval, "PREFILL_ATTEMPT_INTERVAL"
            ),
            prefill_any_attempt_interval=_or_environment(
                a.prefill_any_attempt_interval, "PREFILL_ANY_ATTEMPT_INTERVAL"
            ),
            prefill_max_sum_seqlen_k=environ.get("PREFILL_MAX_SUM_SEQLEN_K", int),
            **a.scheduler_options,
        )

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _axes(args: EngineArgs) -> ParallelAxes:
    dp = args.data_parallel_size or max(1, args.expert_parallel_size // args.context_parallel_size)
    return ParallelAxes(dp=dp, ep=args.expert_parallel_size, tp=args.tensor_parallel_size)


def _or_environment(value: int | None, name: str) -> int:
    return environ.get(name, int) if value is None else value


def zero_overhead_scheduling(args: EngineArgs, policy: RolePolicy) -> bool:
    """What is given, else what the operator has set, else the role's default."""
    if args.zero_overhead_scheduling is not None:
        return args.zero_overhead_scheduling
    given = environ.given("ZERO_OVERHEAD_SCHEDULING", bool)
    return policy.default_zero_overhead_scheduling if given is None else given


def _banned_token_ids(vocab_size: int) -> tuple[int, ...]:
    ids = environ.get("DECODE_TOKEN_BLACKLIST", tuple)
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(
            f"{environ.PREFIX}DECODE_TOKEN_BLACKLIST: token id {outside[0]} is outside the"
            f" vocabulary [0, {vocab_size})"
        )
    return ids


def _dtype(name: str, value: str) -> Any:
    if value == "auto":
        import jax

        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if value not in DTYPES:
        raise ValueError(f"unknown {name} {value!r}; known: auto, {', '.join(DTYPES)}")
    return DTYPES[value]


def bucket_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two and the midpoints between them, up to `largest` itself: neighbours differ by at
    most 1.5x.

    16, 100 -> (16, 24, 32, 48, 64, 96, 100). With sizes spread evenly the mean padding is about 17
    %.
    """
    sizes: set[int] = set()
    base = smallest
    while base < largest:
        sizes.update(s for s in (base, base + base // 2) if s < largest)
        base *= 2
    return (*sorted(sizes), largest)


def _buckets(
    name: str, given: tuple[int, ...] | None, smallest: int, largest: int
) -> tuple[int, ...]:
    if given is None:
        return bucket_sizes(smallest, largest)
    sizes = tuple(sorted(set(given)))
    if not sizes or sizes[0] < 1 or sizes[-1] < largest:
        raise ValueError(f"{name} must be positive and reach {largest}, got {given}")
    return sizes
