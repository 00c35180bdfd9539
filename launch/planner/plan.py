"""What a role needs on devices that are not there: memory, KV blocks, collectives and the least
time of every step.

The engine's own step functions are compiled ahead of time for the GPU (JAX's CUDA plugin, no device
needed), and the same `memory.profile_memory` that sizes an engine's pools sizes the plan's. Without
the plugin, temporaries are estimated and the plan says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.kernels_pallas.aot.check import claim_architecture
from deepinfer_jax.launch.planner.experts import planned_imbalance
from deepinfer_jax.launch.planner.floor import ModelCosts, StepFloor, model_costs, step_floor
from deepinfer_jax.launch.planner.gpus import Gpu, find_gpu
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner.gpu_settings import MEMORY_FRACTION, budget_bytes
from deepinfer_jax.runner.memory import MemoryProfile, NotEnoughMemory, profile_memory
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

MAX_DEVICES = 1024
PLUGIN_HINT = (
    "install jax-cuda13-plugin in the version of jax, with ptxas and libdevice (a CUDA 13 toolkit,"
    " or nvidia-cuda-nvcc and nvidia-nvvm)"
)


@dataclass(frozen=True)
class Plan:
    """One role of one model on `devices` GPUs. estimated: temporaries are a formula's, not the
    compiler's."""

    gpu: str
    devices: int
    args: EngineArgs
    config: EngineConfig
    memory: MemoryProfile
    estimated: bool
    collectives: dict[
        str, dict[str, int]
    ]  # operation -> {"count": ..., "bytes": ...} of the largest program, per device
    floors: list[StepFloor]
    costs: ModelCosts = field(repr=False)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV one rank holds."""
        return self.memory.num_blocks * self.config.block_size

    def as_dict(self) -> dict[str, Any]:
        axes = self.config.axes
        return {
            "model": self.args.model,
            "gpu": self.gpu,
            "devices": self.devices,
            "role": self.config.role.name,
            "dp": axes.dp,
            "ep": axes.ep,
            "tp": axes.tp,
            "dtype": np.dtype(self.config.dtype).name,
            "quantization": self.config.quantization,
            "estimated": self.estimated,
            "expert_imbalance": self.costs.imbalance,
            "memory": self.memory.as_dict(),
            "num_blocks": self.memory.num_blocks,
            "kv_tokens_per_rank": self.kv_tokens,
            "kv_tokens": self.kv_tokens * axes.dp,
            "collectives": self.collectives,
            "steps": [f.as_dict() for f in self.floors],
        }


def make_plan(
    args: EngineArgs,
    gpu: str,
    *,
    context: float = 2048.0,
    compile_programs: bool | None = None,
    compiled: Plan | None = None,
) -> Plan:
    """Plans one role. args: as for an engine; the model folder needs config.json only.

    gpu: a name of `gpus.GPUS`, or "cpu" for this machine's devices (then args.device_memory_bytes
    says how big one is). args.expert_placement: a placement file, whose loads say how uneven the
    floors' ranks are. context: keys per row assumed for the floors. compiled: a plan of another
    role that differs in nothing else and profiles the same program (NORMAL and PROMPT do): what the
    compiler said then is taken over. compile_programs: None compiles if the plugin is there; False
    estimates. Raises ValueError for an unknown GPU, a missing plugin (with True), and a model that
    does not fit, naming what would.
    """
    source = ModelSource.find(args)
    config = EngineConfig.resolve(args, source.config)
    target = None if gpu == "cpu" else find_gpu(gpu)
    graphdef, params, specs = abstract_model(
        source.config, source.model_class, config.axes, config.dtype, config.quantization
    )
    caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
    costs = model_costs(config, source.config, params, specs, caches)
    if args.expert_placement is not None:
        measured = planned_imbalance(
            args.expert_placement, config, source.config.router, source.config.moe
        )
        costs = dataclasses.replace(costs, imbalance=measured)
    compiles = target is None or (
        plugin_problem() is None if compile_programs is None else compile_programs
    )
    if (
        compiled is not None
        and compiled.config.policy.profiles_prefill_shape != config.policy.profiles_prefill_shape
    ):
        raise ValueError(
            f"{config.role.name} and {compiled.config.role.name} engines profile different programs"
        )
    memory_bytes = args.device_memory_bytes or (target.memory_bytes if target else None)
    if target is not None:
        require_weights_fit(args, target, costs, memory_bytes)
    with plan_mesh(config.axes, target, compiles and compiled is None) as mesh:
        programs = StepPrograms(config, source.config, graphdef, params, specs, caches, mesh)
        if compiled is not None:
            temp = compiled.memory.temp_bytes
        else:
            temp = None if compiles else estimated_temp_bytes(config, source.config, costs)
        try:
            fraction = None if target is None else MEMORY_FRACTION
            memory = profile_memory(programs, memory_bytes, temp, fraction)
        except NotEnoughMemory as error:
            raise NotEnoughMemory(
                f"{error}. {advice(args, target)}" if target else str(error)
            ) from None
        moved = (
            {} if programs.last_profiled is None else collectives(programs.last_profiled.as_text())
        )
    moved = moved if compiled is None else compiled.collectives
    floors = bucket_floors(config, costs, target or find_gpu("h200"), context)
    return Plan(
        gpu,
        config.axes.dp * config.axes.tp,
        args,
        config,
        memory,
        compiled.estimated if compiled else not compiles,
        moved,
        floors,
        costs,
    )


# ---- devices that are not there ------------------------------------------------------------------


def plugin_problem() -> str | None:
    """None if programs can be compiled for GPUs here, else what is missing."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(PackageNotFoundError):
            found = version(name)
            return (
                None
                if found == jax.__version__
                else f"{name} {found} does not match jax {jax.__version__}"
            )
    return "no CUDA plugin is installed"


