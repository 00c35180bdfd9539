"""Dispatch, local experts and combine against a dense einsum over all experts, on eight devices.

XLA:CPU has no ragged all-to-all, so the ragged path runs here on an all-gather that follows the
operation's documented semantics.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers import dispatch
from deepinfer_jax.models.layers.dispatch import RAGGED_FLAG, MoeOptions, plan_sends
from deepinfer_jax.models.layers.experts import apply_experts
from deepinfer_jax.models.layers.moe import expert_parallel
from deepinfer_jax.models.layers.placement import make_placement, physical_ids

D, INNER, ROWS = 8, 4, 6


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    every = [
        jax.lax.all_gather(a, axis_name)
        for a in (operand, input_offsets, send_sizes, output_offsets)
    ]
    me = jax.lax.axis_index(axis_name)
    for source in range(every[0].shape[0]):
        data, start, size, at = (
            every[0][source],
            every[1][source, me],
            every[2][source, me],
            every[3][source, me],
        )
        row = jnp.arange(output.shape[0])
        taken = jnp.take(data, jnp.clip(row - at + start, 0, data.shape[0] - 1), axis=0)
        output = jnp.where(((row >= at) & (row < at + size))[:, None], taken, output)
    return output


def dense(x, experts, weights, gate_up, down):
    """x [T, D] float64; every expert on every row, then the chosen ones weighted."""
    gate, up = np.split(np.einsum("td,end->ten", x, gate_up), 2, axis=-1)
    out = np.einsum("tei,edi->ted", gate / (1 + np.exp(-gate)) * up, down)
    chosen = np.zeros((x.shape[0], gate_up.shape[0]))
    for t, k in np.ndindex(experts.shape):
        if experts[t, k] >= 0:
            chosen[t, experts[t, k]] += weights[t, k]
    return np.einsum("te,ted->td", chosen, out)


@functools.cache
def program(replicas: int, ep: int, physical: int, k: int, options: MoeOptions):
    mesh = jax.make_mesh(
        (replicas, ep), ("replica", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    axes = ParallelAxes(dp=replicas * ep, ep=ep)

    def step(x, experts, weights, gate_up, down, l2p, count):
        ids = physical_ids(experts, l2p, count, jax.lax.axis_index("ep"))

        def compute(rows, i, w):
            return apply_experts(rows, i, w, gate_up, down, None, options.rows_per_pass)

        run = functools.partial(
            expert_parallel,
            axes=axes,
            per_rank=physical // ep,
            options=options,
            meanwhile=lambda: 2 * x,
        )
        return run(x, ids, weights, compute)

    dp, over = P(("replica", "ep")), P("ep")
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(dp, dp, dp, over, over, P(), P()),
            out_specs=(dp, dp),
            check_vma=False,
        )
    )


def check(replicas, ep, p2l, num_experts, experts, options, seed=0):
    """experts i32 [dp * ROWS, k], -1 in padding rows."""
    rng, physical, k = np.random.default_rng(seed), len(p2l), experts.shape[1]
    n = replicas * ep * ROWS
    x, weights = rng.normal(size=(n, D)).astype(np.float32), rng.random((n, k)).astype(np.float32)
    gate_up, down = (
        rng.normal(size=(num_experts, 2 * INNER, D)),
        rng.normal(size=(num_experts, D, INNER)),
    )
    tables = make_placement(p2l, num_experts)
    args = (x, experts, weights, gate_up[p2l].astype(np.float32), down[p2l].astype(np.float32))
    got, other = program(replicas, ep, physical, k, options)(
        *args, tables.logical_to_physical, tables.replica_count
    )
    np.testing.assert_allclose(
        got, dense(x.astype(np.float64), experts, weights, gate_up, down), atol=2e-4
    )
    np.testing.assert_array_equal(other, 2 * x)


def routing(kind: str, n: int, num_experts: int, k: int, rng) -> np.ndarray:
    """i32 [n, k] of distinct experts per row."""
    experts = np.array([rng.permutation(num_experts)[:k] for _ in range(n)], np.int32)
    if kind == "one expert":
        experts[:] = -1
        experts[:, 0] = rng.integers(num_experts)
    elif kind == "one rank":
        experts = np.array([rng.permutation(k) for _ in range(n)], np.int32)
    elif kind == "empty ranks":
        experts[rng.integers(2, size=n // ROWS).repeat(ROWS) == 0] = -1
    elif kind == "no tokens":
        experts[:] = -1
    elif kind == "padding":
        experts[rng.random(n) < 0.5] = -1
    return experts


KINDS = ("uniform", "one expert", "one rank", "empty ranks", "no tokens", "padding")
MESHES = ((1, 1), (1, 2), (2, 4), (1, 8))
OPTIONS = {
    "padded": MoeOptions(),
    "small cap": MoeOptions(capacity_factor=0.3),
    "in passes": MoeOptions(rows_per_pass=5),
    "ragged": MoeOptions(dispatch="ragged"),
}


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_sum(kind, option, ragged_on_cpu):
    for replicas, ep in MESHES if option == "padded" else MESHES[2:]:
        rng = np.random.default_rng(7)
        p2l = rng.permutation(np.arange(16) % 11)  # eleven experts, five of them twice, anywhere
        experts = routing(kind, replicas * ep * ROWS, 11, 3, rng)
        check(replicas, ep, p2l, 11, experts, OPTIONS[option])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.sampled_from(MESHES),
    st.sampled_from([8, 11]),
    st.sampled_from(["padded", "small cap"]),
)
def test_any_routing_on_any_mesh_equals_the_dense_sum(seed, kind, mesh, num_experts, option):
    rng = np.random.default_rng(seed)
    extra = rng.integers(num_experts, size=16 - num_experts)
    p2l = rng.permutation(np.concatenate([np.arange(num_experts), extra]))
    check(
        *mesh,
        p2l,
        num_experts,
        routing(kind, mesh[0] * mesh[1] * ROWS, num_experts, 3, rng),
        OPTIONS[option],
        seed,
    )


def test_more_choices_than_ranks_still_sends_each_row_once_per_rank():
    ids = jnp.array([[0, 1, 2, 3, 7], [4, -1, 5, 6, -1], [-1, -1, -1, -1, -1]])
    for ep, per_rank in ((2, 4), (8, 1)):
        plan = plan_sends(ids, ep, per_rank)
        want = [len({int(e) // per_rank for e in row if e >= 0}) for row in ids]
        assert plan.wanted.sum(1).tolist() == want and plan.live.sum(1).tolist() == want
    assert plan_sends(ids, 2, 4).counts.tolist() == [1, 2]


def test_the_default_cap_is_exact_and_a_factor_shrinks_it():
    assert MoeOptions().capacity(256, 8, 64) == 256
    assert MoeOptions(capacity_factor=1.25).capacity(256, 8, 64) < 64
    assert MoeOptions(capacity_factor=100.0).capacity(256, 8, 64) == 256


def test_ragged_needs_its_flag():
    ragged = MoeOptions(dispatch="ragged")
    with pytest.raises(ValueError, match="decomposer"):
        ragged.check_backend("--xla_gpu_foo=1")
    ragged.check_backend(f"--xla_gpu_foo=1 {RAGGED_FLAG}")
    MoeOptions().check_backend("")


@pytest.mark.parametrize(
    "args",
    [
        {"dispatch": "other"},
        {"capacity_factor": 0.0},
        {"capacity_factor": 1.0, "dispatch": "ragged"},
        {"extra_experts": -1},
    ],
)
def test_impossible_options_are_refused(args):
    with pytest.raises(ValueError):
        MoeOptions(**args)


def test_the_send_metadata_survives_its_bit_cast():
    ids, weights = jnp.array([[3, -1]], jnp.int32), jnp.array([[0.1, -2.5e-20]], jnp.float32)
    packed = dispatch._pack(ids, weights)
    assert packed.dtype == jnp.int32 and packed.shape == (1, 4)
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(packed[:, 2:], jnp.float32), weights)
