"""The compiled CPU product against float64, over the shapes that break tiles."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels_pallas import dispatch
from deepinfer_jax.kernels_pallas.cpu import matmul as cpu_matmul
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native
from deepinfer_jax.kernels_pallas.cpu.matmul import matmul_native

pytestmark = pytest.mark.skipif(
    not cpu_native.in_use("matmul"), reason=cpu_native.status("matmul").reason
)

ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 17, 33, 40)
SHAPES = ((1, 64), (4, 64), (5, 128), (33, 576), (70, 192), (960, 64))


def matmul_nt(x, weights) -> jax.Array:
    return matmul_native(jnp.asarray(x), weights, out_dtype=jnp.float32)


def stored(format: str, n: int, k: int, rng) -> tuple[tuple, np.ndarray]:
    """(weights as stored, float64 weights they stand for)."""
    if format in ("f32", "bf16"):
        weight = jnp.asarray(rng.normal(size=(n, k)), cpu_matmul.FORMATS[format])
        return (weight,), np.asarray(weight).astype(np.float64)
    scale = rng.uniform(0.5, 2, n).astype(np.float32)
    if format == "int8":
        q = rng.integers(-128, 128, (n, k)).astype(np.int8)
        return (q, scale), q * scale[:, None].astype(np.float64)
    q, group = (
        rng.integers(1, 16, (n, k // 64, 2, 32)),
        rng.integers(1, 19, (n, k // 32)).astype(np.int8),
    )
    packed = (q[:, :, 0] | q[:, :, 1] << 4).astype(np.uint8).reshape(n, k // 2)
    exact = (q.reshape(n, k // 32, 32) - 8.0) * group[..., None]
    return (packed, group, scale), exact.reshape(n, k) * scale[:, None].astype(np.float64)


def check(format: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * 1000 + n)
    operands, exact = stored(format, n, k, rng)
    x = rng.normal(size=(m, k)).astype(np.float32)
    got = np.asarray(jax.jit(matmul_nt)(x, operands))
    assert got.shape == (m, n) and got.dtype == np.float32
    size = np.abs(x) @ np.abs(exact).T
    assert np.max(np.abs(got - x @ exact.T) / size) < 5e-7


@pytest.mark.parametrize("format", list(cpu_matmul.FORMATS))
@pytest.mark.parametrize("n, k", SHAPES)
def test_equals_the_float64_product(format, n, k):
    for m in ROWS:
        check(format, m, n, k)


@pytest.mark.parametrize("format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("k", [1, 3, 15, 17, 100])
def test_any_inner_size(format, k):
    for m in (1, 7):
        check(format, m, 9, k)


@pytest.mark.parametrize("format", list(cpu_matmul.FORMATS))
def test_more_rows_than_a_cache_panel_holds(format):
    check(format, 1000, 260, 1024)


@pytest.mark.parametrize(
    "format, rows, first, last",
    [("f32", 11, 6, 11), ("f32", 40, 5, 33), ("int8", 8, 3, 4), ("int4", 7, 0, 5)],
)
def test_a_row_does_not_depend_on_the_rows_of_its_tile(format, rows, first, last):
    rng = np.random.default_rng(0)
    operands, _ = stored(format, 64, 576, rng)
    x = rng.normal(size=(rows, 576)).astype(np.float32)
    together = np.asarray(matmul_nt(x, operands))
    np.testing.assert_array_equal(
        together[first:last], np.asarray(matmul_nt(x[first:last], operands))
    )


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_activations_of_very_different_sizes(format):
    """Digits are relative to a row's largest activation; a row of zeros, a huge and a tiny one stay
    apart."""
    rng = np.random.default_rng(2)
    operands, exact = stored(format, 16, 128, rng)
    x = rng.normal(size=(5, 128)).astype(np.float32) * np.float32(
        [[0], [1e30], [1e-30], [1], [1e-41]]
    )
    x[3, 5], x[4, ::3] = 4e4, 0
    got = np.asarray(matmul_nt(x, operands))
    assert np.all(got[0] == 0)
    worst = np.max(np.abs(x), axis=1, keepdims=True) * np.sum(np.abs(exact), axis=1)
    assert np.all(np.abs(got - x @ exact.T)[1:4] <= 1e-7 * worst[1:4])
    assert np.all(
        np.abs(got[4]) < 1e-36
    )  # too small for float32's reciprocals: nothing, or next to nothing


@pytest.mark.parametrize("format", list(cpu_matmul.FORMATS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_activations_break_their_own_row_only(format, value):
    rng = np.random.default_rng(3)
    operands, _ = stored(format, 16, 128, rng)
    x = rng.normal(size=(3, 128)).astype(np.float32)
    whole = np.asarray(matmul_nt(x, operands))
    x[1, 77] = value
    got = np.asarray(matmul_nt(x, operands))
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(got[[0, 2]], whole[[0, 2]])


def test_bfloat16_activations_and_empty_operands():
    rng = np.random.default_rng(1)
    operands, exact = stored("int8", 8, 64, rng)
    x = jnp.asarray(rng.normal(size=(2, 64)), jnp.bfloat16)
    np.testing.assert_allclose(
        matmul_nt(x, operands), np.asarray(x).astype(np.float64) @ exact.T, rtol=1e-4, atol=1e-2
    )
    assert matmul_nt(x[:0], operands).shape == (0, 8)


def test_many_calls_at_once():
    """Independent products of one program may run at the same time, each with helpers on the same
    pool."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 128)).astype(np.float32)
    weights = [rng.normal(size=(257, 128)).astype(np.float32) for _ in range(16)]
    together = jax.jit(lambda x, ws: [matmul_nt(x, (w,)) for w in ws])
    for _ in range(20):
        for got, w in zip(together(x, weights), weights, strict=True):
            np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "rows", "name"),
    [
        (jnp.float32, 1, "native"),
        (jnp.float32, 4096, "xla"),
        (jnp.uint8, 4096, "native"),
        (jnp.float16, 1, "xla"),
    ],
)
def test_chosen_where_no_xla_product_is_faster(dtype, rows, name):
    weights = {
        jnp.uint8: [((4, 32), jnp.uint8), ((4, 2), jnp.int8), ((4,), jnp.float32)],
    }.get(dtype, [((4, 64), dtype)])
    args = (
        jax.ShapeDtypeStruct((rows, 64), jnp.float32),
        tuple(jax.ShapeDtypeStruct(*part) for part in weights),
    )
    choice = dispatch.select("matmul", args, {"out_dtype": jnp.float32})[1]
    assert choice.name == name


def test_overrides_and_a_failed_build(tmp_path, monkeypatch):
    monkeypatch.setenv(cpu_native.ENVIRONMENT_VARIABLE, "xla")
    assert not cpu_native.in_use("matmul") and "=xla" in cpu_native.status("matmul").reason
    with pytest.raises(RuntimeError, match="not in use"):
        matmul_nt(np.zeros((1, 64), np.float32), (np.zeros((4, 64), np.float32),))
    monkeypatch.setenv(cpu_native.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match="auto, native or xla"):
        cpu_native.status("matmul")
    code = (
        "from deepinfer_jax.kernels_pallas.cpu import native; s = native.status('matmul');"
        " print(s.native, s.reason)"
    )
    env = os.environ | {
        "CXX": "/bin/false",
        "DEEPINFER_CACHE_DIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    for mode, expected in (("auto", "False /bin/false"), ("native", "RuntimeError")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env | {cpu_native.ENVIRONMENT_VARIABLE: mode},
            capture_output=True,
            text=True,
        )
        assert expected in done.stdout + done.stderr
