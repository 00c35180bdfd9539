"""Copying blocks out of pools and back: every implementation against NumPy's indexing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels_pallas.copy_blocks import put_blocks, take_blocks
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native

WAYS = ["native", "loop", "xla"]
# rows of a few bytes and of odd ones, many to a chunk; one of several chunks
CACHES = [
    (3, (9, 3), np.int8),
    (1, (9, 4, 5), ml_dtypes.bfloat16),
    (2, (9, 1), np.float32),
    (2, (9, 3, 33333), np.float32),
    (5, (9, 700), np.float16),
]


@pytest.fixture(autouse=True)
def only_if_there(request):
    way = getattr(request.node, "callspec", None) and request.node.callspec.params["way"]
    if way == "native" and not cpu_native.status("blocks").native:
        pytest.skip(cpu_native.status("blocks").reason)


def pools_of(seed):
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-100, 100, shape).astype(dtype) for _ in range(layers)]
        for layers, shape, dtype in CACHES
    ]


def rows_of(seed, size):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(-100, 100, (size, layers, *shape[1:])).astype(dtype)
        for layers, shape, dtype in CACHES
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_take(way, count):
    caches, ids = pools_of(0), np.array([3, 8, 0, 3, 7, 1], np.int32)
    out = jax.jit(lambda c, i, n: take_blocks(c, i, n, implementation=way))(
        caches, ids, np.int32(count)
    )
    for pools, got in zip(caches, out, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got)[:count], np.stack([p[ids[:count]] for p in pools], axis=1)
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "ids", [[3, 8, 0, 4, 7, 1], [9, 8, 100, 4, 9, 1], [9] * 6], ids=["all", "some", "none"]
)
def test_put_in_place(way, ids):
    expected, rows, ids = pools_of(0), rows_of(1, 6), np.array(ids, np.int32)
    caches = jax.tree.map(lambda p: jnp.array(p, copy=True), expected)
    where = jax.tree.map(lambda p: p.unsafe_buffer_pointer(), caches)
    put = jax.jit(lambda c, i, r: put_blocks(c, i, r, implementation=way), donate_argnums=0)
    out = put(caches, ids, rows)
    kept = ids < 9
    for pools, array, written in zip(expected, rows, out, strict=True):
        for layer, (pool, got) in enumerate(zip(pools, written, strict=True)):
            pool[ids[kept]] = array[kept, layer]
            np.testing.assert_array_equal(np.asarray(got), pool)
    assert jax.tree.map(lambda p: p.unsafe_buffer_pointer(), out) == where
    assert all(p.is_deleted() for p in jax.tree.leaves(caches))


def test_what_the_compiled_copy_cannot_take_goes_through_xla():
    caches, ids = [[jnp.arange(12, dtype=jnp.int4).reshape(4, 3)]], jnp.array([2, 1])
    with pytest.raises(ValueError, match="pools of int4"):
        take_blocks(caches, ids, jnp.int32(2), implementation="native")
    assert take_blocks(caches, ids, jnp.int32(2))[0].tolist() == [[[6, 7, -8]], [[3, 4, 5]]]
