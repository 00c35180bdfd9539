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
from jaxtyping import Array, Float, Int32

from deepinfer_jax.kernels_pallas.grouped_matmul import gated
from deepinfer_jax.kernels_pallas.matmul import Weights, weight_format
from deepinfer_jax.kernels_pallas.mosaic import common as mg
from deepinfer_jax.kernels_pallas.mosaic.common import ROWS, Interpret

# for the ring and what stands beside it: 227 KiB less barriers
_SHARED_MEMORY = 225 * 1024
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

    @classmethod
    def choose(cls, rows: int, groups: int, n: int, *, swiglu: bool, fp8: bool) -> _Tile:
        large = rows >= ROWS * groups
        # 256 columns: large bf16 products, and with swiglu small ones, whose results are half as
        # wide: a row of 64 for each warpgroup is the 128 bytes that a TMA store may begin at
        wide = n % 256 == 0 and ((large and not fp8) or (swiglu and not large))
        return cls(
            m=128 if large else 64,
            n=256 if wide else 128,
            k=128 if fp8 else 64,
            split_rows=large,
            swiglu=swiglu,
            fp8=fp8,
        )

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


@dataclasses.dataclass(frozen=True)
class _Config:
    """What a kernel is compiled for. groups: weight matrices; sms: blocks of the grid; weighted:
    rows are multiplied with weights of their own."""

    tile: _Tile
    groups: int
    sms: int
    weighted: bool


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of one block."""

    x_ring: jax.Ref  # [stages, m, k]
    w_ring: jax.Ref  # [stages, n, k]
    wide: jax.Ref | None  # [n, k]: e4m3 weights of one step, widened
    o_smem: jax.Ref  # [2, 64, columns]
    ready: jax.Ref  # a ring slot is loaded
    free: jax.Ref  # both warpgroups are done with a ring slot
    meet: jax.Ref  # both multiplying warpgroups are here

    @staticmethod
    def types(tile: _Tile, x_dtype: jnp.dtype, w_dtype: jnp.dtype) -> dict[str, object]:
        swizzle = 64 if tile.fp8 else 128
        return {
            "x_ring": mg.matrix_smem((tile.stages, tile.m, tile.k), x_dtype),
            "w_ring": mg.matrix_smem((tile.stages, tile.n, tile.k), w_dtype, swizzle),
            "wide": mg.matrix_smem((tile.n, tile.k), x_dtype) if tile.fp8 else None,
            "o_smem": plgpu.SMEM((2, ROWS, tile.columns), x_dtype),
            "ready": plgpu.Barrier(num_arrivals=1 + tile.parts, num_barriers=tile.stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            "meet": plgpu.Barrier(num_arrivals=2),
        }


def unsupported_reason(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"],
    group_sizes: Int32[Array, " E"] | None,
    *,
    w_scale: Float[Array, "E blocks_N blocks_K"] | None = None,
    swiglu: bool = False,
) -> str | None:
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


def experts_unsupported_reason(
    x: Float[Array, "M K"],
    gate_up: Float[Array, "E two_I K"],
    down: Float[Array, "E K I"],
    group_sizes: Int32[Array, " E"],
    *,
    scales: tuple[jax.Array, jax.Array] | None = None,
    row_weights: Float[Array, " M"] | None = None,
    swiglu_limit: float | None = None,
) -> str | None:
    """Why this kernel cannot run these arguments; None if it can."""
    del row_weights
    first, second = scales or (None, None)
    return unsupported_reason(
        x, gate_up, group_sizes, w_scale=first, swiglu=swiglu_limit is None
    ) or unsupported_reason(x, down, group_sizes, w_scale=second)


def matmul_unsupported_reason(
    x: Float[Array, "M K"], weights: Weights, *, out_dtype: jnp.dtype
) -> str | None:
    """Why this kernel cannot run these arguments; None if it can."""
    del out_dtype
    if weight_format(weights) != "fp8":
        return f"weights in {weights[0].dtype}: XLA's product"
    if x.shape[0] > _MAX_DENSE_ROWS:
        return (
            f"{x.shape[0]} rows, more than {_MAX_DENSE_ROWS}: widening the weights once is little"
            " beside the product"
        )
    w, scale = (jax.ShapeDtypeStruct((1, *a.shape), a.dtype) for a in weights)
    return unsupported_reason(x, w, None, w_scale=scale)


def matmul_mosaic(
    x: Float[Array, "M K"],
    weights: Weights,
    *,
    out_dtype: jnp.dtype,
    interpret: Interpret = None,
    sms: int | None = None,
) -> Float[Array, "M N"]:
    """fp8 weights as one group that has all rows."""
    w, scale = weights
    sizes = jnp.full(1, x.shape[0], jnp.int32)
    out = grouped_matmul_mosaic(
        x, w[None], sizes, w_scale=scale[None], interpret=interpret, sms=sms
    )
    return out.astype(out_dtype)


def moe_experts_mosaic(
    x: Float[Array, "M K"],
    gate_up: Float[Array, "E two_I K"],
    down: Float[Array, "E K I"],
    group_sizes: Int32[Array, " E"],
    *,
    scales: tuple[jax.Array, jax.Array] | None = None,
    row_weights: Float[Array, " M"] | None = None,
    swiglu_limit: float | None = None,
    interpret: Interpret = None,
    sms: int | None = None,
) -> Float[Array, "M K"]:
    """See `moe_experts`. With a swiglu_limit, gate and up leave the kernel before they meet."""
    first, second = scales or (None, None)
    run = functools.partial(grouped_matmul_mosaic, interpret=interpret, sms=sms)
    if swiglu_limit is None:
        hidden = run(x, gate_up, group_sizes, w_scale=first, swiglu=True)
    else:
        both = run(x, gate_up, group_sizes, w_scale=first)
        hidden = gated(*jnp.split(both, 2, axis=-1), swiglu_limit)
    return run(hidden, down, group_sizes, w_scale=second, row_weights=row_weights)


def grouped_matmul_mosaic(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"],
    group_sizes: Int32[Array, " E"],
    *,
    w_scale: Float[Array, "E blocks_N blocks_K"] | None = None,
    row_weights: Float[Array, " M"] | None = None,
    swiglu: bool = False,
    interpret: Interpret = None,
    sms: int | None = None,
) -> Float[Array, "M out"]:
    """`grouped_matmul`; with swiglu `[M, N / 2]`, silu of the first half of the columns times the
    second; times row_weights. sms: blocks (None: one per multiprocessor)."""
    m, (e, n, _) = x.shape[0], w.shape
    sms = sms or mg.cores()
    tile = _Tile.choose(m, e, n, swiglu=swiglu, fp8=w_scale is not None)
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
    config = _Config(tile=tile, groups=e, sms=sms, weighted=weights is not None)
    out = plgpu.kernel(
        functools.partial(_body, config),
        out_type=jax.ShapeDtypeStruct((rows, n // 2 if swiglu else n), x.dtype),
        scratch_types=_Scratch.types(tile, x.dtype, w.dtype),
        grid=(sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(items, live[None], *(a for a in (w_scale, weights) if a is not None), x, w)
    return out[:m]


@dataclasses.dataclass(frozen=True)
class _Work:
    """A kernel's operands, and the tiles that this block takes."""

    config: _Config
    scratch: _Scratch
    items: jax.Ref  # [items, 4], see row_blocks
    scales: jax.Ref | None
    row_weights: jax.Ref | None
    x: jax.Ref
    w: jax.Ref
    out: jax.Ref
    block: jax.Array  # which block of the grid this is

    def tile_at(self, t: jax.Array) -> _At:
        """Where this block's tile number t lies."""
        tile, n_blocks = self.config.tile, self.w.shape[1] // self.config.tile.n
        index = self.block + t * self.config.sms
        item, column = lax.div(index, n_blocks), lax.rem(index, n_blocks)
        group, base, low, high = (self.items[item, i] for i in range(4))
        steps = jnp.where(group < self.config.groups, self.x.shape[1] // tile.k, 0)
        base = pl.multiple_of(base, mg.ALIGN)
        return _At(group, base, low, high, column * tile.out_columns, steps)


@dataclasses.dataclass(frozen=True)
class _At:
    """One tile: group, first row, live rows low..high of it, first column of the result, steps
    over K."""

    group: jax.Array
    base: jax.Array
    low: jax.Array
    high: jax.Array
    column: jax.Array
    steps: jax.Array


def _body(config: _Config, items: jax.Ref, live: jax.Ref, *refs: jax.Ref, **scratch: jax.Ref):
    rest = list(refs)
    scales = rest.pop(0) if config.tile.fp8 else None
    row_weights = rest.pop(0) if config.weighted else None
    x, w, out = rest
    block, wg = lax.axis_index("sm"), lax.axis_index("wg")
    work = _Work(config, _Scratch(**scratch), items, scales, row_weights, x, w, out, block)
    tiles = live[0] * (w.shape[1] // config.tile.n)
    mine = pl.cdiv(jnp.maximum(tiles - block, 0), config.sms)

    @pl.when(wg == 2)
    def _producer():
        plgpu.set_max_registers(40, action="decrease")
        done = lax.fori_loop(0, mine, functools.partial(_load_tile, work), jnp.int32(0))
        mg.drain(work.scratch.free, config.tile.stages, done)

    @pl.when(wg < 2)
    def _consumer():
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, mine, functools.partial(_compute_tile, work, wg), jnp.int32(0))


def _load_tile(work: _Work, t: jax.Array, done: jax.Array) -> jax.Array:
    """Loads tile t into the ring, step by step; done: steps loaded before -> and after it."""
    tile, scratch, at = work.config.tile, work.scratch, work.tile_at(t)
    part, stride = tile.n // tile.parts, tile.stride(work.w.shape[1])

    def load(i, _):
        slot, k = lax.rem(done + i, tile.stages), pl.ds(i * tile.k, tile.k)
        pl.when(done + i >= tile.stages)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
        ready = scratch.ready.at[slot]
        rows = work.x.at[pl.ds(at.base, tile.m), k]
        plgpu.copy_gmem_to_smem(rows, scratch.x_ring.at[slot], ready)
        for p in range(tile.parts):
            columns = work.w.at[at.group, pl.ds(at.column + p * stride, part), k]
            plgpu.copy_gmem_to_smem(columns, scratch.w_ring.at[slot, pl.ds(p * part, part)], ready)

    lax.fori_loop(0, at.steps, load, None)
    return done + at.steps


def _compute_tile(work: _Work, wg: jax.Array, t: jax.Array, done: jax.Array) -> jax.Array:
    """Multiplies tile t and stores its live rows; done: steps used before -> and after it."""
    tile, at = work.config.tile, work.tile_at(t)
    multiply = _multiply_scaled if tile.fp8 else _multiply
    sums = multiply(work, wg, at, done)
    if tile.swiglu:
        sums = (sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1],)
    for p, result in enumerate(sums):
        _store(work, wg, at, p, result)
    return done + at.steps


