"""The Mosaic kernels in the GPU interpreter (threads, barriers, TMA and races simulated on the CPU)
against the float64 oracle.

The interpreter fills what was never written with NaN, and unowned pages, tails of last pages and
padding rows hold NaN too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import GPU_DECODE, GPU_GROUPED, GPU_PREFILL

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import dispatch, testing
from deepinfer_jax.kernels_pallas.testing import AttentionCase

mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
if not hasattr(mosaic_gpu, "InterpretGPUParams"):
    pytest.skip("this jax has no GPU interpreter", allow_module_level=True)

# TMA reads past the end of an array yield zeros on the device; the interpreter gives NaN instead of
# raising
INTERPRET = mosaic_gpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")


def run(op: str, implementation: str, args: tuple, kwargs: dict, **options) -> np.ndarray:
    """The table's function for an H200, in the interpreter."""
    with dispatch.use_target("cuda", (9, 0)):
        function, choice = dispatch.select(op, args, kwargs)
    assert choice.name == implementation, str(choice)
    call = functools.partial(
        function,
        interpret=INTERPRET,
        **{n: v for n, v in kwargs.items() if not isinstance(v, jax.Array)},
        **options,
    )
    arrays = {n: v for n, v in kwargs.items() if isinstance(v, jax.Array)}
    return np.asarray(jax.jit(lambda a, k: call(*a, **k))(args, arrays).astype(jnp.float32))


def attention(op: str, case: AttentionCase, **options) -> None:
    inputs = testing.attention_inputs(case)
    expected = testing.attention_oracle(case, inputs)
    names = ["q", "k_pool", "v_pool", "block_tables", "kv_lens"] + (
        ["q_starts", "seq_ids"] if op == "ragged_prefill" else []
    )
    args = tuple(None if inputs[n] is None else jnp.asarray(inputs[n]) for n in names)
    kwargs = {"scale": case.scale, "v_dim": case.v_dim, "sliding_window": case.sliding_window}
    kwargs["sinks"] = None if inputs["sinks"] is None else jnp.asarray(inputs["sinks"])
    if op == "paged_decode":
        kwargs["q_per_seq"] = case.q_lens[0]
    got = run(op, "mosaic_mla" if case.v_dim else "mosaic", args, kwargs, **options)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", GPU_DECODE)
def test_paged_decode(name):
    case, splits = GPU_DECODE[name]
    attention("paged_decode", case, splits=splits)


@pytest.mark.parametrize("name", GPU_PREFILL)
def test_ragged_prefill(name):
    attention("ragged_prefill", GPU_PREFILL[name])


@pytest.mark.parametrize("name", GPU_GROUPED)
def test_grouped_matmul(name):
    inputs = testing.grouped_inputs(GPU_GROUPED[name])
    args = tuple(jnp.asarray(inputs[n]) for n in ("x", "w", "group_sizes"))
    scale = None if inputs["w_scale"] is None else jnp.asarray(inputs["w_scale"])
    got = run("grouped_matmul", "mosaic", args, {"w_scale": scale}, sms=2)
    np.testing.assert_allclose(got, testing.grouped_oracle(**inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["gpu small", "gpu fp8 large"])
def test_moe_experts(name):
    case = dataclasses.replace(GPU_GROUPED[name], n=128, k=128)
    inputs = testing.experts_inputs(case)
    args = tuple(jnp.asarray(inputs[n]) for n in ("x", "gate_up", "down", "group_sizes"))
    scales = None if inputs["scales"] is None else tuple(map(jnp.asarray, inputs["scales"]))
    weights = np.linspace(0, 1, len(inputs["x"]), dtype=np.float32)
    got = run(
        "moe_experts",
        "mosaic",
        args,
        {"scales": scales, "row_weights": jnp.asarray(weights)},
        sms=2,
    )
    np.testing.assert_allclose(
        got, testing.experts_oracle(**inputs) * weights[:, None], rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("rows", [1, 70])
def test_fp8_matmul(rows):
    inputs = testing.grouped_inputs(
        dataclasses.replace(GPU_GROUPED["gpu fp8 small"], sizes=(rows,))
    )
    x, *weights = (jnp.asarray(a) for a in (inputs["x"], inputs["w"][0], inputs["w_scale"][0]))
    got = run("matmul", "mosaic", (x, tuple(weights)), {"out_dtype": jnp.bfloat16}, sms=2)
    np.testing.assert_allclose(got, testing.grouped_oracle(**inputs), rtol=2e-2, atol=2e-2)


def test_gpu_kernels_are_refused_on_cpu():
    args = [jnp.zeros(s) for s in ((1, 1, 64), (1, 16, 1, 64), (1, 16, 1, 64), (1, 1), (1,))]
    with pytest.raises(ValueError, match="needs cuda"):
        kernels.paged_decode(*args, scale=1.0, implementation="mosaic")
