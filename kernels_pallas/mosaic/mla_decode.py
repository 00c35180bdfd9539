"""MLA decode (absorbed) for Hopper: one pool of latents is key (all D columns) and value (its first
Dv); all heads share each page.

A block takes 64 query rows (heads x q_per_seq) of one sequence and one split of its keys. Two
warpgroups: each scores half of the keys of a tile, they exchange row maxima and weights through
shared memory, and each accumulates half of the value columns, so no product is computed twice. (The
layout of FlashMLA, DeepSeek 2025, in its simplest form.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from deepinfer_jax.kernels_pallas.arrays import (
    Attended,
    Keys,
    Lens,
    Queries,
    SeqIds,
    Sinks,
    Starts,
    Tables,
    Values,
)
from deepinfer_jax.kernels_pallas.mosaic import common as mg
from deepinfer_jax.kernels_pallas.mosaic.common import ROWS, Interpret
from deepinfer_jax.kernels_pallas.mosaic.paged_decode import merge_splits, split_count, to_f16

_TILE = 64  # keys per step, half of them per warpgroup
_HALF = _TILE // 2
# bytes of the 32 weights a warpgroup writes per row; both operands of a product need the same
_SWIZZLE = 64
_CHUNK = 64  # columns handled at a time where a whole row would not fit the registers


@dataclasses.dataclass(frozen=True)
class _Config:
    """What a kernel is compiled for.

    scale2: of base-2 scores. box: query rows per TMA copy. stages: tiles in the ring.
    """

    scale2: float
    splits: int
    box: int
    heads: int
    q_per_seq: int
    v_dim: int
    stages: int
    window: int | None
    fp8: bool
    interpret: bool


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of one block."""

    q_smem: jax.Ref  # [64, D]
    ring: jax.Ref  # [stages, tile, D]
    wide: jax.Ref | None  # [tile, D]: e4m3 latents widened to f16
    p_smem: jax.Ref  # [2 * 64, half a tile]: weights of either warpgroup
    row_smem: jax.Ref  # [2, 64]: row values that the warpgroups exchange
    q_ready: jax.Ref
    kv_ready: jax.Ref  # a ring slot is loaded
    meet: jax.Ref  # both warpgroups are here

    @staticmethod
    def types(c: _Config, pool: Keys) -> dict[str, object]:
        bs, d = pool.shape[1], pool.shape[3]
        operand = jnp.float16 if c.fp8 else jnp.bfloat16
        return {
            "q_smem": mg.matrix_smem((ROWS, d), operand, _SWIZZLE),
            "ring": mg.matrix_smem((c.stages, _TILE, d), pool.dtype, _SWIZZLE),
            "wide": mg.matrix_smem((_TILE, d), operand, _SWIZZLE) if c.fp8 else None,
            "p_smem": mg.matrix_smem((2 * ROWS, _HALF), operand, _SWIZZLE),
            "row_smem": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "kv_ready": plgpu.Barrier(num_arrivals=_TILE // bs, num_barriers=c.stages),
            "meet": plgpu.Barrier(num_arrivals=2),
        }


def unsupported_reason(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    *,
    scale: float,
    q_per_seq: int = 1,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> str | None:
    """Why this kernel cannot run these arguments; None if it can."""
    del block_tables, kv_lens, sliding_window, sinks, scale, q_per_seq
    if v_pool is not None:
        return "separate value pool"
    _, bs, kh, d = k_pool.shape
    if kh != 1:
        return f"{kh} kv heads, needs 1"
    if q.dtype != jnp.bfloat16 or k_pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return (
            f"queries in {q.dtype}, pool in {k_pool.dtype}; needs bfloat16 and bfloat16 or"
            " float8_e4m3fn"
        )
    if bs % 8 or _TILE % bs:
        return f"block size {bs}, needs 8, 16, 32 or 64"
    if d % _CHUNK or v_dim % (2 * _CHUNK) or d > 576 or v_dim > 512:
        return f"widths {d} / {v_dim}, needs multiples of {_CHUNK} / {2 * _CHUNK} up to 576 / 512"
    return None


def prefill_unsupported_reason(
    q: Queries,
    k_pool: Keys,
    v_pool: Values | None,
    block_tables: Tables,
    kv_lens: Lens,
    q_starts: Starts,
    seq_ids: SeqIds,
    *,
    scale: float,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> str | None:
    """Why this kernel cannot run these arguments; None if it can."""
    del q_starts, seq_ids, sliding_window, sinks
    return unsupported_reason(q, k_pool, v_pool, block_tables, kv_lens, scale=scale, v_dim=v_dim)


def mla_prefill_mosaic(
    q: Queries,
    k_pool: Keys,
    v_pool: None,
    block_tables: Tables,
    kv_lens: Lens,
    q_starts: Starts,
    seq_ids: SeqIds,
    *,
    scale: float,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
    interpret: Interpret = None,
) -> Attended:
    """Absorbed prefill: every row is a sequence of its own, one query long, that borrows its
    sequence's table.

    Worth its repeated page reads (from L2) where few rows meet a long cached prefix; models expand
    the latents otherwise.
    """
    s = block_tables.shape[0]
    seq = jnp.minimum(seq_ids, s - 1)
    position = kv_lens[seq] - q_starts[seq + 1] + jnp.arange(q.shape[0], dtype=jnp.int32)
    return mla_decode_mosaic(
        q,
        k_pool,
        v_pool,
        block_tables,
        jnp.where(seq_ids < s, position + 1, 0),
        scale=scale,
        v_dim=v_dim,
        sliding_window=sliding_window,
        sinks=sinks,
        table_rows=seq,
        splits=1,
        interpret=interpret,
    )


def mla_decode_mosaic(
    q: Queries,
    k_pool: Keys,
    v_pool: None,
    block_tables: Tables,
    kv_lens: Lens,
    *,
    scale: float,
    q_per_seq: int = 1,
    v_dim: int | None = None,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
    table_rows: Int32[Array, " S"] | None = None,
    interpret: Interpret = None,
    splits: int | None = None,
) -> Attended:
    """See `paged_decode`. table_rows: which row of block_tables each sequence has (None: its
    own)."""
    del v_pool
    s, p = kv_lens.size, block_tables.shape[1]
    if table_rows is None:
        table_rows = jnp.arange(s, dtype=jnp.int32)
    bs, d, h = k_pool.shape[1], k_pool.shape[3], q.shape[1]
    rows, tile_pages = h * q_per_seq, _TILE // bs
    padded = -(-rows // 8) * 8 if rows < ROWS else -(-rows // ROWS) * ROWS
    blocks = -(-padded // ROWS)
    if splits is None:
        splits = split_count(2 * s * blocks, -(-p // tile_pages))  # one block fills an SM
    config = _Config(
        scale2=scale * mg.LOG2E,
        splits=splits,
        box=min(padded, ROWS),
        heads=h,
        q_per_seq=q_per_seq,
        v_dim=v_dim,
        stages=2,  # with the queries, all that fits: 3 x 72 KiB
        window=sliding_window,
        fp8=k_pool.dtype == jnp.float8_e4m3fn,
        interpret=bool(interpret),
    )
    q_rows = jnp.pad(q.reshape(s, rows, d), ((0, 0), (0, padded - rows), (0, 0)))
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % tile_pages)))
    out, lse = plgpu.kernel(
        functools.partial(_body, config),
        out_type=(
            jax.ShapeDtypeStruct((s, splits, blocks * ROWS, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((s, splits, blocks * ROWS), jnp.float32),
        ),
        scratch_types=_Scratch.types(config, k_pool),
        grid=(blocks, splits, s),
        grid_names=("block", "split", "seq"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )(tables, table_rows, kv_lens, to_f16(q_rows) if config.fp8 else q_rows, k_pool)
    out, lse = out[:, None, :, :rows], lse[:, None, :, :rows]
    sink = None if sinks is None else jnp.tile(sinks.astype(jnp.float32), q_per_seq)[None]
    return merge_splits(out, lse, sink, q.dtype).reshape(s * q_per_seq, h, v_dim).astype(q.dtype)


def _body(
    c: _Config,
    tables: jax.Ref,
    table_rows: jax.Ref,
    lens: jax.Ref,
    q: jax.Ref,
    pool: jax.Ref,
    out: jax.Ref,
    lse_out: jax.Ref,
    **scratch: jax.Ref,
) -> None:
    own = _Scratch(**scratch)
    block, split, seq, wg = (lax.axis_index(name) for name in ("block", "split", "seq", "wg"))
    bs, half_v = pool.shape[1], c.v_dim // 2
    kv_len, table = lens[seq], table_rows[seq]
    begin = (
        0
        if c.window is None
        else lax.div(jnp.maximum(kv_len - c.q_per_seq - c.window + 1, 0), _TILE)
    )
    end = pl.cdiv(kv_len, _TILE)
    share = pl.cdiv(end - begin, c.splits)
    low = begin + split * share
    high = jnp.minimum(low + share, end)

    def fetch(j):
        slot = lax.rem(j - low, c.stages)
        for i in range(_TILE // bs):
            page = tables[table, j * (_TILE // bs) + i]
            plgpu.copy_gmem_to_smem(
                pool.at[page, :, 0], own.ring.at[slot, pl.ds(i * bs, bs)], own.kv_ready.at[slot]
            )

    @pl.when(wg == 0)
    def _start():
        plgpu.copy_gmem_to_smem(
            q.at[seq, pl.ds(block * ROWS, c.box)], own.q_smem.at[pl.ds(0, c.box)], own.q_ready
        )
        for i in range(c.stages - 1):
            pl.when(low + i < high)(functools.partial(fetch, low + i))

    plgpu.barrier_wait(own.q_ready)
    shape = (ROWS, _HALF)
    last_keys = (
        kv_len - c.q_per_seq + lax.div(mg.row_iota(ROWS) + block * ROWS, c.heads)
    )  # per row: a full tile would cost registers

    def exchange(mine, combine):
        """combine(this warpgroup's row values, the other's)."""
        own.row_smem.at[wg][...] = mine
        mg.meet(own.meet)
        other = plgpu.load(
            own.row_smem.at[1 - wg], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        return combine(mine, other)

    def step(j, carry):
        acc, top, total = carry
        slot = lax.rem(j - low, c.stages)
        plgpu.barrier_wait(own.kv_ready.at[slot])
        live = kv_len - j * _TILE
        latent = own.ring.at[slot]
        if own.wide is not None:
            _each_chunk(
                wg,
                latent,
                half_v,
                lambda chunk: mg.widen(latent.at[:, chunk], own.wide.at[:, chunk]),
            )
            latent = own.wide
            plgpu.commit_smem()
            mg.meet(own.meet)

        @pl.when(live < _TILE)
        def _last_tile():
            _each_chunk(
                wg, latent, half_v, lambda chunk: mg.zero_dead_rows(latent.at[:, chunk], live)
            )
            plgpu.commit_smem()
            mg.meet(own.meet)

        keys = latent.at[pl.ds(wg * _HALF, _HALF)]
        scores = mg.product(own.q_smem, keys.transpose((1, 0))) * c.scale2
        key = j * _TILE + wg * _HALF + mg.iota(shape, 1)
        last_key = mg.over_rows(last_keys, shape)
        visible = key <= last_key
        if c.window is not None:
            visible &= key > last_key - c.window
        scores = jnp.where(visible, scores, mg.NEVER)
        new_top = exchange(jnp.maximum(top, jnp.max(scores, axis=1)), jnp.maximum)

        # both warpgroups are past the previous tile: its buffer, and the weights, may be
        # overwritten
        @pl.when((wg == 0) & (j + c.stages - 1 < high))
        def _next():
            fetch(j + c.stages - 1)

        weights = jnp.exp2(scores - mg.over_rows(new_top, shape))
        keep = jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(weights, axis=1)
        own.p_smem.at[pl.ds(wg * ROWS, ROWS)][...] = weights.astype(own.p_smem.dtype)
        plgpu.commit_smem()
        mg.meet(own.meet)
        acc = acc * mg.over_rows(keep, acc.shape)
        for i in range(2):
            values = latent.at[pl.ds(i * _HALF, _HALF), pl.ds(wg * half_v, half_v)]
            acc = mg.add_product(acc, own.p_smem.at[pl.ds(i * ROWS, ROWS)], values, c.interpret)
        return acc, new_top, total

    init = mg.wgmma_full((ROWS, half_v), 0.0), mg.row_full(ROWS, mg.NEVER), mg.row_full(ROWS, 0.0)
    acc, top, total = lax.fori_loop(low, high, step, init)
    total = exchange(total, jnp.add)
    alive = top > mg.NEVER / 2
    inverse = jnp.where(alive, 1.0 / total, 0.0)
    acc = jnp.where(mg.over_rows(alive, acc.shape), acc * mg.over_rows(inverse, acc.shape), 0.0)
    rows = pl.ds(block * ROWS, ROWS)
    mg.store_gmem(out.at[seq, split, rows, pl.ds(wg * half_v, half_v)], acc)

    @pl.when(wg == 0)
    def _store_lse():
        mg.store_gmem(
            lse_out.at[seq, split, rows], jnp.where(alive, top + jnp.log2(total), mg.NEVER)
        )


def _each_chunk(
    wg: jax.Array, ref: jax.Ref, half_v: int, apply: Callable[[pl.Slice], None]
) -> None:
    """Call `apply` on column chunks of ref, each on the warpgroup that alone reads it in the value
    product.

    So a buffer may be rewritten for the next tile while the other warpgroup still multiplies with
    its own half.
    """
    first, last = half_v // _CHUNK, ref.shape[1] // _CHUNK
    low, high = jnp.where(wg == 0, 0, first), jnp.where(wg == 0, first, last)
    lax.fori_loop(low, high, lambda i, _: apply(pl.ds(i * _CHUNK, _CHUNK)), None)