def _store(work: _Work, wg: jax.Array, at: _At, part: int, result: jax.Array) -> None:
    """Stores the live rows of one part of a tile, f32 [64, columns]."""
    tile = work.config.tile
    first_row, first_column = (
        (wg * ROWS, at.column) if tile.split_rows else (0, at.column + wg * tile.columns)
    )
    skip = jnp.clip(at.low - first_row, 0, ROWS)
    count = jnp.clip(at.high - first_row, 0, ROWS) - skip
    if work.row_weights is not None:
        rows = work.row_weights.at[pl.ds(at.base + first_row, ROWS)]
        factor = plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        result = result * mg.over_rows(factor, result.shape)
    o_smem = work.scratch.o_smem.at[wg]
    o_smem[...] = result.astype(o_smem.dtype)
    plgpu.commit_smem()
    columns = pl.ds(first_column + part * tile.n // tile.parts, tile.columns)
    start = at.base + first_row + skip
    mg.store_rows(o_smem, skip, lambda rows: work.out.at[rows, columns], start, count)


def _operands(tile: _Tile, wg: jax.Array, x: jax.Ref, w: jax.Ref) -> tuple[jax.Ref, list[jax.Ref]]:
    """This warpgroup's rows, and its columns of each part, transposed for the product."""
    rows = x.at[pl.ds(wg * ROWS, ROWS)] if tile.split_rows else x
    offset = 0 if tile.split_rows else wg * tile.columns
    part = tile.n // tile.parts
    return rows, [
        w.at[pl.ds(p * part + offset, tile.columns)].transpose((1, 0)) for p in range(tile.parts)
    ]


def _multiply(
    work: _Work, wg: jax.Array, at: _At, done: jax.Array
) -> tuple[Float[Array, "64 columns"], ...]:
    """Sum over K of a bf16 tile, per part. A buffer is handed back one step late, when its products
    are done."""
    tile, scratch = work.config.tile, work.scratch

    def free_before(i: jax.Array) -> None:
        slot = lax.rem(done + i + tile.stages - 1, tile.stages)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.free.at[slot]))

    def body(*accumulators):
        def step(i, _):
            slot = lax.rem(done + i, tile.stages)
            plgpu.barrier_wait(scratch.ready.at[slot])
            rows, columns = _operands(tile, wg, scratch.x_ring.at[slot], scratch.w_ring.at[slot])
            for acc, part in zip(accumulators, columns, strict=True):
                plgpu.wgmma(acc, rows, part)
            plgpu.wgmma_wait(tile.parts)
            free_before(i)

        lax.fori_loop(0, at.steps, step, None)
        plgpu.wgmma_wait(0)
        free_before(at.steps)
        return tuple(acc[...] for acc in accumulators)

    return pl.run_scoped(
        body, *[plgpu.ACC((ROWS, tile.columns), jnp.float32) for _ in range(tile.parts)]
    )


