"""Block ids, lengths and starts that no engine would hand over: every implementation takes the
nearest ones that exist, and reads nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import assert_close

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import testing
from deepinfer_jax.kernels_pallas.cpu import native
from deepinfer_jax.kernels_pallas.testing import AttentionCase

FAR = 2**31 - 1
DECODE = AttentionCase((20, 9, 9), (1, 1, 1), block_size=4, pad_pages=1)
PREFILL = AttentionCase((20, 9, 9), (5, 9, 4), block_size=4, pad_pages=1)
BLOCKS, PAGES = 14, 6  # of both cases: 11 owned blocks and 3 spare ones, 5 pages and 1 more


def native_or_skip(op: str, implementation: str) -> None:
    if implementation == "native" and not native.status(op).native:
        pytest.skip(native.status(op).reason)


def spoil(inputs: dict, change: dict) -> tuple[dict, dict]:
    """(inputs with some values replaced, the same with the nearest values in bounds)."""
    bounds = {"block_tables": (0, BLOCKS - 1), "kv_lens": (0, PAGES * 4), "q_starts": (0, 18)}
    bad, good = dict(inputs), dict(inputs)
    for name, (at, value) in change.items():
        bad[name], good[name] = inputs[name].copy(), inputs[name].copy()
        bad[name][at] = value
        good[name][at] = np.clip(value, *bounds[name])
    return bad, good


CHANGES = {
    "huge ids": {"block_tables": ((0, slice(None)), FAR)},
    "an id one past the pool": {"block_tables": ((0, 1), BLOCKS)},
    "negative ids": {"block_tables": ((slice(None), 0), -1)},
    "the smallest id": {"block_tables": ((2, 2), -(2**31))},
    "a length beyond the table": {"kv_lens": (1, PAGES * 4 + 1)},
    "a huge length": {"kv_lens": (2, FAR)},
    "a negative length": {"kv_lens": (0, -5)},
    "ids and lengths": {"block_tables": ((0, slice(None)), FAR), "kv_lens": (0, FAR)},
}


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("op", ["paged_decode", "ragged_prefill"])
def test_the_nearest_in_bounds_counts(op, name, implementation):
    native_or_skip(op, implementation)
    case = DECODE if op == "paged_decode" else PREFILL
    inputs = testing.attention_inputs(case, poison=False)
    bad, good = spoil(inputs, CHANGES[name])
    assert bad["block_tables"].shape[1] == PAGES and len(bad["k_pool"]) == BLOCKS
    names = ["q", "k_pool", "v_pool", "block_tables", "kv_lens"]
    names += ["q_starts", "seq_ids"] if op == "ragged_prefill" else []
    got = getattr(kernels, op)(
        *(jnp.asarray(bad[n]) for n in names), scale=case.scale, implementation=implementation
    )
    lens = tuple(int(n) for n in good["kv_lens"])
    expected = testing.attention_oracle(
        AttentionCase(lens, case.q_lens, block_size=4, pad_pages=1), good
    )
    assert_close(np.asarray(got), expected, case.dtype)


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("starts", [(0, 5, FAR, 18), (0, 5, 2, 18), (-7, 5, 14, 10**6)])
def test_starts_outside_the_rows_end_no_process(starts, implementation):
    """Rows that are some sequence's alone keep their result."""
    native_or_skip("ragged_prefill", implementation)
    inputs = testing.attention_inputs(PREFILL, poison=False)
    expected = testing.attention_oracle(PREFILL, inputs)
    inputs["q_starts"] = np.array(starts, np.int32)
    names = ["q", "k_pool", "v_pool", "block_tables", "kv_lens", "q_starts", "seq_ids"]
    got = kernels.ragged_prefill(
        *(jnp.asarray(inputs[n]) for n in names),
        scale=PREFILL.scale,
        implementation=implementation,
    )
    assert got.shape == expected.shape
    assert_close(np.asarray(got)[:5], expected[:5], PREFILL.dtype)
