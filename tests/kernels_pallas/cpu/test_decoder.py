"""All layers of a decode step in one call, against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels_pallas import decoder_layers
from deepinfer_jax.kernels_pallas.cpu import decoder as cpu_decoder
from deepinfer_jax.kernels_pallas.cpu import matmul as cpu_matmul
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native
from deepinfer_jax.kernels_pallas.decoder_layers import (
    LayerWeights,
    LinearWeights,
    Result,
    Rows,
)
from deepinfer_jax.models.layers.quant import quant_format

pytestmark = pytest.mark.skipif(
    not cpu_native.in_use("decoder"), reason=cpu_native.status("decoder").reason
)

EPS, BLOCK = 1e-5, 16
OPTIONS = {"row_per_sequence": True, "eps": EPS, "scale": 1.0}


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    format: str = "f32"
    heads: int = 6
    kv_heads: int = 2
    d: int = 32
    hidden: int = 128
    inner: int = 192
    layers: int = 2
    rotated: int = 32
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    cache: str = "float32"


CASES = {
    "one row": Case((5,)),
    "two rows": Case((17, 1)),
    "padding rows": Case((5, 0, 33, 16, 1, 0, 40)),
    "many rows": Case(tuple(range(1, 34))),
    "bias, head norms, window, part rotated": Case(
        (50, 3), bias=True, qk_norm=True, window=7, rotated=16
    ),
    "long": Case((2100,), layers=1),
    "bf16": Case((9, 30), format="bf16", cache="bfloat16", qk_norm=True),
    "int8": Case((9, 30, 2), format="int8"),
    "int4 one row": Case((30,), format="int4", hidden=192),
    "int4": Case((9, 30, 2, 8), format="int4"),
    "heads apart from hidden": Case(
        (9, 30), heads=4, kv_heads=4, d=16, hidden=48, inner=80, rotated=16
    ),
}


def weights(case: Case, n: int, k: int, rng) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    w = rng.standard_normal((n, k)).astype(np.float32) * k**-0.5
    if case.format in ("int8", "int4"):
        parts = tuple(map(jnp.asarray, quant_format(case.format).quantize(w)))
        return parts, np.asarray(quant_format(case.format).dequantize(jnp.float32, *parts)).astype(
            np.float64
        )
    stored = jnp.asarray(w, cpu_matmul.FORMATS[case.format])
    return (stored,), np.asarray(stored.astype(jnp.float32)).astype(np.float64)


def rms(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * w


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = len(cos)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def problem(case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    m, width = len(case.lens), (case.heads + 2 * case.kv_heads) * case.d
    vector = lambda n: rng.uniform(0.5, 1.5, n).astype(np.float32)  # noqa: E731
    layers, exact = [], []
    for _ in range(case.layers):
        shapes = (
            (width, case.hidden),
            (case.hidden, case.heads * case.d),
            (2 * case.inner, case.hidden),
            (case.hidden, case.inner),
        )
        (qkv, out, gate_up, down), full = zip(
            *(weights(case, *s, rng) for s in shapes), strict=True
        )
        norms, bias = (
            (vector(case.hidden), vector(case.hidden)),
            vector(width) if case.bias else None,
        )
        heads = (vector(case.d), vector(case.d)) if case.qk_norm else (None, None)
        layers.append(
            LayerWeights(
                norms[0],
                LinearWeights(qkv, bias),
                *heads,
                LinearWeights(out),
                norms[1],
                LinearWeights(gate_up),
                LinearWeights(down),
                case.window,
            )
        )
        exact.append(full)
    pages = max(1, -(-max(case.lens) // BLOCK))
    tables = rng.permutation(m * pages + 2)[: m * pages].reshape(m, pages).astype(np.int32)
    shape = (m * pages + 2, BLOCK, case.kv_heads, case.d)
    pools = [
        [jnp.asarray(rng.standard_normal(shape), case.cache) for _ in range(case.layers)]
        for _ in range(2)
    ]
    lens = np.array(case.lens, np.int32)
    at = np.maximum(lens - 1, 0)
    slots = np.where(
        lens > 0, tables[np.arange(m), at // BLOCK] * BLOCK + at % BLOCK, shape[0] * BLOCK
    ).astype(np.int32)
    angle = at[:, None] * 10.0 ** -np.arange(case.rotated // 2)
    rows = Rows(
        np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), tables, lens, slots
    )
    x = rng.standard_normal((m, case.hidden)).astype(np.float32)
    return x, rows, layers, exact, vector(case.hidden), pools


def reference(case: Case, x, rows, layers, exact, last_norm, pools):
    """One row at a time; returns (hidden of live rows, pools with this step's rows written)."""
    keys, values = ([np.array(p.astype(jnp.float32), np.float64) for p in side] for side in pools)
    x = x.astype(np.float64)
    group, d = case.heads // case.kv_heads, case.d
    for i, (layer, (qkv, out, gate_up, down)) in enumerate(zip(layers, exact, strict=True)):
        for m, length in enumerate(case.lens):
            heads = rms(x[m], layer.attn_norm) @ qkv.T + (
                0 if layer.qkv.bias is None else layer.qkv.bias
            )
            q, k, v = np.split(heads.reshape(-1, d), (case.heads, case.heads + case.kv_heads))
            if case.qk_norm:
                q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
            q, k = rotate(q, rows.cos[m], rows.sin[m]), rotate(k, rows.cos[m], rows.sin[m])
            if length:
                page, offset = rows.block_tables[m, (length - 1) // BLOCK], (length - 1) % BLOCK
                keys[i][page, offset], values[i][page, offset] = k, v
            attended = np.zeros((case.heads, d))
            low = 0 if case.window is None else max(0, length - case.window)
            for h in range(case.heads if length else 0):
                ks, vs = (
                    p[i][rows.block_tables[m]].reshape(-1, case.kv_heads, d)[low:length, h // group]
                    for p in (keys, values)
                )
                scores = ks @ q[h] * d**-0.5
                e = np.exp(scores - scores.max())
                attended[h] = e / e.sum() @ vs
            x[m] += attended.reshape(-1) @ out.T
            gate, up = np.split(rms(x[m], layer.mlp_norm) @ gate_up.T, 2)
            x[m] += gate / (1 + np.exp(-gate)) * up @ down.T
    return rms(x, last_norm), keys, values


def call(case: Case, x, rows, layers, last_norm, pools) -> Result:
    def run(x, rows, layers, last_norm, keys, values):
        layers = [layer._replace(window=case.window, shards=1) for layer in layers]
        return decoder_layers(
            x,
            rows,
            layers,
            last_norm,
            keys,
            values,
            row_per_sequence=True,
            eps=EPS,
            scale=case.d**-0.5,
            unfused=None,
            implementation="native",
        )

    bare = [layer._replace(window=None, shards=None) for layer in layers]
    return jax.jit(run)(jnp.asarray(x), Rows(*map(jnp.asarray, rows)), bare, last_norm, *pools)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_float64_layers(name):
    case = CASES[name]
    x, rows, layers, exact, last_norm, pools = problem(case)
    hidden, keys, values = reference(case, x, rows, layers, exact, last_norm, pools)
    got = call(case, x, rows, layers, last_norm, pools)
    live = np.array(case.lens) > 0
    tolerance = 2e-2 if case.cache == "bfloat16" else 1e-4
    np.testing.assert_allclose(
        np.asarray(got.hidden)[live], hidden[live], rtol=tolerance, atol=tolerance
    )
    for side, expected in ((got.keys, keys), (got.values, values)):
        for pool, want in zip(side, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(pool.astype(jnp.float32)), want, rtol=tolerance, atol=tolerance
            )


def test_donated_pools_are_written_in_place():
    case = CASES["two rows"]
    x, rows, layers, _, last_norm, pools = problem(case)

    def run(keys, values):
        return cpu_decoder.decoder_layers_native(
            x, rows, tuple(layers), last_norm, keys, values, **OPTIONS, unfused=None
        )

    memory = jax.jit(run, donate_argnums=(0, 1)).lower(*pools).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(p.nbytes for side in pools for p in side)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d": 8, "rotated": 8}, "must be multiples of 16"),
        ({"lens": (1,) * 65}, "more than 64 rows"),
        ({"heads": 34}, "at most 16 query heads"),
    ],
)
def test_sizes_it_refuses_run_unfused(change, reason):
    x, rows, layers, _, last_norm, pools = problem(Case(**({"lens": (3,)} | change)))
    check_refused(x, rows, layers, last_norm, pools, OPTIONS, reason)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({}, {"row_per_sequence": False}, "not one row per sequence"),
        ({"shards": 2}, {}, "split over 2 ranks"),
        ({"biased_output": True}, {}, "biases beside those of q, k and v"),
    ],
)
def test_stacks_it_does_not_describe_run_unfused(change, options, reason):
    x, rows, layers, _, last_norm, pools = problem(Case((3,)))
    change = dict(change)
    if change.pop("biased_output", False):
        change["out"] = layers[0].out._replace(bias=jnp.zeros(128))
    layers = [layers[0], layers[1]._replace(**change)]
    check_refused(x, rows, layers, last_norm, pools, OPTIONS | options, reason)


def check_refused(x, rows, layers, last_norm, pools, options, reason):
    unfused = lambda: Result(x, (), ())  # noqa: E731
    refused = cpu_decoder.unsupported_reason(
        x, rows, tuple(layers), last_norm, *pools, **options, unfused=unfused
    )
    assert reason in refused
    got = decoder_layers(x, rows, layers, last_norm, *pools, **options, unfused=unfused)
    assert got.hidden is x