def _multiply_scaled(
    work: _Work, wg: jax.Array, at: _At, done: jax.Array
) -> tuple[Float[Array, "64 columns"], ...]:
    """As `_multiply` for e4m3 weights: per step of 128 columns of K one product, times the scale of
    its 128 x 128 block."""
    tile, scratch = work.config.tile, work.scratch
    wide, stride = scratch.wide, tile.stride(work.w.shape[1])

    def step(i, sums):
        slot = lax.rem(done + i, tile.stages)
        plgpu.barrier_wait(scratch.ready.at[slot])
        mg.meet(scratch.meet)  # the other warpgroup still multiplies with the last step's weights
        w8 = scratch.w_ring.at[slot]
        for j in range(tile.n // ROWS):
            rows = pl.ds(j * ROWS, ROWS)
            pl.when(wg == j % 2)(functools.partial(mg.widen, w8.at[rows], wide.at[rows]))
        plgpu.commit_smem()
        mg.meet(scratch.meet)
        rows, columns = _operands(tile, wg, scratch.x_ring.at[slot], wide)
        added = []
        for p, part in enumerate(columns):
            scale = work.scales[at.group, lax.div(at.column + p * stride, 128), i]
            added.append(sums[p] + mg.product(rows, part) * scale)
        plgpu.barrier_arrive(scratch.free.at[slot])
        return tuple(added)

    zeros = tuple(mg.wgmma_full((ROWS, tile.columns), 0.0) for _ in range(tile.parts))
    return lax.fori_loop(0, at.steps, step, zeros)
