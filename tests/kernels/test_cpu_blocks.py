"""Copying blocks out of pools and back: every implementation against NumPy's indexing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels_pallas import cpu_native
from deepinfer_jax.kernels_pallas.copy_blocks import put_blocks, take_blocks

WAYS = ["native", "loop", "xla"]
# rows of a few bytes and of odd ones, many to a chunk; one of several chunks
SHAPES = [((9, 3), np.int8), ((9, 4, 5), ml_dtypes.bfloat16), ((9, 1), np.float32), ((9, 3, 33333), np.float32), ((9, 700), np.float16)]


@pytest.fixture(autouse=True)
def only_if_there(request):
    way = getattr(request.node, "callspec", None) and request.node.callspec.params["way"]
    if way == "native" and not cpu_native.status("blocks").native:
        pytest.skip(cpu_native.status("blocks").reason)


def arrays(rows, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(-100, 100, (rows or shape[0], *shape[1:])).astype(dtype) for shape, dtype in SHAPES]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_take(way, count):
    pools, ids = arrays(None, 0), np.array([3, 8, 0, 3, 7, 1], np.int32)
    out = jax.jit(lambda p, i, n: take_blocks(p, i, n, implementation=way))(pools, ids, np.int32(count))
    for pool, got in zip(pools, out, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:count], pool[ids[:count]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [[3, 8, 0, 4, 7, 1], [9, 8, 100, 4, 9, 1], [9] * 6], ids=["all", "some", "none"])
def test_put_in_place(way, ids):
    expected, rows, ids = arrays(None, 0), arrays(6, 1), np.array(ids, np.int32)
    pools = [jnp.array(p, copy=True) for p in expected]
    where = [p.unsafe_buffer_pointer() for p in pools]
    put = jax.jit(lambda p, i, r: put_blocks(p, i, r, implementation=way), donate_argnums=0)
    out = put(pools, ids, rows)
    kept = ids < 9
    for pool, row, got in zip(expected, rows, out, strict=True):
        pool[ids[kept]] = row[kept]
        np.testing.assert_array_equal(np.asarray(got), pool)
    assert [p.unsafe_buffer_pointer() for p in out] == where
    assert all(p.is_deleted() for p in pools)


def test_what_the_compiled_copy_cannot_take_goes_through_xla():
    pools, ids = [jnp.arange(12, dtype=jnp.int4).reshape(4, 3)], jnp.array([2, 1])
    with pytest.raises(ValueError, match="pools of int4"):
        take_blocks(pools, ids, jnp.int32(2), implementation="native")
    assert take_blocks(pools, ids, jnp.int32(2))[0].tolist() == [[6, 7, -8], [3, 4, 5]]
