"""Paged decode attention for Hopper (wgmma): one block per (sequence, kv head, split of its keys).

The query heads that share a kv head, times q_per_seq, are the rows of one 64-row tile; pages come
by TMA through a ring of shared memory buffers; the splits of a sequence are merged afterwards
(flash decoding: Dao et al. 2023). Sinks enter after the kernel, through the log-sum-exp. NaN-safe:
dead rows of a last page are zeroed before they meet a zero weight.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas.arrays import Attended, Keys, Lens, Queries, Sinks, Tables, Values
from deepinfer_jax.kernels_pallas.mosaic import common as mg
from deepinfer_jax.kernels_pallas.mosaic.common import ROWS, Interpret

_TILE = 64  # keys per step
_STAGES = 3
_BLOCKS_PER_CORE = 2


@dataclasses.dataclass(frozen=True)
class _Config:
    """What a kernel is compiled for.

    scale2: of base-2 scores. group: query heads per kv head. padded: their rows, q_per_seq each,
    rounded up to whole tiles of shared memory. merged: whether the splits' results are merged
    afterwards, so that they leave in float32.
    """

    scale2: float
    splits: int
    group: int
    q_per_seq: int
    padded: int
    window: int | None
    fp8: bool
    merged: bool
    interpret: bool


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of one block."""

    q_smem: jax.Ref  # [64, D]
    k_ring: jax.Ref  # [stages, tile, D]
    v_ring: jax.Ref  # [stages, tile, Dv]
    k_wide: jax.Ref | None  # [tile, D]: e4m3 keys widened to f16
    v_wide: jax.Ref | None  # [tile, Dv]
    p_smem: jax.Ref | None  # [64, tile]: weights, for the interpreter
    o_smem: jax.Ref  # [64, Dv]
    lse_smem: jax.Ref  # [64]
    q_ready: jax.Ref
    kv_ready: jax.Ref  # a ring slot is loaded

    @staticmethod
    def types(c: _Config, k_pool: Keys, v_pool: Values) -> dict[str, object]:
        (_, bs, _, d), dv = k_pool.shape, v_pool.shape[3]
        operand = jnp.float16 if c.fp8 else jnp.bfloat16

        def ring(width: int) -> object:
            return mg.matrix_smem((_STAGES, _TILE, width), k_pool.dtype)

        def wide(width: int) -> object:
            return mg.matrix_smem((_TILE, width), operand) if c.fp8 else None

        return {
            "q_smem": mg.matrix_smem((ROWS, d), operand),
            "k_ring": ring(d),
            "v_ring": ring(dv),
            "k_wide": wide(d),
            "v_wide": wide(dv),
            "p_smem": mg.matrix_smem((ROWS, _TILE), operand) if c.interpret else None,
            "o_smem": plgpu.SMEM((ROWS, dv), jnp.float32 if c.merged else jnp.bfloat16),
            "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "kv_ready": plgpu.Barrier(num_arrivals=2 * _TILE // bs, num_barriers=_STAGES),
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
    del block_tables, kv_lens, sliding_window, sinks, scale, v_dim
    if v_pool is None:
        return "keys and values in one pool"
    group = q.shape[1] // k_pool.shape[2]
    if group * q_per_seq > ROWS:
        return f"{group} heads per kv head x {q_per_seq} rows > {ROWS}"
    if q.dtype != jnp.bfloat16:
        return f"queries in {q.dtype}, needs bfloat16"
    return pool_unsupported_reason(k_pool) or pool_unsupported_reason(v_pool)


def pool_unsupported_reason(pool: Keys | Values) -> str | None:
    """Why this kernel cannot read such a pool; None if it can."""
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
    return max(1, min(_BLOCKS_PER_CORE * mg.cores() // max(1, blocks), tiles // 4))


def paged_decode_mosaic(
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
    interpret: Interpret = None,
    splits: int | None = None,
) -> Attended:
    """See `paged_decode`. splits: into how many parts each sequence's keys are cut (None: as fills
    the device)."""
    del v_dim
    s, p = block_tables.shape
    bs, kh = k_pool.shape[1:3]
    h, dv = q.shape[1], v_pool.shape[3]
    rows = h // kh * q_per_seq
    tile_pages = _TILE // bs
    if splits is None:
        splits = split_count(s * kh, -(-p // tile_pages))
    config = _Config(
        scale2=scale * mg.LOG2E,
        splits=splits,
        group=h // kh,
        q_per_seq=q_per_seq,
        padded=-(-rows // 8) * 8,
        window=sliding_window,
        fp8=k_pool.dtype == jnp.float8_e4m3fn,
        merged=splits > 1 or sinks is not None,
        interpret=bool(interpret),
    )
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % tile_pages)))
    out_dtype = jnp.float32 if config.merged else q.dtype
    out, lse = plgpu.kernel(
        functools.partial(_body, config),
        out_type=(
            jax.ShapeDtypeStruct((s, kh, splits, config.padded, dv), out_dtype),
            jax.ShapeDtypeStruct((s, kh, splits, ROWS), jnp.float32),
        ),
        scratch_types=_Scratch.types(config, k_pool, v_pool),
        grid=(splits, kh, s),
        grid_names=("split", "kv_head", "seq"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(tables, kv_lens, _query_rows(config, q, s), k_pool, v_pool)
    sink = None if sinks is None else _sink_rows(sinks, kh, q_per_seq, config.padded)
    out = merge_splits(out, lse[..., : config.padded], sink, q.dtype)
    return (
        out[:, :, :rows]
        .reshape(s, kh, q_per_seq, h // kh, dv)
        .transpose(0, 2, 1, 3, 4)
        .reshape(s * q_per_seq, h, dv)
    )


def _query_rows(c: _Config, q: Queries, sequences: int) -> Float[Array, "S KH padded D"]:
    """The query rows that share a kv head, side by side."""
    _, h, d = q.shape
    rows = q.reshape(sequences, c.q_per_seq, h // c.group, c.group, d).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(sequences, h // c.group, c.group * c.q_per_seq, d)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, c.padded - rows.shape[2]), (0, 0)))
    # e4m3 keys widen to f16 in one instruction and without loss
    return to_f16(rows) if c.fp8 else rows


def to_f16(q: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """To f16, saturating."""
    return jnp.clip(q, -65504, 65504).astype(jnp.float16)


def _sink_rows(sinks: Sinks, kh: int, q_per_seq: int, padded: int) -> Float[Array, "KH padded"]:
    rows = jnp.tile(sinks.astype(jnp.float32).reshape(kh, -1), (1, q_per_seq))
    return jnp.pad(rows, ((0, 0), (0, padded - rows.shape[1])))


def merge_splits(
    out: Float[Array, "S KH splits R Dv"],
    lse: Float[Array, "S KH splits R"],
    sink: Float[Array, "KH R"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "S KH R Dv"]:
    """Weigh the splits' results by their base-2 log-sum-exp; sink: natural logits."""
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


def _body(
    c: _Config,
    tables: jax.Ref,
    lens: jax.Ref,
    q: jax.Ref,
    k_pool: jax.Ref,
    v_pool: jax.Ref,
    out: jax.Ref,
    lse_out: jax.Ref,
    **scratch: jax.Ref,
) -> None:
    own = _Scratch(**scratch)
    split, kv_head, seq = (lax.axis_index(name) for name in ("split", "kv_head", "seq"))
    kv_ready, bs = own.kv_ready, k_pool.shape[1]
    kv_len = lens[seq]
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
        slot = lax.rem(j - low, _STAGES)
        for i in range(_TILE // bs):
            page, rows = tables[seq, j * (_TILE // bs) + i], pl.ds(i * bs, bs)
            plgpu.copy_gmem_to_smem(
                k_pool.at[page, :, kv_head], own.k_ring.at[slot, rows], kv_ready.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                v_pool.at[page, :, kv_head], own.v_ring.at[slot, rows], kv_ready.at[slot]
            )

    plgpu.copy_gmem_to_smem(q.at[seq, kv_head], own.q_smem.at[pl.ds(0, c.padded)], own.q_ready)
    for i in range(_STAGES - 1):
        pl.when(low + i < high)(functools.partial(fetch, low + i))
    plgpu.barrier_wait(own.q_ready)
    shape = (ROWS, _TILE)
    last_keys = kv_len - c.q_per_seq + lax.div(mg.row_iota(ROWS), c.group)

    def step(j, carry):
        acc, top, total = carry
        pl.when(j + _STAGES - 1 < high)(functools.partial(fetch, j + _STAGES - 1))
        slot = lax.rem(j - low, _STAGES)
        plgpu.barrier_wait(kv_ready.at[slot])
        k, v = _operands(own.k_ring.at[slot], own.v_ring.at[slot], own.k_wide, own.v_wide)
        partial_tile = kv_len - j * _TILE
        pl.when(partial_tile < _TILE)(
            lambda: (mg.zero_dead_rows(v, partial_tile), plgpu.commit_smem())[0]
        )
        scores = mg.product(own.q_smem, k.transpose((1, 0))) * c.scale2
        key = j * _TILE + mg.iota(shape, 1)
        last_key = mg.over_rows(last_keys, shape)
        visible = key <= last_key
        if c.window is not None:
            visible &= key > last_key - c.window
        scores = jnp.where(visible, scores, mg.NEVER)
        weights, keep, top, total = mg.online_softmax(scores, top, total)
        acc = mg.add_weighted(
            acc * mg.over_rows(keep, acc.shape), weights, v, own.p_smem, c.interpret
        )
        return acc, top, total

    init = (
        mg.wgmma_full((ROWS, own.v_ring.shape[2]), 0.0),
        mg.row_full(ROWS, mg.NEVER),
        mg.row_full(ROWS, 0.0),
    )
    acc, top, total = lax.fori_loop(low, high, step, init)
    alive = top > mg.NEVER / 2
    inverse = jnp.where(alive, 1.0 / total, 0.0)
    own.o_smem[...] = jnp.where(
        mg.over_rows(alive, acc.shape), acc * mg.over_rows(inverse, acc.shape), 0.0
    ).astype(own.o_smem.dtype)
    own.lse_smem[...] = jnp.where(alive, top + jnp.log2(total), mg.NEVER)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own.o_smem.at[pl.ds(0, c.padded)], out.at[seq, kv_head, split])
    plgpu.copy_smem_to_gmem(own.lse_smem, lse_out.at[seq, kv_head, split])
    plgpu.wait_smem_to_gmem(0)


def _operands(
    k8: jax.Ref, v8: jax.Ref, k_wide: jax.Ref | None, v_wide: jax.Ref | None
) -> tuple[jax.Ref, jax.Ref]:
    """The tile as wgmma takes it: where it lies, or widened from e4m3 into its own buffers."""
    if k_wide is None:
        return k8, v8
    mg.widen(k8, k_wide)
    mg.widen(v8, v_wide)
    plgpu.commit_smem()
    return k_wide, v_wide