@contextlib.contextmanager
def plan_mesh(axes: ParallelAxes, gpu: Gpu | None, compiles: bool) -> Iterator[Mesh | AbstractMesh]:
    """The mesh to plan on: this machine's devices (gpu None), compile-only ones with kernels chosen
    for them, or shapes only."""
    if gpu is None:
        yield make_mesh(axes)
    elif not compiles:
        yield AbstractMesh(
            (axes.dp // axes.ep, axes.ep, axes.tp), (axes.replica_axis, axes.ep_axis, axes.tp_axis)
        )
    else:
        problem = plugin_problem()
        if problem is not None:
            raise ValueError(
                f"cannot compile for {gpu.name}: {problem}; {PLUGIN_HINT}, or plan without"
                " compiling (--estimate)"
            )
        from jax.experimental import topologies

        claim_architecture(gpu.target)
        count = axes.dp * axes.tp
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=gpu.target.config(), topology=f"1x1x{count}"
        )
        with jax.default_device(topology.devices[0]):
            yield make_mesh(axes, topology.devices)


# ---- what is not asked of the compiler -----------------------------------------------------------


def require_weights_fit(args: EngineArgs, gpu: Gpu, costs: ModelCosts, memory_bytes: int) -> None:
    """Refuses, before anything is compiled, a model whose weights alone exceed a device."""
    weights = weight_bytes(costs)
    if weights > budget_bytes(memory_bytes, args.gpu_memory_utilization):
        raise NotEnoughMemory(
            f"weights of {weights / 1e9:.0f} GB per device exceed {gpu.name}"
            f" ({memory_bytes / 1e9:.0f} GB x gpu_memory_utilization"
            f" {args.gpu_memory_utilization}). {advice(args, gpu)}"
        )


def weight_bytes(m: ModelCosts) -> float:
    return m.dense_bytes + m.head_bytes + m.local_experts * m.expert_bytes


def advice(args: EngineArgs, gpu: Gpu) -> str:
    """The least number of devices at which the weights leave room, by this planner's own layout
    rule."""
    found = smallest_fit(args, gpu)
    if found is None:
        return (
            f"It does not fit any number of them up to {MAX_DEVICES}: quantize (--quantization fp8,"
            " int8 or int4)"
        )
    count, layout = found
    hint = "" if args.quantization else "; a quantization needs fewer"
    return f"It fits from {count} of them ({layout}){hint}"


