"""Latent attention: absorbed and expanded prefill, decode and plain per-head attention agree; the
form is chosen by the shape."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from step_batches import BLOCK, Rank, build_batch

from deepinfer_jax.models.layers.mla import MLAConfig, MLAttention
from deepinfer_jax.models.layers.rope import RopeConfig, rope_cos_sin

HIDDEN, BLOCKS = 24, 40
YARN = RopeConfig(
    8, rope_type="yarn", factor=4.0, original_max_position=32, mscale=1.0, mscale_all_dim=0.7
)
BASE = MLAConfig(
    num_heads=4, q_rank=12, kv_rank=16, nope_dim=6, rope_dim=8, v_dim=10, rope=RopeConfig(8)
)
CONFIGS = {
    "v3": BASE,
    "lite": dataclasses.replace(BASE, q_rank=None),
    "halves": dataclasses.replace(BASE, interleaved=False, bias=True),
    "yarn": dataclasses.replace(BASE, rope=YARN),
}


def layer(config: MLAConfig, seed: int = 0) -> MLAttention:
    module = MLAttention(HIDDEN, config, dtype=jnp.float32)
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(module)
    state = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) / np.sqrt(a.shape[-1]), a.dtype), state
    )
    return nnx.merge(graphdef, state)


def rotate(x, position, c: MLAConfig):
    """x [.., rope_dim] float64, one pair at a time."""
    cos, sin = (np.asarray(a, np.float64)[0] for a in rope_cos_sin(c.rope, jnp.array([position])))
    out, half = np.array(x), c.rope_dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if c.interleaved else (i, i + half)
        out[..., a] = x[..., a] * cos[i] - x[..., b] * sin[i]
        out[..., b] = x[..., b] * cos[i] + x[..., a] * sin[i]
    return out


def reference(m: MLAttention, x: np.ndarray) -> np.ndarray:
    """One sequence x [T, hidden] in float64, head by head, keys and values written out as in the
    paper."""
    c, w = m.config, lambda p: np.asarray(p[...], np.float64)

    def norm(h, n):
        return h / np.sqrt((h * h).mean(-1, keepdims=True) + n.eps) * w(n.weight)

    def linear(h, lin):
        return h @ w(lin.kernel).T + (0 if lin.bias is None else w(lin.bias))

    q = linear(x if c.q_rank is None else norm(linear(x, m.q_a), m.q_norm), m.q_b).reshape(
        len(x), c.num_heads, -1
    )
    kv = linear(x, m.kv_a)
    latent = norm(kv[:, : c.kv_rank], m.kv_norm)
    k_rope = np.stack([rotate(r, t, c) for t, r in enumerate(kv[:, c.kv_rank :])])
    factor = (
        1.0
        if c.rope.rope_type == "default"
        else (0.1 * c.rope.mscale_all_dim * np.log(c.rope.factor) + 1) ** 2
    )
    out = np.zeros((len(x), c.num_heads, c.v_dim))
    for t, h in np.ndindex(len(x), c.num_heads):
        query = np.concatenate([q[t, h, : c.nope_dim], rotate(q[t, h, c.nope_dim :], t, c)])
        keys = np.concatenate([latent[: t + 1] @ w(m.w_uk)[h].T, k_rope[: t + 1]], axis=1)
        scores = keys @ query * factor / np.sqrt(c.nope_dim + c.rope_dim)
        p = np.exp(scores - scores.max())
        out[t, h] = (p / p.sum()) @ (latent[: t + 1] @ w(m.w_uv)[h].T)
    return linear(out.reshape(len(x), -1), m.out)


def attend(m: MLAttention, x, pool, batch):
    cos, sin = rope_cos_sin(m.config.rope, jnp.asarray(batch.positions))
    return m(jnp.asarray(x, jnp.float32), cos, sin, pool, jax.tree.map(jnp.asarray, batch))


def run(m: MLAttention, sequences: list[np.ndarray]):
    """Two prefill chunks and one decode step of each sequence; returns what each row gave, sequence
    by sequence."""
    rank, pool = Rank(pages=4), jnp.full((BLOCKS, BLOCK, 1, m.config.entry_dim), jnp.nan)
    out = [[] for _ in sequences]
    for first, last in ((0, 9), (9, -1)):
        parts = [s[first:last] for s in sequences]
        batch = build_batch(
            rank, [(i, np.zeros(len(p), np.int32)) for i, p in enumerate(parts)], 48, 3, BLOCKS
        )
        x = np.zeros((48, HIDDEN))
        x[: sum(map(len, parts))] = np.concatenate(parts)
        y, pool = attend(m, x, pool, batch)
        for i, part in enumerate(np.split(np.asarray(y), np.cumsum([len(p) for p in parts]))[:-1]):
            out[i] += list(part)
    batch = build_batch(
        rank, [(i, np.zeros(1, np.int32)) for i in range(len(sequences))], 3, 3, BLOCKS, decode=True
    )
    y, pool = attend(
        m,
        np.stack([s[-1] for s in sequences] + [np.zeros(HIDDEN)] * (3 - len(sequences))),
        pool,
        batch,
    )
    return [np.array([*rows, y[i]]) for i, rows in enumerate(out)], pool


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_both_forms_and_decode_equal_plain_attention(name, form):
    m = layer(dataclasses.replace(CONFIGS[name], prefill=form))
    rng = np.random.default_rng(5)
    sequences = [rng.normal(size=(n, HIDDEN)) for n in (23, 11)]
    got, pool = run(m, sequences)
    for y, x in zip(got, sequences, strict=True):
        np.testing.assert_allclose(y, reference(m, x), atol=2e-5)
    assert pool.shape[2:] == (1, m.config.kv_rank + m.config.rope_dim)


def test_expanding_group_by_group_changes_nothing():
    x = np.random.default_rng(2).normal(size=(13, HIDDEN))
    one = run(layer(dataclasses.replace(BASE, prefill="expanded")), [x])[0][0]
    cut = dataclasses.replace(BASE, prefill="expanded", expand_bytes=2 * 3 * 4 * BLOCK * 24 * 4)
    assert cut.head_groups(4, keys=3 * 4 * BLOCK, itemsize=4) == 2
    np.testing.assert_allclose(run(layer(cut), [x])[0][0], one, atol=1e-6)


def test_auto_expands_when_enough_rows_share_the_expansion():
    v3 = MLAConfig(128, 1536, 512, 128, 64, 128, RopeConfig(64))
    assert v3.expands(tokens=4096, sequences=1, keys=4096)
    assert not v3.expands(tokens=64, sequences=1, keys=4096)
    assert v3.expands(tokens=256, sequences=4, keys=64), (
        "without a prefix there is no more to expand than to absorb"
    )
    assert not v3.expands(tokens=4096, sequences=64, keys=4096), "few rows per sequence"
    assert not dataclasses.replace(v3, prefill="absorbed").expands(4096, 1, 4096)
    assert v3.head_groups(128, keys=4096, itemsize=2) == 1
    assert v3.head_groups(128, keys=1 << 16, itemsize=2) == 8, "5 GiB in pieces of at most 1"
    assert v3.head_groups(128, keys=1 << 30, itemsize=2) == 128


def test_refusals():
    with pytest.raises(ValueError, match="prefill"):
        dataclasses.replace(BASE, prefill="fast")
    with pytest.raises(ValueError, match="qk_rope_head_dim"):
        dataclasses.replace(BASE, rope_dim=4)
