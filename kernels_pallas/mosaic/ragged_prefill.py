"""Ragged prefill attention for Hopper (wgmma): one block per (128 rows of one sequence, query
head).

A third warpgroup streams pages through a ring of shared-memory buffers by TMA; two warpgroups take
64 rows each and run the online softmax (FlashAttention-3, Shah et al. 2024, without its ping-pong
scheduling). Blocks never write rows of a neighbour: the last rows of a sequence go out in
power-of-two pieces. Values may be narrower than keys (MLA expanded: 192 / 128).
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
from jaxtyping import Array, Float, Int32

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
from deepinfer_jax.kernels_pallas.mosaic.paged_decode import to_f16

_BLOCK = 2 * ROWS
_STAGES = 2
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class _Config:
    """What a kernel is compiled for.

    scale2: of base-2 scores. tile: keys per step. group: query heads per kv head.
    """

    scale2: float
    tile: int
    group: int
    window: int | None
    with_sinks: bool
    fp8: bool
    interpret: bool


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of one block; of two, one per multiplying warpgroup."""

    q_smem: jax.Ref  # [2, 64, D]
    k_ring: jax.Ref  # [stages, tile, D]
    v_ring: jax.Ref  # [stages, tile, Dv]
    k_wide: jax.Ref | None  # [tile, D]: e4m3 keys widened to f16
    v_wide: jax.Ref | None  # [tile, Dv]
    p_smem: jax.Ref | None  # [2, 64, tile]: weights, for the interpreter
    o_smem: jax.Ref  # [2, 64, Dv]
    q_ready: jax.Ref
    kv_ready: jax.Ref  # a ring slot is loaded
    kv_free: jax.Ref  # both warpgroups are done with a ring slot
    meet: jax.Ref  # both warpgroups are here

    @staticmethod
    def types(c: _Config, q: Queries, k_pool: Keys, v_pool: Values) -> dict[str, object]:
        (_, bs, _, d), dv = k_pool.shape, v_pool.shape[3]
        operand = jnp.float16 if c.fp8 else jnp.bfloat16
        swizzle = _CHUNK * k_pool.dtype.itemsize  # one chunk of columns

        def wide(width: int) -> object:
            return mg.matrix_smem((c.tile, width), operand) if c.fp8 else None

        return {
            "q_smem": mg.matrix_smem((2, ROWS, d), operand),
            "k_ring": mg.matrix_smem((_STAGES, c.tile, d), k_pool.dtype, swizzle),
            "v_ring": mg.matrix_smem((_STAGES, c.tile, dv), k_pool.dtype, swizzle),
            "k_wide": wide(d),
            "v_wide": wide(dv),
            "p_smem": mg.matrix_smem((2, ROWS, c.tile), operand) if c.interpret else None,
            "o_smem": plgpu.SMEM((2, ROWS, dv), q.dtype),
            "q_ready": plgpu.Barrier(num_barriers=2),
            "kv_ready": plgpu.Barrier(num_arrivals=2 * c.tile // bs, num_barriers=_STAGES),
            "kv_free": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            "meet": plgpu.Barrier(num_arrivals=2),
        }


def unsupported_reason(
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
    interpret: Interpret = None,
) -> Attended:
    """See `ragged_prefill`."""
    del v_dim
    t, h, d = q.shape
    s, p = block_tables.shape
    bs, kh, dv = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    config = _Config(
        scale2=scale * mg.LOG2E,
        tile=128 if d <= 128 else 64,
        group=h // kh,
        window=sliding_window,
        with_sinks=sinks is not None,
        fp8=k_pool.dtype == jnp.float8_e4m3fn,
        interpret=bool(interpret),
    )
    items = work_items(kv_lens, q_starts, t)
    rows = max(t, ROWS)  # a TMA box may not exceed the array
    q = jnp.pad(q, ((0, rows - t), (0, 0), (0, 0)))
    tables = jnp.pad(block_tables, ((0, 0), (0, -p % (config.tile // bs))))
    out = plgpu.kernel(
        functools.partial(_body, config),
        out_type=jax.ShapeDtypeStruct((rows, h, dv), q.dtype),
        scratch_types=_Scratch.types(config, q, k_pool, v_pool),
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
        to_f16(q) if config.fp8 else q,
        k_pool,
        v_pool,
    )
    return jnp.where((seq_ids < s)[:, None, None], out[:t], 0)


def work_items(kv_lens: Lens, q_starts: Starts, rows: int) -> Int32[Array, "items 5"]:
    """`row_blocks` of the sequences, with the position of each block's row 0 as a fifth column."""
    items, _ = mg.row_blocks(q_starts, rows, _BLOCK)
    seq, base = items[:, 0], items[:, 1]
    return jnp.concatenate(
        [items, (kv_lens[seq] - (q_starts[seq + 1] - base)).astype(jnp.int32)[:, None]], axis=1
    )


@dataclasses.dataclass(frozen=True)
class _Item:
    """What a block works on: the rows `low..high` of the _BLOCK from `base` on, all of one
    sequence, and one query head of them; `position` of the block's row 0; key tiles begin..end."""

    head: jax.Array
    seq: jax.Array
    base: jax.Array
    low: jax.Array
    high: jax.Array
    position: jax.Array
    kv_len: jax.Array
    begin: jax.Array
    end: jax.Array


def _item(c: _Config, items: jax.Ref, lens: jax.Ref) -> _Item:
    head, item = lax.axis_index("head"), lax.axis_index("item")
    seq, base, low, high, position = (items[item, i] for i in range(5))
    first = 0 if c.window is None else jnp.maximum(position + low - c.window + 1, 0)
    return _Item(
        head=head,
        seq=seq,
        base=pl.multiple_of(base, mg.ALIGN),
        low=low,
        high=high,
        position=position,
        kv_len=lens[seq],
        begin=lax.div(first, c.tile) if c.window is not None else 0,
        end=pl.cdiv(jnp.maximum(position + high, 0), c.tile),
    )


def _body(
    c: _Config,
    items: jax.Ref,
    tables: jax.Ref,
    lens: jax.Ref,
    sinks: jax.Ref,
    q: jax.Ref,
    k_pool: jax.Ref,
    v_pool: jax.Ref,
    out: jax.Ref,
    **scratch: jax.Ref,
) -> None:
    own, at, wg = _Scratch(**scratch), _item(c, items, lens), lax.axis_index("wg")

    @pl.when((at.high > at.low) & (wg == 2))
    def _stream():
        plgpu.set_max_registers(40, action="decrease")
        _stream_pages(c, own, at, tables, k_pool, v_pool)

    @pl.when((at.high > at.low) & (wg < 2))
    def _attend():
        plgpu.set_max_registers(232, action="increase")
        q_smem, q_ready = own.q_smem.at[wg], own.q_ready.at[wg]
        plgpu.copy_gmem_to_smem(q.at[pl.ds(at.base + wg * ROWS, ROWS), at.head], q_smem, q_ready)
        plgpu.barrier_wait(q_ready)
        acc = _finished(*_attend_rows(c, own, at, wg, sinks))
        o_smem = own.o_smem.at[wg]
        o_smem[...] = acc.astype(o_smem.dtype)
        plgpu.commit_smem()
        skip = jnp.clip(at.low - wg * ROWS, 0, ROWS)
        count = jnp.clip(at.high - wg * ROWS, 0, ROWS) - skip
        start = at.base + wg * ROWS + skip
        mg.store_rows(o_smem, skip, lambda rows: out.at[rows, at.head], start, count)


def _attend_rows(
    c: _Config, own: _Scratch, at: _Item, wg: jax.Array, sinks: jax.Ref
) -> tuple[Float[Array, "64 Dv"], Float[Array, " 64"], Float[Array, " 64"]]:
    """-> (weighted sum of values, largest score, sum of weights) of this warpgroup's rows."""
    top = jnp.full((), mg.NEVER, jnp.float32) if not c.with_sinks else sinks[at.head] * mg.LOG2E
    top = plgpu.layout_cast(lax.broadcast_in_dim(top, (ROWS,), []), plgpu.Layout.WGMMA.reduce(1))
    acc = mg.wgmma_full((ROWS, own.v_ring.shape[2]), 0.0)
    carry = acc, top, mg.row_full(ROWS, 1.0 if c.with_sinks else 0.0)
    step = functools.partial(_step, c, own, at, wg)
    full = at.begin
    if c.window is None:  # tiles that are whole for every row
        first = at.position + wg * ROWS
        whole = lax.div(jnp.minimum(first + 1, at.kv_len), c.tile)
        full = jnp.clip(whole, at.begin, at.end)
    carry = lax.fori_loop(at.begin, full, functools.partial(step, masked=False), carry)
    return lax.fori_loop(full, at.end, functools.partial(step, masked=True), carry)


def _finished(
    acc: Float[Array, "64 Dv"], top: Float[Array, " 64"], total: Float[Array, " 64"]
) -> Float[Array, "64 Dv"]:
    """The weighted mean of values; zeros where a row saw nothing."""
    alive = top > mg.NEVER / 2
    inverse = jnp.where(alive, 1.0 / total, 0.0)
    return jnp.where(mg.over_rows(alive, acc.shape), acc * mg.over_rows(inverse, acc.shape), 0.0)


def _stream_pages(
    c: _Config, own: _Scratch, at: _Item, tables: jax.Ref, k_pool: jax.Ref, v_pool: jax.Ref
) -> None:
    bs, kv_head = k_pool.shape[1], lax.div(at.head, c.group)

    def fetch(j, _):
        slot = lax.rem(j - at.begin, _STAGES)
        pl.when(j - at.begin >= _STAGES)(lambda: plgpu.barrier_wait(own.kv_free.at[slot]))
        ready = own.kv_ready.at[slot]
        for i in range(c.tile // bs):
            page, rows = tables[at.seq, j * (c.tile // bs) + i], pl.ds(i * bs, bs)
            plgpu.copy_gmem_to_smem(k_pool.at[page, :, kv_head], own.k_ring.at[slot, rows], ready)
            plgpu.copy_gmem_to_smem(v_pool.at[page, :, kv_head], own.v_ring.at[slot, rows], ready)

    lax.fori_loop(at.begin, at.end, fetch, None)
    mg.drain(own.kv_free, _STAGES, at.end - at.begin)


Carry = tuple[Float[Array, "64 Dv"], Float[Array, " 64"], Float[Array, " 64"]]


def _step(
    c: _Config, own: _Scratch, at: _Item, wg: jax.Array, j: jax.Array, carry: Carry, *, masked: bool
) -> Carry:
    """Key tile j; masked: some row may not see all of its keys."""
    acc, top, total = carry
    slot = lax.rem(j - at.begin, _STAGES)
    plgpu.barrier_wait(own.kv_ready.at[slot])
    k, v = _operands(own, wg, slot)
    if masked:
        live = at.kv_len - j * c.tile

        @pl.when(live < c.tile)
        def _last_tile():
            _each_chunk(wg, v, lambda columns: mg.zero_dead_rows(v.at[:, columns], live))
            plgpu.commit_smem()
            mg.meet(own.meet)

    scores = mg.product(own.q_smem.at[wg], k.transpose((1, 0))) * c.scale2
    if masked:
        scores = jnp.where(_visible(c, at, wg, j, scores.shape), scores, mg.NEVER)
    weights, keep, top, total = mg.online_softmax(scores, top, total)
    p_smem = own.p_smem.at[wg] if c.interpret else None
    acc = mg.add_weighted(acc * mg.over_rows(keep, acc.shape), weights, v, p_smem, c.interpret)
    plgpu.barrier_arrive(own.kv_free.at[slot])
    return acc, top, total


def _operands(own: _Scratch, wg: jax.Array, slot: jax.Array) -> tuple[jax.Ref, jax.Ref]:
    """Keys and values of a ring slot as wgmma takes them: where they lie, or widened from e4m3."""
    k, v = own.k_ring.at[slot], own.v_ring.at[slot]
    if own.k_wide is None:
        return k, v
    mg.meet(own.meet)  # the other warpgroup still multiplies with the last tile
    for narrow, wide in ((k, own.k_wide), (v, own.v_wide)):
        _each_chunk(
            wg,
            narrow,
            lambda columns, narrow=narrow, wide=wide: mg.widen(
                narrow.at[:, columns], wide.at[:, columns]
            ),
        )
    plgpu.commit_smem()
    mg.meet(own.meet)
    return own.k_wide, own.v_wide


def _visible(
    c: _Config, at: _Item, wg: jax.Array, j: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """bool [64, tile]: which keys of tile j a row sees."""
    last_key = at.position + wg * ROWS + mg.iota(shape, 0)
    key = j * c.tile + mg.iota(shape, 1)
    visible = key <= jnp.minimum(last_key, at.kv_len - 1)
    if c.window is not None:
        visible &= key > last_key - c.window
    return visible


def _each_chunk(wg: jax.Array, ref: jax.Ref, apply: Callable[[pl.Slice], None]) -> None:
    """Call `apply` on 64-column chunks of ref, the two warpgroups taking turns."""
    for i in range(ref.shape[1] // _CHUNK):
        pl.when(wg == i % 2)(functools.partial(apply, pl.ds(i * _CHUNK, _CHUNK)))
