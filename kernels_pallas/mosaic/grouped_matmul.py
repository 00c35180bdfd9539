"""Grouped matmul for Hopper (wgmma): persistent blocks over (row block of one group, column block)
tiles.

A producer warpgroup streams rows and weights by TMA; two warpgroups multiply, splitting the rows of
a large tile or the columns of a small one. With `swiglu` a tile takes matching gate and up columns
and stores silu(gate) * up. Block-scaled e4m3 weights are widened in shared memory and their
products enter the float32 sum once per 128 columns of K, times the block's scale (the promotion of
DeepSeek-V3, section 3.3.2, with bf16 rows). Rows past the last group are stored as zeros by the
same tiles.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels_pallas.mosaic import common as mg
from deepinfer_jax.kernels_pallas.mosaic.common import ROWS

_SMS = 132  # blocks: one per SM of an H100 or H200
_SHARED_MEMORY = 200 * 1024
# up to here a dense e4m3 product reads weights longer than it multiplies, by peaks: the kernel
# saves bytes
_MAX_DENSE_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class _Tile:
    """m x n rows and weight columns per tile (n counts gate and up), k per step; the two warpgroups
    split m or n."""

    m: int
    n: int
    k: int
    split_rows: bool
    swiglu: bool
    fp8: bool

    @property
    def parts(self) -> int:
        """Accumulators per warpgroup: gate and up, or two column halves where one would be wider
        than 128."""
        return 2 if self.swiglu or self.n > 128 else 1

    def stride(self, width: int) -> int:
        """Columns of w[E, width, K] from one part to the next."""
        return width // 2 if self.swiglu else self.n // self.parts

    @property
    def out_columns(self) -> int:
        return self.n // 2 if self.swiglu else self.n

    @property
    def columns(self) -> int:
        """Columns of each part that one warpgroup holds."""
        return self.n // self.parts // (1 if self.split_rows else 2)

    @property
    def stages(self) -> int:
        step = self.m * self.k * 2 + self.n * self.k * (1 if self.fp8 else 2)
        fixed = 2 * ROWS * self.columns * 2 + (self.n * self.k * 2 if self.fp8 else 0)
        return min(6, (_SHARED_MEMORY - fixed) // step)


def _choose_tile(rows: int, groups: int, n: int, swiglu: bool, fp8: bool) -> _Tile:
    large = rows >= ROWS * groups
    wide = large and not fp8 and n % 256 == 0
    return _Tile(
        m=128 if large else 64,
        n=256 if wide else 128,
        k=128 if fp8 else 64,
        split_rows=large,
        swiglu=swiglu,
        fp8=fp8,
    )


def unsupported_reason(x, w, group_sizes, *, w_scale=None, swiglu: bool = False):
    """Why this kernel cannot run these arguments; None if it can."""
    del group_sizes
    _, n, k = w.shape
    if x.dtype != jnp.bfloat16:
        return f"rows in {x.dtype}, needs bfloat16"
    if w_scale is None and w.dtype != jnp.bfloat16:
        return f"weights in {w.dtype} without scales, needs bfloat16"
    if w_scale is not None and (w.dtype != jnp.float8_e4m3fn or w_scale.ndim != 3):
        return (
            f"weights in {w.dtype} with {w_scale.ndim}-dimensional scales, needs float8_e4m3fn with"
            " 128 x 128 blocks"
        )
    if k % 128 or n % (256 if swiglu else 128):
        return f"N {n}, K {k}: needs multiples of {256 if swiglu else 128} and 128"
    return None


def experts_unsupported_reason(x, gate_up, down, group_sizes, *, scales=None, row_weights=None):
    del row_weights
    first, second = scales or (None, None)
    return unsupported_reason(
        x, gate_up, group_sizes, w_scale=first, swiglu=True
    ) or unsupported_reason(x, down, group_sizes, w_scale=second)


def block_scaled_unsupported_reason(x, w, w_scale):
    if x.shape[0] > _MAX_DENSE_ROWS:
        return (
            f"{x.shape[0]} rows, more than {_MAX_DENSE_ROWS}: widening the weights once is little"
            " beside the product"
        )
    stacks = (jax.ShapeDtypeStruct((1, *a.shape), a.dtype) for a in (w, w_scale))
    return unsupported_reason(x, next(stacks), None, w_scale=next(stacks))


def block_scaled_matmul_mosaic(x, w, w_scale, *, interpret=None, sms=_SMS):
    """One group that has all rows."""
    sizes = jnp.full(1, x.shape[0], jnp.int32)
    return grouped_matmul_mosaic(
        x, w[None], sizes, w_scale=w_scale[None], interpret=interpret, sms=sms
    )


def moe_experts_mosaic(
    x, gate_up, down, group_sizes, *, scales=None, row_weights=None, interpret=None, sms=_SMS
):
    first, second = scales or (None, None)
    hidden = grouped_matmul_mosaic(
        x, gate_up, group_sizes, w_scale=first, swiglu=True, interpret=interpret, sms=sms
    )
    return grouped_matmul_mosaic(
        hidden,
        down,
        group_sizes,
        w_scale=second,
        row_weights=row_weights,
        interpret=interpret,
        sms=sms,
    )


def grouped_matmul_mosaic(
    x, w, group_sizes, *, w_scale=None, row_weights=None, swiglu=False, interpret=None, sms=_SMS
):
    """`grouped_matmul`; with swiglu `[M, N / 2]`, silu of the first half of the columns times the
    second; times row_weights `[M]`."""
    m = x.shape[0]
    e, n, _ = w.shape
    tile = _choose_tile(m, e, n, swiglu, w_scale is not None)
    rows = max(m, tile.m)  # a TMA box may not exceed the array
    x = jnp.pad(x, ((0, rows - m), (0, 0)))
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), ends, jnp.full(1, rows, jnp.int32)]
    )  # the last group: rows of no group
    items, live = mg.row_blocks(starts, rows, tile.m)
    weights = (
        None
        if row_weights is None
        else jnp.pad(row_weights.astype(jnp.float32), (0, rows - m + tile.m))
    )
    wide = mg.matrix_smem((tile.n, tile.k), x.dtype) if tile.fp8 else None
    out = plgpu.kernel(
        functools.partial(
            _body,
            tile=tile,
            sms=sms,
            groups=e,
            scaled=w_scale is not None,
            weighted=row_weights is not None,
        ),
        out_type=jax.ShapeDtypeStruct((rows, n // 2 if swiglu else n), x.dtype),
        scratch_types={
            "x_ring": mg.matrix_smem((tile.stages, tile.m, tile.k), x.dtype),
            "w_ring": mg.matrix_smem(
                (tile.stages, tile.n, tile.k), w.dtype, 64 if tile.fp8 else 128
            ),
            "wide": wide,
            "o_smem": plgpu.SMEM((2, ROWS, tile.columns), x.dtype),
            "ready": plgpu.Barrier(num_arrivals=1 + tile.parts, num_barriers=tile.stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            "meet": plgpu.Barrier(num_arrivals=2),
        },
        grid=(sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        items,
        live[None],
        *([w_scale] if tile.fp8 else []),
        *([weights] if weights is not None else []),
        x,
        w,
    )
    return out[:m]


def _body(items, live, *refs, tile, sms, groups, scaled, weighted, **scratch):
    refs = list(refs)
    scales = refs.pop(0) if scaled else None
    row_weights = refs.pop(0) if weighted else None
    x, w, out = refs
    sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
    n_blocks = w.shape[1] // tile.n
    tiles = live[0] * n_blocks
    mine = pl.cdiv(jnp.maximum(tiles - sm, 0), sms)

    def tile_of(t):
        index = sm + t * sms
        item, column = lax.div(index, n_blocks), lax.rem(index, n_blocks)
        group, base, low, high = (items[item, i] for i in range(4))
        steps = jnp.where(group < groups, x.shape[1] // tile.k, 0)
        return group, pl.multiple_of(base, mg.ALIGN), low, high, column * tile.out_columns, steps

    @pl.when(wg == 2)
    def _producer():
        plgpu.set_max_registers(40, action="decrease")
        load = functools.partial(_load_tile, tile_of=tile_of, x=x, w=w, tile=tile, scratch=scratch)
        mg.drain(scratch["free"], tile.stages, lax.fori_loop(0, mine, load, jnp.int32(0)))

    @pl.when(wg < 2)
    def _consumer():
        plgpu.set_max_registers(232, action="increase")

        def run(t, done):
            group, base, low, high, column, steps = tile_of(t)
            multiply = _multiply_scaled if scaled else _multiply
            extra = (
                {"scales": scales, "group": group, "column": column, "width": w.shape[1]}
                if scaled
                else {}
            )
            sums = multiply(done, steps, wg, tile, scratch, **extra)
            if tile.swiglu:
                sums = (sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1],)
            first_row, first_column = (
                (wg * ROWS, column) if tile.split_rows else (0, column + wg * tile.columns)
            )
            skip = jnp.clip(low - first_row, 0, ROWS)
            count = jnp.clip(high - first_row, 0, ROWS) - skip
            for p, result in enumerate(sums):
                if row_weights is not None:
                    rows = pl.ds(base + first_row, ROWS)
                    factor = plgpu.load(
                        row_weights.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                    )
                    result = result * mg.over_rows(factor, result.shape)
                o_smem = scratch["o_smem"].at[wg]
                o_smem[...] = result.astype(o_smem.dtype)
                plgpu.commit_smem()
                columns = pl.ds(first_column + p * tile.n // tile.parts, tile.columns)
                mg.store_rows(
                    o_smem,
                    skip,
                    lambda rows, columns=columns: out.at[rows, columns],
                    base + first_row + skip,
                    count,
                )
            return done + steps

        lax.fori_loop(0, mine, run, jnp.int32(0))


def _load_tile(t, done, *, tile_of, x, w, tile, scratch):
    group, base, _, _, column, steps = tile_of(t)
    part, stride = tile.n // tile.parts, tile.stride(w.shape[1])

    def load(i, _):
        slot, k = lax.rem(done + i, tile.stages), pl.ds(i * tile.k, tile.k)
        pl.when(done + i >= tile.stages)(lambda: plgpu.barrier_wait(scratch["free"].at[slot]))
        ready = scratch["ready"].at[slot]
        plgpu.copy_gmem_to_smem(x.at[pl.ds(base, tile.m), k], scratch["x_ring"].at[slot], ready)
        for p in range(tile.parts):
            rows = scratch["w_ring"].at[slot, pl.ds(p * part, part)]
            plgpu.copy_gmem_to_smem(w.at[group, pl.ds(column + p * stride, part), k], rows, ready)

    lax.fori_loop(0, steps, load, None)
    return done + steps


def _operands(tile, wg, x, w):
    """This warpgroup's rows, and its columns of each part, transposed for the product."""
    rows = x.at[pl.ds(wg * ROWS, ROWS)] if tile.split_rows else x
    offset = 0 if tile.split_rows else wg * tile.columns
    part = tile.n // tile.parts
    return rows, [
        w.at[pl.ds(p * part + offset, tile.columns)].transpose((1, 0)) for p in range(tile.parts)
    ]


