"""Choosing entries and attending to chosen ones, against float64 NumPy, row by row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels_pallas import KeySource, index_topk, sparse_attention
from deepinfer_jax.kernels_pallas.sparse import index_topk as index_module

ENTRIES, BLOCKS = 4, 40


def pages(rng: np.random.Generator, sequences: int, count: int) -> np.ndarray:
    return rng.permutation(BLOCKS)[: sequences * count].reshape(sequences, count).astype(np.int32)


def pool_of(rng: np.random.Generator, tables: np.ndarray, lens: np.ndarray, width: int):
    """A pool with NaN wherever no entry was written."""
    pool = np.full((BLOCKS, ENTRIES, width), np.nan, np.float32)
    for table, n in zip(tables, lens, strict=True):
        for e in range(n):
            pool[table[e // ENTRIES], e % ENTRIES] = rng.normal(size=width)
    return pool


def entry(pool: np.ndarray, table: np.ndarray, e: int) -> np.ndarray:
    return pool[table[e // ENTRIES], e % ENTRIES].astype(np.float64)


def best(q, w, pool, table, visible, k, scales=None) -> set[int]:
    scores = []
    for e in range(visible):
        factor = 1.0 if scales is None else scales[table[e // ENTRIES], e % ENTRIES]
        dots = q.astype(np.float64) @ entry(pool, table, e)
        scores.append((np.maximum(dots, 0) * w).sum() * factor)
    return set(np.argsort(-np.array(scores), kind="stable")[:k].tolist())


def chosen(row: np.ndarray) -> set[int]:
    """A row's entries; they are distinct and stand before the -1s."""
    count = int((row >= 0).sum())
    assert (row[:count] >= 0).all() and len(set(row[:count].tolist())) == count
    return set(row[:count].tolist())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several key tiles, row tiles and sequence tiles even at these sizes."""
    sizes = {"_KEY_TILE": {"prefill": 8, "decode": 8}, "_Q_TILE": 4, "_SEQ_TILE": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(index_module, name, size)


@pytest.mark.parametrize("scaled", [False, True])
def test_prefill_chooses_the_best_of_what_each_row_sees(scaled):
    rng = np.random.default_rng(0)
    lengths, rows = [(23, 23), (0, 0), (31, 5), (3, 3)], 36  # (entries, rows of this step)
    tables = pages(rng, 4, 9)
    pool = pool_of(rng, tables, [n for n, _ in lengths], 6)
    scales = np.exp2(rng.integers(-3, 3, (BLOCKS, ENTRIES))).astype(np.float32) if scaled else None
    q, w = rng.normal(size=(rows, 3, 6)), rng.normal(size=(rows, 3))
    starts = np.cumsum([0] + [n for _, n in lengths]).astype(np.int32)
    seen = np.zeros(rows, np.int32)
    for s, (n, r) in enumerate(lengths):
        seen[starts[s] : starts[s + 1]] = np.arange(n - r, n) + 1
    got = np.asarray(
        index_topk(
            *(jnp.asarray(a, jnp.float32) for a in (q, w, pool)),
            *map(jnp.asarray, (tables, seen, starts)),
            k=7,
            key_scales=None if scales is None else jnp.asarray(scales),
        )
    )
    for s in range(4):
        for t in range(starts[s], starts[s + 1]):
            assert chosen(got[t]) == best(q[t], w[t], pool, tables[s], seen[t], 7, scales), t
    assert (got[starts[-1] :] == -1).all()


@pytest.mark.parametrize("q_per_seq", [1, 3])
def test_decode_chooses_the_best_of_what_each_row_sees(q_per_seq):
    rng = np.random.default_rng(1)
    lens = np.array([5, 0, 36, 19, 8])
    tables = pages(rng, 5, 8)
    lens = np.minimum(lens, 8 * ENTRIES)
    pool = pool_of(rng, tables, lens, 4)
    rows = 5 * q_per_seq
    q, w = rng.normal(size=(rows, 2, 4)), rng.normal(size=(rows, 2))
    back = np.tile(np.arange(q_per_seq)[::-1], 5)
    seen = np.maximum(np.repeat(lens, q_per_seq) - back, 0).astype(np.int32)
    got = np.asarray(
        index_topk(
            *(jnp.asarray(a, jnp.float32) for a in (q, w, pool)),
            *map(jnp.asarray, (tables, seen, np.arange(6, dtype=np.int32) * q_per_seq)),
            k=6,
            q_per_seq=q_per_seq,
        )
    )
    for t in range(rows):
        assert chosen(got[t]) == best(q[t], w[t], pool, tables[t // q_per_seq], seen[t], 6), t


def test_equal_scores_go_to_the_lower_entry():
    pool = jnp.ones((BLOCKS, ENTRIES, 2))
    tables = jnp.arange(10, dtype=jnp.int32)[None]
    for per_seq in (None, 1):
        got = index_topk(
            jnp.ones((1, 1, 2)),
            jnp.ones((1, 1)),
            pool,
            tables,
            jnp.array([37]),
            jnp.array([0, 1]),
            k=5,
            q_per_seq=per_seq,
        )
        assert chosen(np.asarray(got)[0]) == {0, 1, 2, 3, 4}


def test_a_row_that_sees_no_more_than_k_gets_everything():
    rng = np.random.default_rng(2)
    tables = pages(rng, 2, 9)
    pool = pool_of(rng, tables, [6, 4], 3)
    got = index_topk(
        jnp.zeros((2, 1, 3)),
        jnp.zeros((2, 1)),
        jnp.asarray(pool),
        jnp.asarray(tables),
        jnp.array([6, 4]),
        jnp.array([0, 1, 2]),
        k=6,
        q_per_seq=1,
    )
    np.testing.assert_array_equal(got, [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])


def attend(q, keys, scale, v_dim, sink=None):
    """One row in float64: q [H, D], keys [n, D]."""
    out = np.zeros((q.shape[0], v_dim))
    for h, row in enumerate(q.astype(np.float64)):
        scores = keys @ row * scale
        logits = scores if sink is None else np.append(scores, sink[h])
        if logits.size:
            weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
            out[h] = weights @ keys[:, :v_dim]
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_reads_the_entries_of_all_its_sources(with_sinks, monkeypatch):
    """A paged source with chosen entries, a paged one read from its start and a flat one, in one
    softmax; several row tiles and passes."""
    from deepinfer_jax.kernels_pallas.sparse import sparse_attention as module

    monkeypatch.setattr(module, "_ENTRY_TILE", 4)
    monkeypatch.setattr(module, "_GATHER_BYTES", 4 * 4 * 8 * 8)
    rng = np.random.default_rng(3)
    rows, heads, width = 19, 2, 8
    tables = pages(rng, 3, 4)
    lens = np.array([16, 3, 9])
    pool, other = pool_of(rng, tables, lens, width), pool_of(rng, tables, lens, width)
    flat = rng.normal(size=(11, 1, width)).astype(np.float32)
    flat[7] = np.nan
    seq = rng.integers(0, 4, rows).astype(np.int32)  # 3: a padding row
    limit = np.where(seq < 3, lens[np.minimum(seq, 2)], 0)
    counts = [np.minimum(rng.integers(0, 7, rows), limit) for _ in range(3)]
    counts[2] = np.where(seq < 3, rng.integers(0, 7, rows), 0)
    picks = np.full((2, rows, 7), -1, np.int32)
    for t in range(rows):
        picks[0, t, : counts[0][t]] = rng.permutation(limit[t])[: counts[0][t]]
        picks[1, t, : counts[2][t]] = rng.permutation(7)[: counts[2][t]]
    q = rng.normal(size=(rows, heads, width)).astype(np.float32)
    sink = rng.normal(size=heads) if with_sinks else None
    places = (jnp.asarray(tables), jnp.asarray(seq))
    ints = [jnp.asarray(x, jnp.int32) for x in (*counts, *picks)]
    sources = (
        KeySource(jnp.asarray(pool), ints[0], ints[3], *places),
        KeySource(jnp.asarray(other), ints[1], None, *places),
        KeySource(jnp.asarray(flat), ints[2], ints[4]),
    )
    got = sparse_attention(
        jnp.asarray(q),
        sources,
        scale=0.3,
        v_dim=5,
        sinks=None if sink is None else jnp.asarray(sink, jnp.float32),
    )
    for t in range(rows):
        table = tables[min(seq[t], 2)]
        keys = [entry(pool, table, e) for e in picks[0, t, : counts[0][t]]]
        keys += [entry(other, table, e) for e in range(counts[1][t])]
        keys += [flat[e, 0].astype(np.float64) for e in picks[1, t, : counts[2][t]]]
        expected = attend(q[t], np.array(keys).reshape(-1, width), 0.3, 5, sink)
        np.testing.assert_allclose(got[t], expected, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused():
    q, pool = jnp.zeros((2, 1, 4)), jnp.zeros((3, 2, 4))
    with pytest.raises(ValueError, match="without entries needs tables"):
        sparse_attention(q, (KeySource(pool, jnp.zeros(2, jnp.int32)),), scale=1.0)
    with pytest.raises(ValueError, match="needs tables and seq_ids"):
        entries = jnp.zeros((2, 3), jnp.int32)
        sparse_attention(q, (KeySource(pool, jnp.zeros(2, jnp.int32), entries),), scale=1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        index_topk(
            q,
            jnp.zeros((2, 3)),
            pool,
            jnp.zeros((2, 2), jnp.int32),
            jnp.zeros(2, jnp.int32),
            jnp.zeros(3, jnp.int32),
            k=2,
        )
