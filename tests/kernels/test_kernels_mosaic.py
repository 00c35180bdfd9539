"""The Mosaic kernels in the GPU interpreter (threads, barriers, TMA and races simulated on the CPU) against the float64 oracle.

The interpreter fills what was never written with NaN, and unowned pages, tails of last pages and padding rows hold NaN too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import dispatch, testing
from deepinfer_jax.kernels_pallas.testing import AttentionCase, GroupedCase

mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
if not hasattr(mosaic_gpu, "InterpretGPUParams"):
    pytest.skip("this jax has no GPU interpreter", allow_module_level=True)

# TMA reads past the end of an array yield zeros on the device; the interpreter gives NaN instead of raising
INTERPRET = mosaic_gpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")
BF16 = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
GQA = AttentionCase((70, 0, 16, 1), (1,) * 4, heads=8, kv_heads=2, d=64, block_size=16, **BF16)
MLA = AttentionCase((70, 0, 129), (1,) * 3, heads=16, kv_heads=1, d=320, v_dim=256, block_size=32, **BF16)
ROWS = AttentionCase((70, 0, 16, 150), (70, 0, 3, 80), heads=2, kv_heads=1, d=64, block_size=16, pad_rows=3, **BF16)
FP8 = {"cache_dtype": "float8_e4m3fn"}

DECODE = {
    "gqa": (GQA, {"splits": 1}),
    "gqa split": (dataclasses.replace(GQA, kv_lens=(200, 64, 65)), {"splits": 2}),
    "gqa rows window sinks": (dataclasses.replace(GQA, q_lens=(2,) * 4, sliding_window=20, sinks=True, block_size=8), {"splits": 2}),
    "gqa fp8": (dataclasses.replace(GQA, **FP8, block_size=64), {"splits": 1}),
    "mla": (MLA, {"splits": 1}),
    "mla split sinks": (dataclasses.replace(MLA, sinks=True, sliding_window=70), {"splits": 2}),
    "mla fp8 rows": (dataclasses.replace(MLA, **FP8, q_lens=(2,) * 3), {"splits": 1}),
    "mla two blocks": (dataclasses.replace(MLA, kv_lens=(70,), q_lens=(5,), d=192, v_dim=128), {"splits": 1}),
}

PREFILL = {
    "gqa": ROWS,
    "window sinks": dataclasses.replace(ROWS, sliding_window=20, sinks=True, kv_lens=(150, 3), q_lens=(140, 3)),
    "fp8": dataclasses.replace(ROWS, **FP8, kv_lens=(20, 150), q_lens=(20, 9), block_size=32),
    "expanded mla": dataclasses.replace(ROWS, d=192, dv=128, heads=1, kv_lens=(16, 140), q_lens=(3, 90)),
    "absorbed mla": dataclasses.replace(MLA, kv_lens=(70, 3), q_lens=(3, 2), d=192, v_dim=128, pad_rows=1),
    "few rows": dataclasses.replace(ROWS, kv_lens=(1, 5), q_lens=(1, 1), pad_rows=0),
}

BLOCKS = {"w_dtype": "float8_e4m3fn", "scale": "block"}
GROUPED = {
    "small": GroupedCase((3, 0, 17, 1), n=256, k=128, dtype="bfloat16", w_dtype="bfloat16", pad=5),
    "large": GroupedCase((3, 200, 0, 57), n=256, k=128, dtype="bfloat16", w_dtype="bfloat16"),
    "nothing": GroupedCase((0, 0), n=256, k=128, dtype="bfloat16", w_dtype="bfloat16", pad=9),
    "fp8 small": GroupedCase((3, 0, 17), n=256, k=256, dtype="bfloat16", **BLOCKS),
    "fp8 large": GroupedCase((3, 140), n=256, k=256, dtype="bfloat16", **BLOCKS),
}


def run(op: str, implementation: str, args: tuple, kwargs: dict, **options) -> np.ndarray:
    """The table's function for an H200, in the interpreter."""
    with dispatch.use_target("cuda", (9, 0)):
        function, choice = dispatch.select(op, args, kwargs)
    assert choice.name == implementation, str(choice)
    call = functools.partial(function, interpret=INTERPRET, **{n: v for n, v in kwargs.items() if not isinstance(v, jax.Array)}, **options)
    arrays = {n: v for n, v in kwargs.items() if isinstance(v, jax.Array)}
    return np.asarray(jax.jit(lambda a, k: call(*a, **k))(args, arrays).astype(jnp.float32))