def _multiply(done, steps, wg, tile, scratch):
    """Sum over K of a bf16 tile -> one f32 [64, columns] per part. A buffer is handed back one step
    late, when its products are done."""

    def body(*accumulators):
        def step(i, _):
            slot = lax.rem(done + i, tile.stages)
            plgpu.barrier_wait(scratch["ready"].at[slot])
            rows, columns = _operands(
                tile, wg, scratch["x_ring"].at[slot], scratch["w_ring"].at[slot]
            )
            for acc, part in zip(accumulators, columns, strict=True):
                plgpu.wgmma(acc, rows, part)
            plgpu.wgmma_wait(tile.parts)
            pl.when(i > 0)(
                lambda: plgpu.barrier_arrive(
                    scratch["free"].at[lax.rem(done + i + tile.stages - 1, tile.stages)]
                )
            )

        lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(
            lambda: plgpu.barrier_arrive(
                scratch["free"].at[lax.rem(done + steps + tile.stages - 1, tile.stages)]
            )
        )
        return tuple(acc[...] for acc in accumulators)

    return pl.run_scoped(
        body, *[plgpu.ACC((ROWS, tile.columns), jnp.float32) for _ in range(tile.parts)]
    )


def _multiply_scaled(done, steps, wg, tile, scratch, *, scales, group, column, width):
    """As `_multiply` for e4m3 weights: per step of 128 columns of K one product, times the scale of
    its 128 x 128 block."""
    wide, stride = scratch["wide"], tile.stride(width)

    def step(i, sums):
        slot = lax.rem(done + i, tile.stages)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        mg.meet(
            scratch["meet"]
        )  # the other warpgroup still multiplies with the last step's weights
        w8 = scratch["w_ring"].at[slot]
        for j in range(tile.n // ROWS):
            rows = pl.ds(j * ROWS, ROWS)
            pl.when(wg == j % 2)(functools.partial(mg.widen, w8.at[rows], wide.at[rows]))
        plgpu.commit_smem()
        mg.meet(scratch["meet"])
        rows, columns = _operands(tile, wg, scratch["x_ring"].at[slot], wide)
        added = []
        for p, part in enumerate(columns):
            scale = scales[group, lax.div(column + p * stride, 128), i]
            added.append(sums[p] + mg.product(rows, part) * scale)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return tuple(added)

    zeros = tuple(mg.wgmma_full((ROWS, tile.columns), 0.0) for _ in range(tile.parts))
    return lax.fori_loop(0, steps, step, zeros)
