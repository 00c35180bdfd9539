"""The least time a step can take on a device: FLOPs over peak, bytes over bandwidth, exchanged
bytes over links.

A floor is arithmetic about the model's own parameters and caches, not a measurement; a real step
takes longer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.launch.planner.gpus import Gpu
from deepinfer_jax.models.base import CacheSpec, KeyCost, PagedCache, ParallelAxes
from deepinfer_jax.runner import kv_pools


@dataclass(frozen=True)
class ModelCosts:
    """Per-device sizes of a model laid over a mesh, from its abstract parameters."""

    # matrix entries every token passes, on one device (embedding table excluded, head excluded)
    dense_params: float
    dense_bytes: float
    head_params: float
    head_bytes: float
    expert_params: (
        float  # entries of one routed expert, summed over MoE layers, on one device (tp split)
    )
    expert_bytes: float
    local_experts: float  # physical experts per device and layer
    num_experts: int
    top_k: int
    moe_layers: int
    hidden_size: int
    keys: tuple[KeyCost, ...]  # what a query token pays per key, all layers, on one device
    kv_bytes_per_token: float  # written
    ep: int
    imbalance: float = 1.0  # routed tokens of the most loaded rank over those of the mean rank


def model_costs(
    config: EngineConfig, model_config: Any, params: Any, specs: Any, caches: tuple[CacheSpec, ...]
) -> ModelCosts:
    """params: ShapeDtypeStructs of the global shapes; specs: the same tree of PartitionSpec."""
    axes = config.axes
    sums = dict.fromkeys(
        ("dense", "dense_bytes", "head", "head_bytes", "expert", "expert_bytes"), 0.0
    )
    moe_layers, local_experts = 0, 0.0
    leaves = jax.tree_util.tree_leaves_with_path(params)
    spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    for (path, leaf), spec in zip(leaves, spec_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        split = math.prod(
            {"ep": axes.ep, "tp": axes.tp}.get(a, 1) for a in jax.tree.leaves(tuple(spec)) if a
        )
        entries = math.prod(leaf.shape) / split
        size = entries * np.dtype(leaf.dtype).itemsize
        packed = (
            2.0 if config.quantization == "int4" and np.dtype(leaf.dtype).itemsize == 1 else 1.0
        )
        is_matrix = len(leaf.shape) >= 2 and "scale" not in name
        if axes.ep_axis in jax.tree.leaves(tuple(spec)) or "expert" in name:
            per_device = leaf.shape[0] / axes.ep
            sums["expert_bytes"] += size / per_device
            if is_matrix:
                sums["expert"] += packed * entries / per_device
                local_experts = per_device
                moe_layers += 1
        elif "embed" in name:
            if model_config.tie_word_embeddings and is_matrix:
                sums["head"] += packed * entries
                sums["head_bytes"] += size
        elif "head" in name and "heads" not in name:
            sums["head_bytes"] += size
            sums["head"] += packed * entries if is_matrix else 0
        else:
            sums["dense_bytes"] += size
            sums["dense"] += packed * entries if is_matrix else 0
    router = getattr(model_config, "router", None)
    return ModelCosts(
        dense_params=sums["dense"],
        dense_bytes=sums["dense_bytes"],
        head_params=sums["head"],
        head_bytes=sums["head_bytes"],
        expert_params=sums["expert"],
        expert_bytes=sums["expert_bytes"],
        local_experts=local_experts,
        num_experts=getattr(router, "num_experts", 0) if router else 0,
        top_k=getattr(router, "top_k", 0) if router else 0,
        moe_layers=moe_layers // 2,  # gate-up and down
        hidden_size=model_config.hidden_size,
        keys=key_costs(model_config, caches, axes),
        kv_bytes_per_token=kv_bytes_per_token(caches, axes),
        ep=axes.ep,
    )


def kv_bytes_per_token(caches: tuple[CacheSpec, ...], axes: ParallelAxes) -> float:
    """Bytes of one device's caches per token, in blocks that every cache divides."""
    size = math.lcm(*(s.stride for s in caches if isinstance(s, PagedCache)))
    return kv_pools.bytes_per_block(caches, axes, size) / size


def key_costs(c: Any, caches: tuple[CacheSpec, ...], axes: ParallelAxes) -> tuple[KeyCost, ...]:
    """As the model has it, where it has several kinds of keys or does not attend to all; else 2
    FLOPs per multiply-add of scores and weighted sum, and all of a token's cache. Heads are split
    over tp."""
    if hasattr(c, "key_costs"):
        paged = next(s for s in caches if isinstance(s, PagedCache))
        kinds = c.key_costs(np.dtype(paged.dtype).itemsize)
    else:
        flops = c.num_layers * c.num_heads * 4.0 * c.head_dim
        kinds = (KeyCost(flops, kv_bytes_per_token(caches, axes)),)
    return tuple(replace(k, flops=k.flops / axes.tp) for k in kinds)


@dataclass(frozen=True)
class StepFloor:
    """Seconds on one device, and which of the three binds."""

    tokens: int
    context: float
    flops: float
    bytes: float
    exchanged_bytes: float
    compute_seconds: float
    memory_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.exchange_seconds)

    @property
    def binds(self) -> str:
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "exchange": self.exchange_seconds,
        }
        return max(parts, key=parts.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "binds": self.binds}


def step_floor(
    m: ModelCosts, gpu: Gpu, *, tokens: int, context: float, sequences: int, decode: bool
) -> StepFloor:
    """Floor of a step of `tokens` rows per rank, each seeing `context` keys on average; logits for
    `sequences` rows.

    decode: every row reads its own keys; prefill: the rows of a sequence share one pass over them
    (over all of a kind: between them they choose most).
    A step waits for its most loaded rank, which computes and receives `imbalance` times the mean
    of routed rows.
    """
    flops = (
        2.0 * tokens * (m.dense_params + m.imbalance * m.top_k * m.expert_params)
        + 2.0 * sequences * m.head_params
    )
    flops += tokens * sum(k.flops * k.keys(context) for k in m.keys)
    touched = 0.0
    if m.num_experts:
        group_tokens = tokens * m.ep * m.imbalance
        touched = m.local_experts * (1.0 - (1.0 - m.top_k / m.num_experts) ** group_tokens)
    if decode:
        read = tokens * sum(k.bytes * k.keys(context) for k in m.keys)
    else:
        read = sequences * sum(k.bytes * 2.0 * context / k.stride for k in m.keys)
    size = (
        m.dense_bytes
        + m.head_bytes
        + touched * m.expert_bytes
        + read
        + tokens * m.kv_bytes_per_token
    )
    exchanged = exchange_seconds = 0.0
    if m.ep > 1 and m.num_experts:
        remote = (
            m.ep * (1.0 - (1.0 - 1.0 / m.ep) ** m.top_k) * (m.ep - 1) / m.ep
        )  # distinct other ranks a token goes to
        exchanged = (
            2.0 * m.moe_layers * tokens * m.imbalance * remote * m.hidden_size * 2.0
        )  # there and back, bf16
        outside = max(0.0, (m.ep - gpu.nvlink_domain) / (m.ep - 1))
        exchange_seconds = exchanged * max(
            (1 - outside) / gpu.link_bandwidth, outside / gpu.network_bandwidth
        )
    # every product multiplies bf16 operands: attention, and weights that are widened on the way in,
    # whatever they are stored as
    peak = gpu.bf16_flops
    return StepFloor(
        tokens,
        context,
        flops,
        size,
        exchanged,
        flops / peak,
        size / gpu.bandwidth,
        exchange_seconds,
    )
