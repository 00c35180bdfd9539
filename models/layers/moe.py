"""Mixture-of-experts layer under expert parallelism: route, dispatch, compute the local experts,
combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers import dispatch
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.experts import Experts
from deepinfer_jax.models.layers.mlp import SwiGLU, swiglu
from deepinfer_jax.models.layers.param import param, psum_tp
from deepinfer_jax.models.layers.placement import (
    expert_load,
    initial_physical_to_logical,
    make_placement,
    num_physical_experts,
    physical_ids,
)
from deepinfer_jax.models.layers.router import RouterConfig, route, route_by_turns
from deepinfer_jax.models.rules import PROJECTIONS, Rule

TABLES = ("physical_to_logical", "logical_to_physical", "replica_count")
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def expert_parallel(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    compute: Compute,
    *,
    axes: ParallelAxes,
    per_rank: int,
    options: MoeOptions,
    meanwhile: Callable[[], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Runs `compute` on the ranks that hold each row's experts: x [T, D] -> (f32 [T, D],
    meanwhile()).

    ids: i32 [T, k] physical slots, -1 for none (a padding row has only those and travels nowhere);
    weights f32 [T, k]. compute(rows [R, D], ids i32 [R, k] local slots, weights [R, k]) -> f32 [R,
    D]. meanwhile: work that depends on no exchange, placed between dispatch and combine so that XLA
    may overlap it with them.
    """
    ep, axis = axes.ep, axes.ep_axis
    if ep == 1:
        return compute(x, ids, weights), meanwhile()
    plan = dispatch.plan_sends(ids, ep, per_rank)
    if options.dispatch == "ragged":
        received = dispatch.dispatch_ragged(
            x, ids, weights, plan, axis=axis, ep=ep, per_rank=per_rank
        )
        other = meanwhile()
        out = compute(received.rows, received.ids, received.weights).astype(x.dtype)
        return dispatch.combine_ragged(out, received, plan, axis=axis), other

    cap = options.capacity(x.shape[0], ids.shape[1], ep)

    def exchange(turn: jax.Array | int, other: Callable[[], jax.Array] | None = None):
        received = dispatch.dispatch_padded(
            x, ids, weights, plan, axis=axis, ep=ep, per_rank=per_rank, cap=cap, turn=turn
        )
        done = other() if other else None
        out = compute(received.rows, received.ids, received.weights).astype(x.dtype)
        return dispatch.combine_padded(out, received, plan, axis=axis, ep=ep, cap=cap), done

    first, other = exchange(0, meanwhile)
    if cap >= x.shape[0]:
        return first, other
    turns = jax.lax.pmax(
        -(-plan.counts.max() // cap), axis
    )  # the longest queue of the group: every rank takes every turn
    return jax.lax.fori_loop(1, turns, lambda i, total: total + exchange(i)[0], first), other


@dataclass(frozen=True)
class InitialTable:
    """Makes the start value of one placement table; a value, so that two equal models
    stay equal."""

    table: str
    num_experts: int
    num_physical: int

    def __call__(self) -> np.ndarray:
        tables = make_placement(
            initial_physical_to_logical(self.num_experts, self.num_physical), self.num_experts
        )
        return getattr(tables, self.table)


class PlacementTable(nnx.Variable):
    """Expert placement: data of the step, not a trained weight and not in any checkpoint. Metadata
    `init` makes the start value."""


class ExpertPlacement(nnx.Module):
    """The tables of placement.Placement as arrays on device, replicated."""

    def __init__(self, num_experts: int, num_physical: int) -> None:
        shapes = ((num_physical,), (num_experts, num_physical - num_experts + 1), (num_experts,))
        for name, shape in zip(TABLES, shapes, strict=True):
            init = InitialTable(name, num_experts, num_physical)
            setattr(self, name, PlacementTable(jnp.zeros(shape, jnp.int32), init=init))


class MoE(nnx.Module):
    """x [T, D] -> (routed experts + shared experts [T, D], load i32 [num_experts]: this rank's
    tokens per logical expert).

    shared_intermediate: width of the shared experts together (they are one SwiGLU); 0: none.
    swiglu_limit: see `mlp.swiglu`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        router: RouterConfig,
        *,
        shared_intermediate: int = 0,
        swiglu_limit: float | None = None,
        dtype: jnp.dtype,
        quant: str | None,
        axes: ParallelAxes,
        options: MoeOptions,
    ) -> None:
        options.check_backend()
        if options.forced_imbalance > axes.ep:
            raise ValueError(
                f"forced_imbalance {options.forced_imbalance} is more than all load on one of"
                f" {axes.ep} ranks"
            )
        self.router, self.axes, self.options = router, axes, options
        self.swiglu_limit = swiglu_limit
        num_physical = num_physical_experts(router.num_experts, axes.ep, options.extra_experts)
        # float32: a rounded logit can flip a choice of experts, and the matrix is tiny
        self.gate = param((router.num_experts, hidden), jnp.float32)
        self.gate_bias = (
            param((router.num_experts,), jnp.float32, init="zeros") if router.bias else None
        )
        self.experts = Experts(
            num_physical,
            hidden,
            intermediate,
            dtype=dtype,
            quant=quant,
            axes=axes,
            rows_per_pass=options.rows_per_pass,
            swiglu_limit=swiglu_limit,
        )
        self.shared = (
            SwiGLU(hidden, shared_intermediate, dtype=dtype, quant=quant, axes=axes)
            if shared_intermediate
            else None
        )
        self.placement = ExpertPlacement(router.num_experts, num_physical)
        self.per_rank = num_physical // axes.ep

    def __call__(
        self, x: jax.Array, valid: jax.Array, experts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """experts: i32 [T, k] where they are chosen already; the router only weighs them."""
        rank = jax.lax.axis_index(self.axes.ep_axis) if self.axes.ep > 1 else 0
        if forced := self.options.forced_imbalance:
            experts = route_by_turns(x.shape[0], rank, self.router, self.axes.ep, forced)
        weights, experts = self.route(x, experts)
        experts = jnp.where(valid[:, None], experts, -1)
        ids = physical_ids(
            experts,
            self.placement.logical_to_physical[...],
            self.placement.replica_count[...],
            rank,
        )
        routed, shared = expert_parallel(
            x,
            ids,
            weights,
            self.experts,
            axes=self.axes,
            per_rank=self.per_rank,
            options=self.options,
            meanwhile=lambda: self._shared(x),
        )
        y = routed if self.shared is None else routed + shared.astype(jnp.float32)
        return psum_tp(y, self.axes).astype(x.dtype), expert_load(experts, self.router.num_experts)

    def route(self, x: jax.Array, experts: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """x [T, D] -> (weights f32 [T, k], logical experts i32 [T, k])."""
        logits = jax.lax.dot_general(
            x.astype(jnp.float32),
            self.gate[...],
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
        )
        bias = None if self.gate_bias is None else self.gate_bias[...]
        return route(logits, bias, self.router, experts)

    def _shared(self, x: jax.Array) -> jax.Array | None:
        """This tp rank's share of the shared experts' output: summed over tp together with the
        routed part, in one all-reduce."""
        if self.shared is None:
            return None
        return self.shared.down.matmul(swiglu(self.shared.gate_up(x), self.swiglu_limit))


@dataclass(frozen=True)
class SpreadExperts:
    """Makes a table for dummy weights: every token's experts are distinct, and all get some."""

    vocab_size: int
    num_experts: int
    top_k: int

    def __call__(self) -> np.ndarray:
        first = np.arange(self.vocab_size)[:, None] * self.top_k
        return ((first + np.arange(self.top_k)) % self.num_experts).astype(np.int32)


class ExpertTable(nnx.Variable):
    """Which experts a token goes to: data of the checkpoint, whole numbers."""


class TokenExperts(nnx.Module):
    """tokens i32 [T] -> their experts i32 [T, k], looked up."""

    def __init__(self, vocab_size: int, router: RouterConfig) -> None:
        init = SpreadExperts(vocab_size, router.num_experts, router.top_k)
        shape = (vocab_size, router.top_k)
        self.table = ExpertTable(jnp.zeros(shape, jnp.int32), init=init)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.table[...], tokens, axis=0, mode="clip")


