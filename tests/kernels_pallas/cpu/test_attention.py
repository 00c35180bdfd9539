"""The compiled attention against the float64 oracle, over the cases of the other backends and those
that break its blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import DECODE, PREFILL, assert_close, run_attention

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import dispatch, testing
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native
from deepinfer_jax.kernels_pallas.cpu import paged_decode as cpu_paged_decode
from deepinfer_jax.kernels_pallas.testing import AttentionCase

pytestmark = [
    pytest.mark.skipif(not cpu_native.in_use(name), reason=cpu_native.status(name).reason)
    for name in ("paged_decode", "ragged_prefill")
]

REFUSED = {"mla", "other value width", "fp8 cache", "gpu gqa fp8", "gpu mla fp8 rows"}
OWN = {
    "block boundary": AttentionCase((127, 128, 129, 255, 257), (1,) * 5, block_size=16),
    "pages larger than blocks": AttentionCase((300, 7, 129), (1,) * 3, block_size=192),
    "spans": AttentionCase((3000, 5, 0, 1025), (1,) * 4, block_size=16, heads=6, kv_heads=1, d=32),
    "spans window sinks rows": AttentionCase(
        (2100, 5), (2, 2), block_size=16, sliding_window=40, sinks=True
    ),
    "bf16 spans": AttentionCase(
        (1500,), (1,), dtype="bfloat16", cache_dtype="bfloat16", block_size=16
    ),
    "mla many heads": AttentionCase(
        (300, 3, 0), (1,) * 3, heads=40, kv_heads=1, d=80, v_dim=64, block_size=16
    ),
    "other value width": AttentionCase((40, 3), (1, 1), dv=32),
    "mixed types": AttentionCase((40, 3), (1, 1), cache_dtype="bfloat16"),
}


@pytest.mark.parametrize("name", sorted(set(DECODE) - REFUSED))
def test_cases_of_every_backend(name):
    got, expected = run_attention(kernels.paged_decode, DECODE[name], implementation="native")
    assert_close(got, expected, DECODE[name].dtype)


@pytest.mark.parametrize("name", OWN)
def test_cases_that_break_blocks(name):
    got, expected = run_attention(kernels.paged_decode, OWN[name], implementation="native")
    assert_close(got, expected, OWN[name].dtype)


def wide(case: AttentionCase) -> AttentionCase:
    """`case` with head sizes that are multiples of 16."""
    up = lambda n: n if n is None else -(-n // 16) * 16  # noqa: E731
    return dataclasses.replace(case, d=up(case.d), dv=up(case.dv), v_dim=up(case.v_dim))


OWN_PREFILL = {
    "block boundary": AttentionCase((127, 128, 129, 257), (127, 5, 129, 130), block_size=16),
    "more heads than rows of a chunk": AttentionCase(
        (300, 3, 0, 20), (7, 3, 0, 20), heads=40, kv_heads=1, d=80, v_dim=64, block_size=16
    ),
    "bf16 window sinks": AttentionCase(
        (300, 40), (300, 30), sliding_window=9, sinks=True, dtype="bfloat16", cache_dtype="bfloat16"
    ),
    "no sequence": AttentionCase((0, 0), (0, 0), pad_rows=9),
}


@pytest.mark.parametrize(
    "name", [n for n in PREFILL if not n.startswith(("fp8", "gpu"))] + list(OWN_PREFILL)
)
def test_prefill(name):
    case = wide((PREFILL | OWN_PREFILL)[name])
    got, expected = run_attention(kernels.ragged_prefill, case, implementation="native")
    assert_close(got, expected, case.dtype)


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_row_does_not_depend_on_how_a_prompt_is_cut(block_size, window):
    """To the last bit: so tokens and log-probabilities are the same with and without chunks, prefix
    hits and hand-over."""
    case = AttentionCase((310,), (310,), block_size=block_size, sliding_window=window, d=32)
    x = {n: jnp.asarray(a) for n, a in testing.attention_inputs(case).items() if a is not None}

    def last(rows: int, length: int = 310) -> np.ndarray:
        args = (
            x["q"][length - rows : length],
            x["k_pool"],
            x["v_pool"],
            x["block_tables"],
            jnp.array([length]),
            jnp.array([0, rows]),
        )
        return np.asarray(
            kernels.ragged_prefill(
                *args,
                jnp.zeros(rows, jnp.int32),
                scale=case.scale,
                sliding_window=window,
                implementation="native",
            )
        )

    whole = last(310)
    for rows, length in ((1, 310), (7, 310), (131, 310), (50, 203), (1, 129)):
        np.testing.assert_array_equal(last(rows, length), whole[length - rows : length])


@pytest.mark.parametrize("name", ["fp8 cache", "other value width"])
def test_refused_prefill(name):
    case = PREFILL[name]
    with pytest.raises(ValueError, match="native refused: (pools must be|head sizes must be)"):
        run_attention(kernels.ragged_prefill, case, implementation="native")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_cases_run_on_xla(name):
    dispatch.reset_explain()
    got, expected = run_attention(kernels.paged_decode, DECODE[name])
    assert_close(got, expected, DECODE[name].dtype)
    assert "native refused: " in dispatch.explain()
    with pytest.raises(ValueError, match="native refused: (pools must be|head sizes must be)"):
        run_attention(kernels.paged_decode, DECODE[name], implementation="native")


def test_large_scores_and_broken_queries():
    case = AttentionCase((20, 20), (1, 1))
    inputs = testing.attention_inputs(case)
    inputs["q"] = inputs["q"] * np.float32(300)
    expected = testing.attention_oracle(case, inputs)
    inputs["q"][1, 0, 0] = np.nan
    got = cpu_paged_decode.paged_decode_native(
        *(jnp.asarray(inputs[n]) for n in ("q", "k_pool", "v_pool", "block_tables", "kv_lens")),
        scale=case.scale,
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-4)
    assert np.isnan(got[1, 0]).all() and not np.isnan(got[1, 1:]).any()


def test_inside_shard_map_on_many_devices():
    """Every device calls with helpers from one pool; each sees its own sequences and pages."""
    devices = jax.devices()[:8]
    case = dataclasses.replace(DECODE["mqa odd group"], kv_lens=(33, 600), block_size=16)
    each = [testing.attention_inputs(case, seed=i) for i in range(len(devices))]
    names = ("q", "k_pool", "v_pool", "block_tables", "kv_lens")
    together = [jnp.concatenate([jnp.asarray(x[n]) for x in each]) for n in names]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

    def local(*args):
        return kernels.paged_decode(*args, scale=case.scale, implementation="native")

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P("d"),) * 5, out_specs=P("d"), check_vma=False)
    )
    for _ in range(5):
        got = np.asarray(run(*together))
    expected = np.concatenate([testing.attention_oracle(case, x) for x in each])
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
