"""Ragged prefill attention for Hopper (wgmma): one block per (128 rows of one sequence, query
head).

A third warpgroup streams pages through a ring of shared-memory buffers by TMA; two warpgroups take
64 rows each and run the online softmax (FlashAttention-3, Shah et al. 2024, without its ping-pong
scheduling). Blocks never write rows of a neighbour: the last rows of a sequence go out in
power-of-two pieces. Values may be narrower than keys (MLA expanded: 192 / 128).
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
from deepinfer_jax.kernels_pallas.mosaic.paged_decode import to_f16

_BLOCK = 2 * ROWS
_STAGES = 2
_CHUNK = 64


def unsupported_reason(
    q,
    k_pool,
    v_pool,
    block_tables,
    kv_lens,
    q_starts,
    seq_ids,
    *,
    v_dim=None,
    sliding_window=None,
    sinks=None,
    scale=None,
):
    """Why this kernel cannot run these arguments; None if it can."""
    del block_tables, kv_lens, q_starts, seq_ids, v_dim, sliding_window, sinks, scale
    if v_pool is None:
        return "keys and values in one pool"
    if q.dtype != jnp.bfloat16:
        return f"queries in {q.dtype}, needs bfloat16"
    (_, bs, _, d), dv = k_pool.shape, v_pool.shape[3]
    if k_pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or v_pool.dtype != k_pool.dtype:
        return f"pools in {k_pool.dtype} and {v_pool.dtype}, needs bfloat16 or float8_e4m3fn"
    if bs % 8 or 64 % bs:
        return f"block size {bs}, needs 8, 16, 32 or 64"
    if d % _CHUNK or dv % _CHUNK or d > 192 or dv > 128:
        return f"widths {d} / {dv}, needs multiples of {_CHUNK} up to 192 / 128"
    return None


def ragged_prefill_mosaic(
    q,
    k_pool,
    v_pool,
    block_tables,
    kv_lens,
    q_starts,
    seq_ids,
    *,
    scale,
    v_dim=None,
    sliding_window=None,
    sinks=None,
    interpret=None,
):
    del v_dim
    t, h, d = q.shape
    s, p = block_tables.shape
    bs, kh, dv = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    fp8 = k_pool.dtype == jnp.float8_e4m3fn
    tile = 128 if d <= 128 else 64
    items = work_items(kv_lens, q_starts, t)
    rows = max(t, ROWS)  # a TMA box may not exceed the array
    q = jnp.pad(q, ((0, rows - t), (0, 0), (0, 0)))
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % (tile // bs))))
    operand = jnp.float16 if fp8 else jnp.bfloat16
    ring_swizzle = _CHUNK * k_pool.dtype.itemsize  # one chunk of columns
    body = functools.partial(
        _body,
        scale2=scale * mg.LOG2E,
        tile=tile,
        group=h // kh,
        window=sliding_window,
        with_sinks=sinks is not None,
        interpret=bool(interpret),
    )
    wide = lambda width: mg.matrix_smem((tile, width), operand) if fp8 else None  # noqa: E731
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, h, dv), q.dtype),
        scratch_types={
            "q_smem": mg.matrix_smem((2, ROWS, d), operand),
            "k_ring": mg.matrix_smem((_STAGES, tile, d), k_pool.dtype, ring_swizzle),
            "v_ring": mg.matrix_smem((_STAGES, tile, dv), k_pool.dtype, ring_swizzle),
            "k_wide": wide(d),
            "v_wide": wide(dv),
            "p_smem": mg.matrix_smem((2, ROWS, tile), operand) if interpret else None,
            "o_smem": plgpu.SMEM((2, ROWS, dv), q.dtype),
            "q_ready": plgpu.Barrier(num_barriers=2),
            "kv_ready": plgpu.Barrier(num_arrivals=2 * tile // bs, num_barriers=_STAGES),
            "kv_free": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            "meet": plgpu.Barrier(num_arrivals=2),
        },
        grid=(h, items.shape[0]),
        grid_names=("head", "item"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        items,
        tables,
        kv_lens,
        jnp.zeros(h, jnp.float32) if sinks is None else sinks,
        to_f16(q) if fp8 else q,
        k_pool,
        v_pool,
    )
    return jnp.where((seq_ids < s)[:, None, None], out[:t], 0)


def work_items(kv_lens: jax.Array, q_starts: jax.Array, rows: int) -> jax.Array:
    """`row_blocks` of the sequences, with the position of each block's row 0 as a fifth column."""
    items, _ = mg.row_blocks(q_starts, rows, _BLOCK)
    seq, base = items[:, 0], items[:, 1]
    return jnp.concatenate(
        [items, (kv_lens[seq] - (q_starts[seq + 1] - base)).astype(jnp.int32)[:, None]], axis=1
    )


