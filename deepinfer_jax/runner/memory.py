"""How many KV blocks a role gets: what the device has, less what XLA says the role's largest
program needs."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import psutil

from deepinfer_jax.runner import gpu_settings, kv_pools
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.programs import StepPrograms

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
"""On CPU the "device" is the host's memory, which others use too: by default the caches may take
this much of it."""


class NotEnoughMemory(ValueError):
    """Not even one sequence of max_model_len fits the device."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on one device, and the blocks that fit. Produced for an engine and for a plan by the
    same code."""

    program: str  # the largest program of the role
    device_bytes: int
    utilization: float
    params_bytes: int
    temp_bytes: int  # temporaries and results of the largest program, caches and state excluded
    decode_state_bytes: int
    state_cache_bytes: int
    block_bytes: int
    num_blocks: int
    useful_blocks: int  # more could never be in use at once

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def as_dict(self) -> dict[str, int | float | str]:
        return asdict(self) | {"cache_bytes": self.cache_bytes}


def sharded_bytes(tree: Any) -> int:
    """Bytes of one device's shards of a pytree of arrays or ShapeDtypeStructs with shardings."""
    total = 0
    for x in jax.tree.leaves(tree):
        total += math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    return total


def program_temp_bytes(programs: StepPrograms, key: ProgramKey) -> int:
    """Temporaries plus unaliased results of a program, from XLA's memory analysis of the compiled
    code."""
    blocks = programs.config.max_pages + 1
    programs.last_profiled = programs.lower(key, num_blocks=blocks).compile()
    analysis = programs.last_profiled.memory_analysis()
    return int(
        analysis.temp_size_in_bytes
        + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    )


def expert_move_bytes(programs: StepPrograms) -> int:
    """The most that moving one layer's experts needs beside them: as much as they take; 0 where
    they stay."""
    if not programs.config.experts.moves:
        return 0
    layers = [layer for group in programs.expert_groups for layer in group.layers]
    own = (sharded_bytes([programs.abstract_params[i] for i in x.weights]) for x in layers)
    return max(own, default=0)


def device_memory(programs: StepPrograms, fixed: int) -> int:
    """Bytes of one device: as given, as the device reports, or on CPU what is available up to fixed
    + CPU_CACHE_BYTES."""
    given = programs.config.args.device_memory_bytes
    if given is not None:
        return given
    device = programs.mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:  # of the client's pool
        return int(stats["bytes_limit"] / gpu_settings.memory_fraction())
    local = sum(d.process_index == jax.process_index() for d in programs.mesh.devices.flat)
    available = psutil.virtual_memory().available // max(local, 1)
    utilization = programs.config.args.gpu_memory_utilization
    return min(available + fixed, int((fixed + CPU_CACHE_BYTES // max(local, 1)) / utilization))


def pool_fraction(programs: StepPrograms) -> float:
    """The share of a device's memory that arrays may take: on a GPU that of the client's pool."""
    on_cpu = programs.mesh.devices.flat[0].platform == "cpu"
    return 1.0 if on_cpu else gpu_settings.memory_fraction()


def profile_memory(
    programs: StepPrograms,
    device_bytes: int | None = None,
    temp_bytes: int | None = None,
    fraction: float | None = None,
) -> MemoryProfile:
    """Measures the role's largest program and divides what is left by the size of a block.

    device_bytes, temp_bytes: known already (a planner's device and estimate), instead of asked of
    the device and the compiler. fraction: the share of the device that arrays may take (a
    planner's; None: as `pool_fraction` says).

    Raises NotEnoughMemory, with the missing bytes and the arguments to change, if not even one
    maximal sequence fits.
    """
    c = programs.config
    key = programs.largest_key()
    params = sharded_bytes(programs.abstract_params)
    state = sharded_bytes(programs.abstract_state())
    slots = kv_pools.state_bytes(programs.cache_specs, c.axes, programs.num_state_slots)
    temp = program_temp_bytes(programs, key) if temp_bytes is None else temp_bytes
    temp = max(temp, expert_move_bytes(programs))
    fixed = params + state + slots + temp
    total = device_memory(programs, fixed) if device_bytes is None else device_bytes
    block = kv_pools.bytes_per_block(programs.cache_specs, c.axes, c.block_size)
    fraction = pool_fraction(programs) if fraction is None else fraction
    budget = gpu_settings.budget_bytes(total, c.args.gpu_memory_utilization, fraction) - fixed
    useful = c.max_num_seqs * c.max_pages
    blocks = min(budget // block, useful)
    if blocks < c.max_pages:
        short = c.max_pages * block - budget
        raise NotEnoughMemory(
            f"{c.role.name} engine: {short} bytes short of one sequence of"
            f" max_model_len={c.max_model_len} ({c.max_pages} blocks of {block} bytes): device"
            f" {total} x gpu_memory_utilization {c.args.gpu_memory_utilization} - weights {params}"
            f" - program {key} {temp} - state {state + slots}. Lower max_model_len,"
            " max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or use more"
            " devices or a quantization"
        )
    return MemoryProfile(
        str(key),
        total,
        c.args.gpu_memory_utilization,
        params,
        temp,
        state,
        slots,
        block,
        int(blocks),
        useful,
    )


def profile_num_blocks(programs: StepPrograms) -> int:
    profile = profile_memory(programs)
    logger.info("memory profile: %s", profile.as_dict())
    return profile.num_blocks
