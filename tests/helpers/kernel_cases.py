"""The problems every backend must solve, and how a result is compared with the float64 oracle.

One list per op: the XLA paths run all of it, the Mosaic kernels what they take (the names in
GPU_DECODE, GPU_PREFILL, GPU_GROUPED, and GPU_DECODE's splits over keys). Everywhere: lengths 0 and
1, ends of pages, a sequence that fills its table, NaN where no kernel may look
(`testing.attention_inputs`, `testing.grouped_inputs`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import testing
from deepinfer_jax.kernels_pallas.testing import AttentionCase, GroupedCase

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float8_e4m3fn": 2e-2}

DECODE = {
    "mixed": AttentionCase((5, 0, 1, 16, 17, 4), (1,) * 6, pad_pages=2),
    "one": AttentionCase((1,), (1,)),
    "all padding": AttentionCase((0, 0), (1, 1)),
    "full table": AttentionCase((16, 12, 16), (1,) * 3),
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


_BF16 = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
_FP8 = {"cache_dtype": "float8_e4m3fn"}
_GQA = AttentionCase((70, 0, 16, 1), (1,) * 4, heads=8, kv_heads=2, d=64, block_size=16, **_BF16)
_MLA = AttentionCase(
    (70, 0, 129), (1,) * 3, heads=16, kv_heads=1, d=320, v_dim=256, block_size=32, **_BF16
)
_ROWS = AttentionCase(
    (70, 0, 16, 150), (70, 0, 3, 80), heads=2, kv_heads=1, d=64, block_size=16, pad_rows=3, **_BF16
)


def _decode(case: AttentionCase, rows: int = 1, **changes) -> AttentionCase:
    """`case` changed, with `rows` query rows for each of its sequences."""
    case = dataclasses.replace(case, **changes)
    return dataclasses.replace(case, q_lens=(rows,) * len(case.kv_lens))


GPU_DECODE = {  # name -> (case, in how many parts the keys are split)
    "gpu gqa": (_GQA, 1),
    "gpu gqa split": (_decode(_GQA, kv_lens=(208, 64, 65)), 2),
    "gpu gqa rows window sinks": (_decode(_GQA, 2, sliding_window=20, sinks=True, block_size=8), 2),
    "gpu gqa fp8": (_decode(_GQA, **_FP8, block_size=64), 1),
    "gpu mla": (_MLA, 1),
    "gpu mla split sinks": (_decode(_MLA, kv_lens=(70, 0, 128), sinks=True, sliding_window=70), 2),
    "gpu mla fp8 rows": (_decode(_MLA, 2, **_FP8), 1),
    "gpu mla two blocks": (_decode(_MLA, 5, kv_lens=(70,), d=192, v_dim=128), 1),
}
GPU_PREFILL = {
    "gpu gqa": _ROWS,
    "gpu window sinks": dataclasses.replace(
        _ROWS, sliding_window=20, sinks=True, kv_lens=(150, 3), q_lens=(140, 3)
    ),
    "gpu fp8": dataclasses.replace(_ROWS, **_FP8, kv_lens=(20, 160), q_lens=(20, 9), block_size=32),
    "gpu expanded mla": dataclasses.replace(
        _ROWS, d=192, dv=128, heads=1, kv_lens=(16, 140), q_lens=(3, 90)
    ),
    "gpu absorbed mla": dataclasses.replace(
        _MLA, kv_lens=(70, 3), q_lens=(3, 2), d=192, v_dim=128, pad_rows=1
    ),
    "gpu few rows": dataclasses.replace(_ROWS, kv_lens=(1, 5), q_lens=(1, 1), pad_rows=0),
}
_BLOCKS = {"dtype": "bfloat16", "w_dtype": "float8_e4m3fn", "scale": "block"}
_WIDE = {"n": 256, "k": 128, "dtype": "bfloat16", "w_dtype": "bfloat16"}
GPU_GROUPED = {
    "gpu small": GroupedCase((3, 0, 17, 1), **_WIDE, pad=5),
    "gpu large": GroupedCase((3, 200, 0, 57), **_WIDE),
    "gpu nothing": GroupedCase((0, 0), **_WIDE, pad=9),
    "gpu fp8 small": GroupedCase((3, 0, 17), n=256, k=256, **_BLOCKS),
    "gpu fp8 large": GroupedCase((3, 140), n=256, k=256, **_BLOCKS),
}
DECODE |= {name: case for name, (case, _) in GPU_DECODE.items()}
PREFILL |= GPU_PREFILL
GROUPED = {
    "uneven": GroupedCase((3, 0, 17, 1, 0, 40), n=24, k=32),
    "padding rows": GroupedCase((3, 5), n=24, k=32, pad=20),
    "all empty": GroupedCase((0, 0), n=8, k=8, pad=4),
    "one each": GroupedCase((1,) * 8, n=16, k=16),
    "bf16": GroupedCase((3, 17), n=24, k=32, dtype="bfloat16", w_dtype="bfloat16"),
    "int8 channels": GroupedCase((3, 17), n=24, k=32, w_dtype="int8", scale="channel"),
    "fp8 blocks": GroupedCase((3, 17, 0, 4), n=200, k=136, w_dtype="float8_e4m3fn", scale="block"),
    "fp8 blocks bf16 rows": GroupedCase(
        (3, 17), n=128, k=256, dtype="bfloat16", w_dtype="float8_e4m3fn", scale="block"
    ),
} | GPU_GROUPED


def run_attention(op, case: AttentionCase, **options) -> tuple[np.ndarray, np.ndarray]:
    inputs = testing.attention_inputs(case)
    args = {name: value if value is None else jnp.asarray(value) for name, value in inputs.items()}
    if op is kernels.paged_decode:
        assert len(set(case.q_lens)) == 1
        options["q_per_seq"] = case.q_lens[0]
        del args["q_starts"], args["seq_ids"]
    fn = jax.jit(
        lambda a: op(
            **a, scale=case.scale, v_dim=case.v_dim, sliding_window=case.sliding_window, **options
        )
    )
    return np.asarray(fn(args)), testing.attention_oracle(case, inputs)


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