def _body(
    items,
    tables,
    lens,
    sinks,
    q,
    k_pool,
    v_pool,
    out,
    *,
    scale2,
    tile,
    group,
    window,
    with_sinks,
    interpret,
    **scratch,
):
    head, item, wg = (lax.axis_index(name) for name in ("head", "item", "wg"))
    seq, base, low, high, position = (items[item, i] for i in range(5))
    base = pl.multiple_of(base, mg.ALIGN)
    kv_len = lens[seq]
    begin = 0 if window is None else lax.div(jnp.maximum(position + low - window + 1, 0), tile)
    end = pl.cdiv(jnp.maximum(position + high, 0), tile)
    ring = (scratch["k_ring"], scratch["v_ring"], scratch["kv_ready"], scratch["kv_free"])

    @pl.when((high > low) & (wg == 2))
    def _stream():
        plgpu.set_max_registers(40, action="decrease")
        _stream_pages(tables, k_pool, v_pool, ring, seq, lax.div(head, group), begin, end, tile)

    @pl.when((high > low) & (wg < 2))
    def _attend():
        plgpu.set_max_registers(232, action="increase")
        q_smem = scratch["q_smem"].at[wg]
        q_ready = scratch["q_ready"].at[wg]
        plgpu.copy_gmem_to_smem(q.at[pl.ds(base + wg * ROWS, ROWS), head], q_smem, q_ready)
        plgpu.barrier_wait(q_ready)
        first = position + wg * ROWS
        top = jnp.full((), mg.NEVER, jnp.float32) if not with_sinks else sinks[head] * mg.LOG2E
        top = plgpu.layout_cast(
            lax.broadcast_in_dim(top, (ROWS,), []), plgpu.Layout.WGMMA.reduce(1)
        )
        acc = mg.wgmma_full((ROWS, scratch["v_ring"].shape[2]), 0.0)
        carry = acc, top, mg.row_full(ROWS, 1.0 if with_sinks else 0.0)
        options = {
            "q_smem": q_smem,
            "position": first,
            "kv_len": kv_len,
            "begin": begin,
            "scale2": scale2,
            "window": window,
            "tile": tile,
            "wg": wg,
            "interpret": interpret,
            "scratch": scratch,
        }
        full = (
            begin
            if window is not None
            else jnp.clip(lax.div(jnp.minimum(first + 1, kv_len), tile), begin, end)
        )  # whole for every row
        carry = lax.fori_loop(begin, full, functools.partial(_step, masked=False, **options), carry)
        acc, top, total = lax.fori_loop(
            full, end, functools.partial(_step, masked=True, **options), carry
        )
        alive = top > mg.NEVER / 2
        inverse = jnp.where(alive, 1.0 / total, 0.0)
        o_smem = scratch["o_smem"].at[wg]
        o_smem[...] = jnp.where(
            mg.over_rows(alive, acc.shape), acc * mg.over_rows(inverse, acc.shape), 0.0
        ).astype(o_smem.dtype)
        plgpu.commit_smem()
        skip = jnp.clip(low - wg * ROWS, 0, ROWS)
        count = jnp.clip(high - wg * ROWS, 0, ROWS) - skip
        mg.store_rows(o_smem, skip, lambda rows: out.at[rows, head], base + wg * ROWS + skip, count)


def _stream_pages(tables, k_pool, v_pool, ring, seq, kv_head, begin, end, tile):
    k_ring, v_ring, kv_ready, kv_free = ring
    bs = k_pool.shape[1]

    def fetch(j, _):
        slot = lax.rem(j - begin, _STAGES)
        pl.when(j - begin >= _STAGES)(lambda: plgpu.barrier_wait(kv_free.at[slot]))
        for i in range(tile // bs):
            page, rows = tables[seq, j * (tile // bs) + i], pl.ds(i * bs, bs)
            plgpu.copy_gmem_to_smem(
                k_pool.at[page, :, kv_head], k_ring.at[slot, rows], kv_ready.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                v_pool.at[page, :, kv_head], v_ring.at[slot, rows], kv_ready.at[slot]
            )

    lax.fori_loop(begin, end, fetch, None)
    mg.drain(kv_free, _STAGES, end - begin)


def _step(
    j,
    carry,
    *,
    masked,
    q_smem,
    position,
    kv_len,
    begin,
    scale2,
    window,
    tile,
    wg,
    interpret,
    scratch,
):
    acc, top, total = carry
    slot = lax.rem(j - begin, _STAGES)
    plgpu.barrier_wait(scratch["kv_ready"].at[slot])
    k, v = scratch["k_ring"].at[slot], scratch["v_ring"].at[slot]
    if scratch["k_wide"] is not None:
        mg.meet(scratch["meet"])  # the other warpgroup still multiplies with the last tile
        for narrow, wide in ((k, scratch["k_wide"]), (v, scratch["v_wide"])):
            _each_chunk(
                wg,
                narrow,
                lambda c, narrow=narrow, wide=wide: mg.widen(narrow.at[:, c], wide.at[:, c]),
            )
        plgpu.commit_smem()
        mg.meet(scratch["meet"])
        k, v = scratch["k_wide"], scratch["v_wide"]
    if masked:
        live = kv_len - j * tile

        @pl.when(live < tile)
        def _last_tile():
            _each_chunk(wg, v, lambda c: mg.zero_dead_rows(v.at[:, c], live))
            plgpu.commit_smem()
            mg.meet(scratch["meet"])

    scores = mg.product(q_smem, k.transpose((1, 0))) * scale2
    if masked:
        last_key = position + mg.iota(scores.shape, 0)
        key = j * tile + mg.iota(scores.shape, 1)
        visible = key <= jnp.minimum(last_key, kv_len - 1)
        if window is not None:
            visible &= key > last_key - window
        scores = jnp.where(visible, scores, mg.NEVER)
    weights, keep, top, total = mg.online_softmax(scores, top, total)
    p_smem = scratch["p_smem"].at[wg] if interpret else None
    acc = mg.add_weighted(acc * mg.over_rows(keep, acc.shape), weights, v, p_smem, interpret)
    plgpu.barrier_arrive(scratch["kv_free"].at[slot])
    return acc, top, total


def _each_chunk(wg, ref, apply) -> None:
    """Call `apply` on 64-column chunks of ref, the two warpgroups taking turns."""
    for i in range(ref.shape[1] // _CHUNK):
        pl.when(wg == i % 2)(functools.partial(apply, pl.ds(i * _CHUNK, _CHUNK)))