def moe_rules(
    target: str,
    source: str,
    router: RouterConfig,
    axes: ParallelAxes,
    options: MoeOptions,
    *,
    projections: tuple[str, str, str] = PROJECTIONS,
    bias: str = "gate.e_score_correction_bias",
) -> list[Rule]:
    """Rules of a `MoE` at `target` (without its shared experts) from `source`.gate and
    `source`.experts.{e}.

    projections: the checkpoint's names of an expert's gate, up and down projections; bias: of the
    router's bias.
    """
    gate, up, down = projections
    num_physical = num_physical_experts(router.num_experts, axes.ep, options.extra_experts)
    slots = tuple(initial_physical_to_logical(router.num_experts, num_physical).tolist())
    expert = f"{source}.experts.{{e}}"
    rules = [
        Rule(f"{target}.gate", (f"{source}.gate.weight",)),
        Rule(
            f"{target}.experts.gate_up",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            experts=slots,
        ),
        Rule(f"{target}.experts.down", (f"{expert}.{down}.weight",), experts=slots),
    ]
    for name in TABLES:
        table = InitialTable(name, router.num_experts, num_physical)
        rules.append(Rule(f"{target}.placement.{name}", (), transform=table))
    return rules + ([Rule(f"{target}.gate_bias", (f"{source}.{bias}",))] if router.bias else [])
