"""MLA decode (absorbed) for Hopper: one pool of latents is key (all D columns) and value (its first
Dv); all heads share each page.

A block takes 64 query rows (heads x q_per_seq) of one sequence and one split of its keys. Two
warpgroups: each scores half of the keys of a tile, they exchange row maxima and weights through
shared memory, and each accumulates half of the value columns, so no product is computed twice. (The
layout of FlashMLA, DeepSeek 2025, in its simplest form.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels_pallas.mosaic import common as mg
from deepinfer_jax.kernels_pallas.mosaic.common import ROWS
from deepinfer_jax.kernels_pallas.mosaic.paged_decode import merge_splits, split_count, to_f16

_TILE = 64  # keys per step, half of them per warpgroup
_HALF = _TILE // 2
# bytes of the 32 weights a warpgroup writes per row; both operands of a product need the same
_SWIZZLE = 64
_CHUNK = 64  # columns handled at a time where a whole row would not fit the registers


def unsupported_reason(
    q,
    k_pool,
    v_pool,
    block_tables,
    kv_lens,
    *,
    q_per_seq=1,
    v_dim=None,
    sliding_window=None,
    sinks=None,
    scale=None,
):
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
    q, k_pool, v_pool, block_tables, kv_lens, q_starts, seq_ids, **options
):
    del q_starts, seq_ids
    return unsupported_reason(q, k_pool, v_pool, block_tables, kv_lens, **options)


def mla_prefill_mosaic(q, k_pool, v_pool, block_tables, kv_lens, q_starts, seq_ids, **options):
    """Absorbed prefill: every row is a sequence of its own, one query long, that borrows its
    sequence's table.

    Worth its repeated page reads (from L2) where few rows meet a long cached prefix; models expand
    the latents otherwise.
    """
    s = block_tables.shape[0]
    seq = jnp.minimum(seq_ids, s - 1)
    position = kv_lens[seq] - q_starts[seq + 1] + jnp.arange(q.shape[0], dtype=jnp.int32)
    lens = jnp.where(seq_ids < s, position + 1, 0)
    return mla_decode_mosaic(
        q, k_pool, v_pool, block_tables, lens, table_rows=seq, splits=1, **options
    )


def mla_decode_mosaic(
    q,
    k_pool,
    v_pool,
    block_tables,
    kv_lens,
    *,
    scale,
    q_per_seq=1,
    v_dim=None,
    sliding_window=None,
    sinks=None,
    table_rows=None,
    interpret=None,
    splits=None,
):
    """table_rows: i32 `[S]`, which row of block_tables each sequence has (default: its own)."""
    del v_pool
    s, p = kv_lens.size, block_tables.shape[1]
    if table_rows is None:
        table_rows = jnp.arange(s, dtype=jnp.int32)
    bs, d, h = k_pool.shape[1], k_pool.shape[3], q.shape[1]
    rows = h * q_per_seq
    padded = -(-rows // 8) * 8 if rows < ROWS else -(-rows // ROWS) * ROWS
    blocks, box = -(-padded // ROWS), min(padded, ROWS)
    fp8 = k_pool.dtype == jnp.float8_e4m3fn
    stages = 2  # with the queries, all that fits: 3 x 72 KiB
    tile_pages = _TILE // bs
    if splits is None:
        splits = split_count(2 * s * blocks, -(-p // tile_pages))  # one block fills an SM
    q_rows = jnp.pad(q.reshape(s, rows, d), ((0, 0), (0, padded - rows), (0, 0)))
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % tile_pages)))
    operand = jnp.float16 if fp8 else jnp.bfloat16
    body = functools.partial(
        _body,
        scale2=scale * mg.LOG2E,
        splits=splits,
        box=box,
        heads=h,
        q_per_seq=q_per_seq,
        v_dim=v_dim,
        stages=stages,
        window=sliding_window,
        interpret=bool(interpret),
    )
    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s, splits, blocks * ROWS, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((s, splits, blocks * ROWS), jnp.float32),
        ),
        scratch_types={
            "q_smem": mg.matrix_smem((ROWS, d), operand, _SWIZZLE),
            "ring": mg.matrix_smem((stages, _TILE, d), k_pool.dtype, _SWIZZLE),
            "wide": mg.matrix_smem((_TILE, d), operand, _SWIZZLE) if fp8 else None,
            "p_smem": mg.matrix_smem((2 * ROWS, _HALF), operand, _SWIZZLE),
            "row_smem": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "kv_ready": plgpu.Barrier(num_arrivals=_TILE // bs, num_barriers=stages),
            "meet": plgpu.Barrier(num_arrivals=2),
        },
        grid=(blocks, splits, s),
        grid_names=("block", "split", "seq"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )(tables, table_rows, kv_lens, to_f16(q_rows) if fp8 else q_rows, k_pool)
    out, lse = out[:, None, :, :rows], lse[:, None, :, :rows]
    sink = None if sinks is None else jnp.tile(sinks.astype(jnp.float32), q_per_seq)[None]
    return merge_splits(out, lse, sink, q.dtype).reshape(s * q_per_seq, h, v_dim).astype(q.dtype)


def _body(
    tables,
    table_rows,
    lens,
    q,
    pool,
    out,
    lse_out,
    *,
    scale2,
    splits,
    box,
    heads,
    q_per_seq,
    v_dim,
    stages,
    window,
    interpret,
    q_smem,
    ring,
    wide,
    p_smem,
    row_smem,
    q_ready,
    kv_ready,
    meet,
):
    block, split, seq, wg = (lax.axis_index(name) for name in ("block", "split", "seq", "wg"))
    bs, half_v = pool.shape[1], v_dim // 2
    kv_len, table = lens[seq], table_rows[seq]
    begin = 0 if window is None else lax.div(jnp.maximum(kv_len - q_per_seq - window + 1, 0), _TILE)
    end = pl.cdiv(kv_len, _TILE)
    share = pl.cdiv(end - begin, splits)
    low = begin + split * share
    high = jnp.minimum(low + share, end)

    def fetch(j):
        slot = lax.rem(j - low, stages)
        for i in range(_TILE // bs):
            page = tables[table, j * (_TILE // bs) + i]
            plgpu.copy_gmem_to_smem(
                pool.at[page, :, 0], ring.at[slot, pl.ds(i * bs, bs)], kv_ready.at[slot]
            )

    @pl.when(wg == 0)
    def _start():
        plgpu.copy_gmem_to_smem(
            q.at[seq, pl.ds(block * ROWS, box)], q_smem.at[pl.ds(0, box)], q_ready
        )
        for i in range(stages - 1):
            pl.when(low + i < high)(functools.partial(fetch, low + i))

    plgpu.barrier_wait(q_ready)
    shape = (ROWS, _HALF)
    last_keys = (
        kv_len - q_per_seq + lax.div(mg.row_iota(ROWS) + block * ROWS, heads)
    )  # per row: a full tile would cost registers

    def exchange(mine, combine):
        """combine(this warpgroup's row values, the other's)."""
        row_smem.at[wg][...] = mine
        mg.meet(meet)
        other = plgpu.load(
            row_smem.at[1 - wg], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        return combine(mine, other)

    def step(j, carry):
        acc, top, total = carry
        slot = lax.rem(j - low, stages)
        plgpu.barrier_wait(kv_ready.at[slot])
        live = kv_len - j * _TILE
        latent = ring.at[slot]
        if wide is not None:
            _each_chunk(
                wg, latent, half_v, lambda chunk: mg.widen(latent.at[:, chunk], wide.at[:, chunk])
            )
            latent = wide
            plgpu.commit_smem()
            mg.meet(meet)

        @pl.when(live < _TILE)
        def _last_tile():
            _each_chunk(
                wg, latent, half_v, lambda chunk: mg.zero_dead_rows(latent.at[:, chunk], live)
            )
            plgpu.commit_smem()
            mg.meet(meet)

        keys = latent.at[pl.ds(wg * _HALF, _HALF)]
        scores = mg.product(q_smem, keys.transpose((1, 0))) * scale2
        key = j * _TILE + wg * _HALF + mg.iota(shape, 1)
        last_key = mg.over_rows(last_keys, shape)
        visible = key <= last_key
        if window is not None:
            visible &= key > last_key - window
        scores = jnp.where(visible, scores, mg.NEVER)
        new_top = exchange(jnp.maximum(top, jnp.max(scores, axis=1)), jnp.maximum)

        # both warpgroups are past the previous tile: its buffer, and the weights, may be
        # overwritten
        @pl.when((wg == 0) & (j + stages - 1 < high))
        def _next():
            fetch(j + stages - 1)

        weights = jnp.exp2(scores - mg.over_rows(new_top, shape))
        keep = jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(weights, axis=1)
        p_smem.at[pl.ds(wg * ROWS, ROWS)][...] = weights.astype(p_smem.dtype)
        plgpu.commit_smem()
        mg.meet(meet)
        acc = acc * mg.over_rows(keep, acc.shape)
        for i in range(2):
            values = latent.at[pl.ds(i * _HALF, _HALF), pl.ds(wg * half_v, half_v)]
            acc = mg.add_product(acc, p_smem.at[pl.ds(i * ROWS, ROWS)], values, interpret)
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


def _each_chunk(wg, ref, half_v: int, apply) -> None:
    """Call `apply` on column chunks of ref, each on the warpgroup that alone reads it in the value
    product.

    So a buffer may be rewritten for the next tile while the other warpgroup still multiplies with
    its own half.
    """
    first, last = half_v // _CHUNK, ref.shape[1] // _CHUNK
    low, high = jnp.where(wg == 0, 0, first), jnp.where(wg == 0, first, last)
    lax.fori_loop(low, high, lambda i, _: apply(pl.ds(i * _CHUNK, _CHUNK)), None)
