"""Carry tokens to the ranks that hold their experts, and the results back. Runs inside
`jax.shard_map`.

A token travels at most once to a rank, however many of its experts live there: the rank adds up its
experts' weighted outputs and sends one row back. No token is ever dropped. Two ways behind the same
pair of functions:

* "padded": `lax.all_to_all` of a fixed number of rows per peer (the cap). With the default cap, all
  the rank's rows, one exchange is always enough. A smaller cap moves fewer padding bytes and
  repeats the exchange only when some peer's queue was longer.
* "ragged": `lax.ragged_all_to_all`, which moves exactly the rows there are. GPU only, and only with
  the XLA flag RAGGED_FLAG: without the decomposer XLA's own ragged-all-to-all corrupts values on
  GPUs. With it, XLA (jax 0.12) lowers the operation to a padded exchange of the whole send buffer
  per peer, more than "padded" moves: it is here for the day the native operation is right. Numbers:
  docs/decisions/031-moe-dispatch.md.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

RAGGED_FLAG = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"


@dataclass(frozen=True)
class MoeOptions:
    """How a model's experts are laid out and reached.

    dispatch: "padded" or "ragged" (see the module).
    capacity_factor: None: the cap is the rank's row count, one exchange. A number f: cap = f * the
    rows a peer receives when routing is uniform; the exchange repeats until every row has gone.
    Only for "padded".
    extra_experts: redundant physical experts, raised so that the physical count divides by ep.
    rows_per_pass: most expert rows computed at once; bounds the memory of a prefill step whose
    tokens all meet on one rank.
    forced_imbalance: for tests and measurements, whose outputs mean nothing: tokens take experts by
    turns, so that in the initial placement the first rank gets this many times the mean (1: all the
    same); 0: the router decides.
    """

    dispatch: str = "padded"
    capacity_factor: float | None = None
    extra_experts: int = 0
    rows_per_pass: int = 32768
    forced_imbalance: float = 0.0

    def __post_init__(self) -> None:
        if self.dispatch not in ("padded", "ragged"):
            raise ValueError(f"moe dispatch must be 'padded' or 'ragged', got {self.dispatch!r}")
        if self.capacity_factor is not None and (
            self.dispatch != "padded" or self.capacity_factor <= 0
        ):
            raise ValueError(
                "capacity_factor must be > 0 and needs dispatch 'padded', got"
                f" {self.capacity_factor} with {self.dispatch!r}"
            )
        if self.forced_imbalance and not self.forced_imbalance >= 1:
            raise ValueError(
                f"forced_imbalance must be 0 or at least 1, got {self.forced_imbalance}"
            )
        if self.extra_experts < 0 or self.rows_per_pass < 1:
            raise ValueError(
                f"need extra_experts >= 0 and rows_per_pass >= 1, got {self.extra_experts} and"
                f" {self.rows_per_pass}"
            )

    def check_backend(self, xla_flags: str | None = None) -> None:
        """ValueError when "ragged" is asked for without the XLA flag it needs (read from XLA_FLAGS
        by default)."""
        flags = os.environ.get("XLA_FLAGS", "") if xla_flags is None else xla_flags
        if self.dispatch == "ragged" and RAGGED_FLAG not in flags.split():
            raise ValueError(
                f"moe dispatch 'ragged' needs XLA_FLAGS to hold {RAGGED_FLAG}: without it values"
                f" arrive corrupted; got {flags!r}"
            )

    def capacity(self, rows: int, top_k: int, ep: int) -> int:
        """Rows per peer and exchange for a step of `rows` rows per rank."""
        if self.capacity_factor is None:
            return rows
        uniform = rows * (1 - (1 - 1 / ep) ** top_k)
        return max(1, min(rows, math.ceil(self.capacity_factor * uniform)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SendPlan:
    """Which rows go to which peer. `wanted` bool [T, ep]; `position` i32 [T, ep] a row's place in
    that peer's queue; `counts` i32 [ep]; `peers` i32 [T, m] and `live` bool [T, m]: a row's
    distinct peers, m = min(k, ep)."""

    wanted: jax.Array
    position: jax.Array
    counts: jax.Array
    peers: jax.Array
    live: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Received:
    """What a rank computes on. rows [R, D]; ids i32 [R, k] local expert slots, -1 none; weights f32
    [R, k]. `back`: whatever `combine` needs to return the results (sizes for the ragged path, the
    exchange's number for the padded one)."""

    rows: jax.Array
    ids: jax.Array
    weights: jax.Array
    back: tuple[jax.Array, ...]


def plan_sends(ids: jax.Array, ep: int, per_rank: int) -> SendPlan:
    """Physical slots i32 [T, k] (-1: none) -> SendPlan. `per_rank`: physical slots on a rank."""
    dest = jnp.where(ids >= 0, ids // per_rank, ep)
    wanted = (dest[:, :, None] == jnp.arange(ep)).any(1)
    position = jnp.cumsum(wanted, axis=0, dtype=jnp.int32) - 1
    if ep <= ids.shape[1]:
        peers = jnp.broadcast_to(jnp.arange(ep, dtype=jnp.int32), wanted.shape)
        live = wanted
    else:  # fewer choices than ranks: list the choices' ranks, each counted where it first occurs
        earlier = jnp.tril(dest[:, :, None] == dest[:, None, :], -1).any(-1)
        peers, live = jnp.minimum(dest, ep - 1), (dest < ep) & ~earlier
    return SendPlan(wanted, position, wanted.sum(0, dtype=jnp.int32), peers, live)


def _localise(ids: jax.Array, axis: str, per_rank: int) -> jax.Array:
    """Physical slots -> slots of this rank, -1 for everybody else's."""
    local = ids - jax.lax.axis_index(axis) * per_rank
    return jnp.where((ids >= 0) & (local >= 0) & (local < per_rank), local, -1)


def _pack(ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Slots and weights share one small i32 message [.., 2k]."""
    return jnp.concatenate(
        [ids, jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)], axis=-1
    )


def _unpack(packed: jax.Array, axis: str, per_rank: int) -> tuple[jax.Array, jax.Array]:
    ids, weights = jnp.split(packed, 2, axis=-1)
    return _localise(ids, axis, per_rank), jax.lax.bitcast_convert_type(weights, jnp.float32)


def _take(rows: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    return rows.at[index].get(mode="fill", fill_value=fill)


def _gather_back(returned: jax.Array, index: jax.Array, live: jax.Array) -> jax.Array:
    """Sum of each token's returned rows in f32: returned [N, D], index i32 [T, m], live bool [T, m]
    -> f32 [T, D]."""
    rows = _take(returned, jnp.where(live, index, returned.shape[0]))
    return rows.astype(jnp.float32).sum(1)


# ---- padded --------------------------------------------------------------------------------------


def dispatch_padded(
    x: Float[Array, "R D"],
    ids: Int32[Array, "R k"],
    weights: Float[Array, "R k"],
    plan: SendPlan,
    *,
    axis: str,
    ep: int,
    per_rank: int,
    cap: int,
    turn: jax.Array | int = 0,
) -> Received:
    """Exchange number `turn`: the rows whose place in a peer's queue is in [turn * cap, (turn + 1)
    * cap)."""
    place = plan.position - turn * cap
    place = jnp.where(plan.wanted & (place >= 0) & (place < cap), place, cap)
    token = jnp.broadcast_to(jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], place.shape)
    source = (
        jnp.full((ep, cap), x.shape[0], jnp.int32)
        .at[jnp.arange(ep)[None, :], place]
        .set(token, mode="drop")
    )
    rows = jax.lax.all_to_all(_take(x, source), axis, 0, 0, tiled=True)
    packed = jax.lax.all_to_all(_take(_pack(ids, weights), source, -1), axis, 0, 0, tiled=True)
    local, w = _unpack(packed.reshape(ep * cap, -1), axis, per_rank)
    return Received(rows.reshape(ep * cap, -1), local, w, (jnp.asarray(turn, jnp.int32),))


def combine_padded(
    out: jax.Array, received: Received, plan: SendPlan, *, axis: str, ep: int, cap: int
) -> jax.Array:
    """Results [ep * cap, D] of an exchange -> their sum per token, f32 [T, D]."""
    returned = jax.lax.all_to_all(out.reshape(ep, cap, -1), axis, 0, 0, tiled=True).reshape(
        ep * cap, -1
    )
    place = jnp.take_along_axis(plan.position, plan.peers, axis=1) - received.back[0] * cap
    live = plan.live & (place >= 0) & (place < cap)
    return _gather_back(returned, plan.peers * cap + place, live)


# ---- ragged --------------------------------------------------------------------------------------


def _starts(sizes: jax.Array, axis: int = -1) -> jax.Array:
    return jnp.cumsum(sizes, axis=axis) - sizes


def dispatch_ragged(
    x: Float[Array, "R D"],
    ids: Int32[Array, "R k"],
    weights: Float[Array, "R k"],
    plan: SendPlan,
    *,
    axis: str,
    ep: int,
    per_rank: int,
) -> Received:
    """Only real rows travel; the receive buffer still has room for every row of every rank."""
    rows, peers_max = x.shape[0], plan.peers.shape[1]
    starts = _starts(plan.counts)
    place = jnp.where(plan.wanted, starts + plan.position, rows * peers_max)
    token = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], place.shape)
    source = jnp.full((rows * peers_max,), rows, jnp.int32).at[place].set(token, mode="drop")
    sizes = jax.lax.all_gather(plan.counts, axis)  # [from, to]
    me = jax.lax.axis_index(axis)
    recv_sizes, out_offsets = sizes[:, me], _starts(sizes, 0)[me]

    def send(values, fill):
        buffer = jnp.full((ep * rows, values.shape[1]), fill, values.dtype)
        return jax.lax.ragged_all_to_all(
            _take(values, source, fill),
            buffer,
            starts,
            plan.counts,
            out_offsets,
            recv_sizes,
            axis_name=axis,
        )

    local, w = _unpack(send(_pack(ids, weights), -1), axis, per_rank)
    return Received(send(x, 0), local, w, (sizes,))


def combine_ragged(out: jax.Array, received: Received, plan: SendPlan, *, axis: str) -> jax.Array:
    """Results [ep * T, D] -> their sum per token, f32 [T, D]."""
    sizes, me = received.back[0], jax.lax.axis_index(axis)
    recv_sizes, starts = sizes[:, me], _starts(plan.counts)
    buffer = jnp.zeros((plan.peers.size, out.shape[1]), out.dtype)
    returned = jax.lax.ragged_all_to_all(
        out,
        buffer,
        _starts(recv_sizes),
        recv_sizes,
        _starts(sizes, 1)[:, me],
        plan.counts,
        axis_name=axis,
    )
    index = starts[plan.peers] + jnp.take_along_axis(plan.position, plan.peers, axis=1)
    return _gather_back(returned, index, plan.live)