def smallest_fit(args: EngineArgs, gpu: Gpu) -> tuple[int, str] | None:
    """(devices, flags): powers of two, experts spread over all devices, dense models split by tp;
    90 % of it for weights."""
    source = ModelSource.find(
        dataclasses.replace(
            args, data_parallel_size=1, expert_parallel_size=1, tensor_parallel_size=1
        )
    )
    is_moe = hasattr(source.config, "router")
    count = 1
    while count <= MAX_DEVICES:
        sizes = (
            {"data_parallel_size": count, "expert_parallel_size": count}
            if is_moe
            else {"tensor_parallel_size": count}
        )
        with contextlib.suppress(ValueError):
            layout = dataclasses.replace(
                args,
                **(
                    {"data_parallel_size": 1, "expert_parallel_size": 1, "tensor_parallel_size": 1}
                    | sizes
                ),
            )
            config = EngineConfig.resolve(layout, source.config)
            _, params, specs = abstract_model(
                source.config, source.model_class, config.axes, config.dtype, config.quantization
            )
            caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
            costs = model_costs(config, source.config, params, specs, caches)
            need = (
                weight_bytes(costs)
                + estimated_temp_bytes(config, source.config, costs)
                + args_tokens(config) * costs.kv_bytes_per_token
            )
            if need <= budget_bytes(gpu.memory_bytes, args.gpu_memory_utilization):
                return count, f"--dp {count} --ep {count}" if is_moe else f"--tp {count}"
        count *= 2
    return None


def args_tokens(config: EngineConfig) -> int:
    return config.max_pages * config.block_size


def estimated_temp_bytes(config: EngineConfig, model_config: Any, m: ModelCosts) -> int:
    """Temporaries of the largest step: activations of a layer, exchanged rows, logits. A rule of
    thumb for when nothing compiles."""
    width = np.dtype(config.dtype).itemsize
    policy = config.policy
    tokens = config.max_num_batched_tokens if policy.profiles_prefill_shape else config.max_num_seqs
    sampled = min(16, config.max_num_seqs) if policy.profiles_prefill_shape else config.max_num_seqs
    inner = max(
        getattr(model_config, "intermediate_size", 0),
        model_config.num_heads * model_config.head_dim * 2,
    )
    rows = tokens * (6 * model_config.hidden_size + 3 * inner) * width
    cap = policy.moe_tokens_per_rank(
        config.max_num_batched_tokens, config.max_num_seqs, config.num_speculative_tokens
    )
    exchanged = (
        3 * m.ep * cap * model_config.hidden_size * width if m.num_experts and m.ep > 1 else 0
    )
    return int(rows + exchanged + 4 * sampled * model_config.vocab_size * 4)


def bucket_floors(config: EngineConfig, m: ModelCosts, gpu: Gpu, context: float) -> list[StepFloor]:
    """A floor per bucket of the role."""
    floors = [
        step_floor(
            m,
            gpu,
            tokens=t,
            context=min(context, config.max_model_len) / 2,
            sequences=max(1, round(t / context)),
            decode=False,
        )
        for t in config.prefill_buckets
    ]
    keys = min(context, config.max_model_len)
    return floors + [
        step_floor(m, gpu, tokens=b, context=keys, sequences=b, decode=True)
        for b in config.decode_buckets
    ]


_COLLECTIVE = re.compile(
    r"= (.*?)"
    r" (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(-start)?\("
)
_SHAPE = re.compile(r"\b([a-z]+\d+\w*)\[([\d,]*)\]")
_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Collectives in a compiled program: per operation how many, and the bytes of their results per
    device (loop bodies once)."""
    found: dict[str, dict[str, int]] = {}
    for result, op, start in _COLLECTIVE.findall(hlo):
        sizes = [
            _ITEM_BYTES[k] * int(np.prod([int(d) for d in dims.split(",") if d], initial=1))
            for k, dims in _SHAPE.findall(result)
        ]
        entry = found.setdefault(op, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += (
            sum(sizes) // 2 if start else sum(sizes)
        )  # asynchronous: "((operands), results)"
    return found
