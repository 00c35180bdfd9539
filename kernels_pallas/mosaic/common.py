"""What the Mosaic GPU kernels share: shared-memory types, tile products, masks, and where the
interpreter needs another route.

The GPU interpreter runs neither `pl.run_state` over an accumulator nor a matrix operand held in
registers; `add_product` and `add_weighted` take the accumulator out of place and the operand
through shared memory there. All else is the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels_pallas.dispatch import current_target

LOG2E = math.log2(math.e)
ROWS = 64  # rows of one wgmma
ALIGN = 8  # rows of a tile of shared memory
Interpret = object
"""`interpret` of `plgpu.kernel`: None, or the interpreter's parameters (tests only)."""

NEVER = -1e30  # a score no key can reach: exp2 of it is 0, and NEVER - NEVER is 0 rather than NaN


def cores() -> int:
    """Streaming multiprocessors of the device that is compiled for; 2 in the interpreter."""
    target = current_target()
    if target.platform != "cuda":
        return 2
    if target.cores is None:
        raise ValueError(f"{target}: how many multiprocessors? Trace under jax.default_device")
    return target.cores


def matrix_smem(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int = 128) -> plgpu.SMEM:
    """Shared memory for a wgmma operand: 8-row tiles of one swizzle span (at most `swizzle` bytes)
    each.

    The two operands of a product must have the same span.
    """
    bytes_per_row = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if s <= swizzle and bytes_per_row % s == 0)
    return plgpu.SMEM(shape, dtype, transforms=matrix_transforms(dtype, swizzle))


def matrix_transforms(dtype: jnp.dtype, swizzle: int = 128) -> tuple:
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(
        swizzle
    )


def product(a: jax.Ref, b: jax.Ref) -> jax.Array:
    """a[64, K] @ b[K, N] -> f32 [64, N] in registers."""

    def body(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Ref, b: jax.Ref, interpret: bool) -> jax.Array:
    """acc + a @ b, accumulating in place on a GPU."""
    if interpret:
        return acc + product(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def add_weighted(
    acc: jax.Array, weights: jax.Array, v: jax.Ref, scratch: jax.Ref | None, interpret: bool
) -> jax.Array:
    """acc + weights[64, K] @ v[K, N] with the weights rounded to v's dtype; scratch: shared memory,
    used by the interpreter only."""
    weights = weights.astype(v.dtype)
    if interpret:
        scratch[...] = weights
        plgpu.commit_smem()
        return acc + product(scratch, v)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v))(plgpu.ACC.init(acc))


def wgmma_full(shape: tuple[int, ...], value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def row_full(rows: int, value: float) -> jax.Array:
    """f32 [rows], laid out as the row reduction of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def row_iota(rows: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def over_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def meet(barrier: jax.Ref) -> None:
    """Wait until every warpgroup the barrier counts is here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def drain(free: jax.Ref, stages: int, uses: jax.Array) -> None:
    """Wait for the last release of every ring slot that was used, so that no barrier ends with a
    phase nobody has seen."""
    for slot in range(stages):
        pl.when(uses > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))


def store_gmem(ref: jax.Ref, value: jax.Array) -> None:
    """Registers straight to global memory."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11
        ref[...] = value


def zero_dead_rows(ref: jax.Ref, live: jax.Array) -> None:
    """Zero the rows of ref[K, N] from `live` on: what lies there may be NaN, and 0 * NaN would
    reach the result."""
    rows = iota(ref.shape, 0)
    value = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
    ref[...] = jnp.where(rows < live, value.astype(jnp.float32), 0.0).astype(ref.dtype)


def online_softmax(
    scores: jax.Array, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One tile of the running softmax in base 2 -> (weights, factor for what was summed so far, new
    top, new total)."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - over_rows(new_top, scores.shape))
    keep = jnp.exp2(top - new_top)
    return weights, keep, new_top, total * keep + jnp.sum(weights, axis=1)


def widen(narrow: jax.Ref, wide: jax.Ref) -> None:
    """wide[K, N] (f16 or bf16) = narrow[K, N] (e4m3), both in shared memory. The hardware converts
    e4m3 to f16 only."""
    value = narrow[...].astype(jnp.float16)
    wide[...] = value if wide.dtype == jnp.float16 else value.astype(jnp.float32).astype(wide.dtype)


def store_rows(
    smem: jax.Ref,
    first: jax.Array,
    out_at: Callable[[pl.Slice], jax.Ref],
    start: jax.Array,
    count: jax.Array,
) -> None:
    """Copy `count` rows (dynamic, up to all) of smem[R, N] from row `first` on to `out_at(rows)`
    from row `start` on.

    TMA copies have static sizes, so the rows go out in one piece per set bit of count. smem must
    not be tiled.
    """
    done, size = 0, 1 << (smem.shape[0].bit_length() - 1)
    while size:

        @pl.when(lax.bitwise_and(count, size) != 0)
        def _piece(done=done, size=size):
            plgpu.copy_smem_to_gmem(
                smem.at[pl.ds(first + done, size)], out_at(pl.ds(start + done, size))
            )

        done = done + lax.bitwise_and(count, size)
        size //= 2
    plgpu.wait_smem_to_gmem(0)


def row_blocks(starts: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Cut packed rows, `starts[s] : starts[s + 1]` of group s, into blocks of one group -> (i32
    `[items, 4]`, number of live items).

    An item is (group, row base, first live row and end of live rows within the block). Bases are
    multiples of 8, which TMA into tiled shared memory demands, so a group's first block may begin
    with up to 7 rows of its predecessor: they are computed and not stored. Live items come first;
    the others have no live rows.
    """
    bases = starts[:-1] // ALIGN * ALIGN
    blocks = pl.cdiv(starts[1:] - bases, block) * (starts[1:] > starts[:-1])
    ends = jnp.cumsum(blocks)
    item = jnp.arange((rows + (block + ALIGN - 2) * bases.size) // block, dtype=jnp.int32)
    group = jnp.minimum(
        jnp.searchsorted(ends, item, side="right", method="compare_all"), bases.size - 1
    ).astype(jnp.int32)
    base = bases[group] + (item - (ends[group] - blocks[group])) * block
    low = jnp.clip(starts[group] - base, 0, block)
    high = jnp.where(item < ends[-1], jnp.clip(starts[group + 1] - base, 0, block), low)
    return jnp.stack([group, base, low, high], axis=1).astype(jnp.int32), ends[-1].astype(jnp.int32)
