"""Paged decode attention for Hopper (wgmma): one block per (sequence, kv head, split of its keys).

The query heads that share a kv head, times q_per_seq, are the rows of one 64-row tile; pages come
by TMA through a ring of shared memory buffers; the splits of a sequence are merged afterwards
(flash decoding: Dao et al. 2023). Sinks enter after the kernel, through the log-sum-exp. NaN-safe:
dead rows of a last page are zeroed before they meet a zero weight.
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

_TILE = 64  # keys per step
_STAGES = 3
_BLOCKS_WANTED = 2 * 132  # two blocks per SM of an H200


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
    del block_tables, kv_lens, sliding_window, sinks, scale, v_dim
    if v_pool is None:
        return "keys and values in one pool"
    group = q.shape[1] // k_pool.shape[2]
    if group * q_per_seq > ROWS:
        return f"{group} heads per kv head x {q_per_seq} rows > {ROWS}"
    if q.dtype != jnp.bfloat16:
        return f"queries in {q.dtype}, needs bfloat16"
    return pool_unsupported_reason(k_pool) or pool_unsupported_reason(v_pool)


def pool_unsupported_reason(pool) -> str | None:
    _, bs, _, d = pool.shape
    if pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"pool in {pool.dtype}, needs bfloat16 or float8_e4m3fn"
    if bs % 8 or _TILE % bs:
        return f"block size {bs}, needs 8, 16, 32 or 64"
    if d % 64 or d > 256:
        return f"head width {d}, needs a multiple of 64 up to 256"
    return None


def split_count(blocks: int, tiles: int) -> int:
    """Splits of the keys that fill the device: enough blocks for every SM, at least 4 tiles per
    split at full length."""
    return max(1, min(_BLOCKS_WANTED // max(1, blocks), tiles // 4))


def paged_decode_mosaic(
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
    interpret=None,
    splits=None,
):
    del v_dim
    s, p = block_tables.shape
    _, bs, kh, d = k_pool.shape
    h, dv = q.shape[1], v_pool.shape[3]
    group = h // kh
    rows = group * q_per_seq
    padded = -(-rows // 8) * 8
    tile_pages = _TILE // bs
    if splits is None:
        splits = split_count(s * kh, -(-p // tile_pages))
    q_rows = q.reshape(s, q_per_seq, kh, group, d).transpose(0, 2, 1, 3, 4).reshape(s, kh, rows, d)
    q_rows = jnp.pad(q_rows, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    if k_pool.dtype == jnp.float8_e4m3fn:
        q_rows = to_f16(q_rows)  # e4m3 keys widen to f16 in one instruction and without loss
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % tile_pages)))
    body = functools.partial(
        _body,
        scale2=scale * mg.LOG2E,
        splits=splits,
        padded=padded,
        group=group,
        q_per_seq=q_per_seq,
        window=sliding_window,
        interpret=bool(interpret),
    )
    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(
                (s, kh, splits, padded, dv),
                jnp.float32 if splits > 1 or sinks is not None else q.dtype,
            ),
            jax.ShapeDtypeStruct((s, kh, splits, ROWS), jnp.float32),
        ),
        scratch_types=_scratch(
            d, dv, k_pool.dtype, bs, padded, splits > 1 or sinks is not None, bool(interpret)
        ),
        grid=(splits, kh, s),
        grid_names=("split", "kv_head", "seq"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(tables, kv_lens, q_rows, k_pool, v_pool)
    out = merge_splits(
        out,
        lse[..., :padded],
        None if sinks is None else _sink_rows(sinks, kh, q_per_seq, padded),
        q.dtype,
    )
    return (
        out[:, :, :rows]
        .reshape(s, kh, q_per_seq, group, dv)
        .transpose(0, 2, 1, 3, 4)
        .reshape(s * q_per_seq, h, dv)
    )


def to_f16(q):
    return jnp.clip(q, -65504, 65504).astype(jnp.float16)


def _sink_rows(sinks, kh, q_per_seq, padded):
    rows = jnp.tile(sinks.astype(jnp.float32).reshape(kh, -1), (1, q_per_seq))
    return jnp.pad(rows, ((0, 0), (0, padded - rows.shape[1])))


def merge_splits(out, lse, sink, dtype):
    """Weigh the splits' results `[S, KH, splits, R, Dv]` by their base-2 log-sum-exp; sink: `[KH,
    R]` natural logits or None."""
    if out.shape[2] == 1 and sink is None:
        return out[:, :, 0]
    top = jnp.max(lse, axis=2, keepdims=True)
    if sink is not None:
        top = jnp.maximum(top, sink[None, :, None] * mg.LOG2E)
    weights = jnp.exp2(lse - top)  # an empty split has lse NEVER and a result of zeros
    total = jnp.sum(weights, axis=2, keepdims=True)
    if sink is not None:
        total += jnp.exp2(sink[None, :, None] * mg.LOG2E - top)
    return jnp.sum(out * (weights / total)[..., None], axis=2).astype(dtype)


def _scratch(d, dv, cache_dtype, bs, padded, wide_out, interpret):
    fp8 = cache_dtype == jnp.float8_e4m3fn
    ring = lambda width: mg.matrix_smem((_STAGES, _TILE, width), cache_dtype)  # noqa: E731
    wide = lambda width: mg.matrix_smem((_TILE, width), jnp.float16) if fp8 else None  # noqa: E731
    operand = jnp.float16 if fp8 else jnp.bfloat16
    return {
        "q_smem": mg.matrix_smem((ROWS, d), operand),
        "k_ring": ring(d),
        "v_ring": ring(dv),
        "k_wide": wide(d),
        "v_wide": wide(dv),
        "p_smem": mg.matrix_smem((ROWS, _TILE), operand) if interpret else None,
        "o_smem": plgpu.SMEM((ROWS, dv), jnp.float32 if wide_out else jnp.bfloat16),
        "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "kv_ready": plgpu.Barrier(num_arrivals=2 * _TILE // bs, num_barriers=_STAGES),
    }


def _body(
    tables,
    lens,
    q,
    k_pool,
    v_pool,
    out,
    lse_out,
    *,
    scale2,
    splits,
    padded,
    group,
    q_per_seq,
    window,
    interpret,
    **scratch,
):
    split, kv_head, seq = (lax.axis_index(name) for name in ("split", "kv_head", "seq"))
    q_smem, k_ring, v_ring, o_smem, lse_smem = (
        scratch[n] for n in ("q_smem", "k_ring", "v_ring", "o_smem", "lse_smem")
    )
    kv_ready, bs = scratch["kv_ready"], k_pool.shape[1]
    kv_len = lens[seq]
    begin = 0 if window is None else lax.div(jnp.maximum(kv_len - q_per_seq - window + 1, 0), _TILE)
    end = pl.cdiv(kv_len, _TILE)
    share = pl.cdiv(end - begin, splits)
    low = begin + split * share
    high = jnp.minimum(low + share, end)

    def fetch(j):
        slot = lax.rem(j - low, _STAGES)
        for i in range(_TILE // bs):
            page, rows = tables[seq, j * (_TILE // bs) + i], pl.ds(i * bs, bs)
            plgpu.copy_gmem_to_smem(
                k_pool.at[page, :, kv_head], k_ring.at[slot, rows], kv_ready.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                v_pool.at[page, :, kv_head], v_ring.at[slot, rows], kv_ready.at[slot]
            )

    plgpu.copy_gmem_to_smem(q.at[seq, kv_head], q_smem.at[pl.ds(0, padded)], scratch["q_ready"])
    for i in range(_STAGES - 1):
        pl.when(low + i < high)(functools.partial(fetch, low + i))
    plgpu.barrier_wait(scratch["q_ready"])
    shape = (ROWS, _TILE)
    last_keys = kv_len - q_per_seq + lax.div(mg.row_iota(ROWS), group)

    def step(j, carry):
        acc, top, total = carry
        pl.when(j + _STAGES - 1 < high)(functools.partial(fetch, j + _STAGES - 1))
        slot = lax.rem(j - low, _STAGES)
        plgpu.barrier_wait(kv_ready.at[slot])
        k, v = _operands(k_ring.at[slot], v_ring.at[slot], scratch["k_wide"], scratch["v_wide"])
        partial_tile = kv_len - j * _TILE
        pl.when(partial_tile < _TILE)(
            lambda: (mg.zero_dead_rows(v, partial_tile), plgpu.commit_smem())[0]
        )
        scores = mg.product(q_smem, k.transpose((1, 0))) * scale2
        key = j * _TILE + mg.iota(shape, 1)
        last_key = mg.over_rows(last_keys, shape)
        visible = key <= last_key
        if window is not None:
            visible &= key > last_key - window
        scores = jnp.where(visible, scores, mg.NEVER)
        weights, keep, top, total = mg.online_softmax(scores, top, total)
        acc = mg.add_weighted(
            acc * mg.over_rows(keep, acc.shape), weights, v, scratch["p_smem"], interpret
        )
        return acc, top, total

    init = (
        mg.wgmma_full((ROWS, v_ring.shape[2]), 0.0),
        mg.row_full(ROWS, mg.NEVER),
        mg.row_full(ROWS, 0.0),
    )
    acc, top, total = lax.fori_loop(low, high, step, init)
    alive = top > mg.NEVER / 2
    inverse = jnp.where(alive, 1.0 / total, 0.0)
    o_smem[...] = jnp.where(
        mg.over_rows(alive, acc.shape), acc * mg.over_rows(inverse, acc.shape), 0.0
    ).astype(o_smem.dtype)
    lse_smem[...] = jnp.where(alive, top + jnp.log2(total), mg.NEVER)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, padded)], out.at[seq, kv_head, split])
    plgpu.copy_smem_to_gmem(lse_smem, lse_out.at[seq, kv_head, split])
    plgpu.wait_smem_to_gmem(0)


def _operands(k8, v8, k_wide, v_wide):
    """The tile as wgmma takes it: where it lies, or widened from e4m3 into its own buffers."""
    if k_wide is None:
        return k8, v8
    mg.widen(k8, k_wide)
    mg.widen(v8, v_wide)
    plgpu.commit_smem()
    return k_wide, v_wide
