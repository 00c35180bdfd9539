"""The attention problems every backend must solve, and how a result is compared with the float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import testing
from deepinfer_jax.kernels_pallas.testing import AttentionCase

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float8_e4m3fn": 2e-2}

DECODE = {
    "mixed": AttentionCase((5, 0, 1, 16, 17, 4), (1,) * 6, pad_pages=2),
    "one": AttentionCase((1,), (1,)),
    "all padding": AttentionCase((0, 0), (1, 1)),
    "page boundary": AttentionCase((4, 8, 3, 9), (1,) * 4),
    "long": AttentionCase((700, 3, 129), (1,) * 3, block_size=16),
    "mqa odd group": AttentionCase((33, 7), (1, 1), heads=9, kv_heads=3, d=64, block_size=16),
    "two rows": AttentionCase((9, 2, 64), (2, 2, 2)),
    "fewer keys than rows": AttentionCase((1, 2), (3, 3)),
    "window": AttentionCase((5, 40, 1), (1,) * 3, sliding_window=6),
    "window sinks rows": AttentionCase((15, 40, 2), (2,) * 3, sliding_window=5, sinks=True),
    "sinks": AttentionCase((15, 0, 2), (1,) * 3, sinks=True),
    "mla": AttentionCase((40, 3, 0), (1,) * 3, heads=8, kv_heads=1, d=24, v_dim=16),
    "other value width": AttentionCase((40, 3), (1, 1), dv=24),
    "bf16": AttentionCase((40, 3), (1, 1), dtype="bfloat16", cache_dtype="bfloat16"),
    "fp8 cache": AttentionCase((40, 3), (1, 1), dtype="bfloat16", cache_dtype="float8_e4m3fn"),
}

PREFILL = {
    "mixed": AttentionCase((5, 9, 1, 16), (5, 4, 1, 16), pad_rows=3, pad_pages=1),
    "cached prefix": AttentionCase((300, 20), (40, 1), block_size=16),
    "many short": AttentionCase((7,) * 12, (7,) * 12),
    "empty in between": AttentionCase((6, 0, 6, 0), (6, 0, 6, 0), pad_rows=20),
    "long": AttentionCase((333,), (333,), block_size=16, heads=3, kv_heads=1),
    "window": AttentionCase((300, 40), (300, 30), sliding_window=9, block_size=16),
    "window past a tile": AttentionCase((700,), (20,), sliding_window=30, block_size=16),
    "sinks": AttentionCase((15, 40), (15, 4), sinks=True),
    "mla": AttentionCase((40, 30), (40, 3), heads=8, kv_heads=1, d=24, v_dim=16),
    "other value width": AttentionCase((40, 30), (40, 3), d=24, dv=16),
    "bf16": AttentionCase((40, 3), (40, 3), dtype="bfloat16", cache_dtype="bfloat16"),
    "fp8 cache": AttentionCase((40, 3), (40, 3), dtype="bfloat16", cache_dtype="float8_e4m3fn"),
}


def run_attention(op, case: AttentionCase, **options) -> tuple[np.ndarray, np.ndarray]:
    inputs = testing.attention_inputs(case)
    args = {name: value if value is None else jnp.asarray(value) for name, value in inputs.items()}
    if op is kernels.paged_decode:
        assert len(set(case.q_lens)) == 1
        options["q_per_seq"] = case.q_lens[0]
        del args["q_starts"], args["seq_ids"]
    fn = jax.jit(lambda a: op(**a, scale=case.scale, v_dim=case.v_dim, sliding_window=case.sliding_window, **options))
    return np.asarray(fn(args)), testing.attention_oracle(case, inputs)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