def attention(op: str, case: AttentionCase, **options) -> None:
    inputs = testing.attention_inputs(case)
    expected = testing.attention_oracle(case, inputs)
    names = ["q", "k_pool", "v_pool", "block_tables", "kv_lens"] + (["q_starts", "seq_ids"] if op == "ragged_prefill" else [])
    args = tuple(None if inputs[n] is None else jnp.asarray(inputs[n]) for n in names)
    kwargs = {"scale": case.scale, "v_dim": case.v_dim, "sliding_window": case.sliding_window}
    kwargs["sinks"] = None if inputs["sinks"] is None else jnp.asarray(inputs["sinks"])
    if op == "paged_decode":
        kwargs["q_per_seq"] = case.q_lens[0]
    got = run(op, "mosaic_mla" if case.v_dim else "mosaic", args, kwargs, **options)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", DECODE)
def test_paged_decode(name):
    case, options = DECODE[name]
    case = dataclasses.replace(case, q_lens=case.q_lens[:1] * len(case.kv_lens))
    attention("paged_decode", case, **options)


@pytest.mark.parametrize("name", PREFILL)
def test_ragged_prefill(name):
    attention("ragged_prefill", PREFILL[name])


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_matmul(name):
    inputs = testing.grouped_inputs(GROUPED[name])
    args = tuple(jnp.asarray(inputs[n]) for n in ("x", "w", "group_sizes"))
    scale = None if inputs["w_scale"] is None else jnp.asarray(inputs["w_scale"])
    got = run("grouped_matmul", "mosaic", args, {"w_scale": scale}, sms=2)
    np.testing.assert_allclose(got, testing.grouped_oracle(**inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["small", "fp8 large"])
def test_moe_experts(name):
    case = dataclasses.replace(GROUPED[name], n=128, k=128)
    inputs = testing.experts_inputs(case)
    args = tuple(jnp.asarray(inputs[n]) for n in ("x", "gate_up", "down", "group_sizes"))
    scales = None if inputs["scales"] is None else tuple(map(jnp.asarray, inputs["scales"]))
    weights = np.linspace(0, 1, len(inputs["x"]), dtype=np.float32)
    got = run("moe_experts", "mosaic", args, {"scales": scales, "row_weights": jnp.asarray(weights)}, sms=2)
    np.testing.assert_allclose(got, testing.experts_oracle(**inputs) * weights[:, None], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 70])
def test_block_scaled_matmul(rows):
    inputs = testing.grouped_inputs(GroupedCase((rows,), n=256, k=256, dtype="bfloat16", **BLOCKS))
    args = jnp.asarray(inputs["x"]), jnp.asarray(inputs["w"][0]), jnp.asarray(inputs["w_scale"][0])
    got = run("block_scaled_matmul", "mosaic", args, {}, sms=2)
    np.testing.assert_allclose(got, testing.grouped_oracle(**inputs), rtol=2e-2, atol=2e-2)


def test_gpu_kernels_are_refused_on_cpu():
    args = [jnp.zeros(s) for s in ((1, 1, 64), (1, 16, 1, 64), (1, 16, 1, 64), (1, 1), (1,))]
    with pytest.raises(ValueError, match="needs cuda"):
        kernels.paged_decode(*args, scale=1.0, implementation="mosaic")
