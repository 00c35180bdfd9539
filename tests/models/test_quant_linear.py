"""Quantised linear layers: the matmul equals the dequantised float one, storage is as documented,
whole models stay close."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from paged_driver import GOLDEN, PagedDriver, golden_prompts

from deepinfer_jax.kernels_pallas import matmul
from deepinfer_jax.kernels_pallas.matmul import int8_digits
from deepinfer_jax.models.checkpoint import Checkpoint
from deepinfer_jax.models.layers.linear import Linear
from deepinfer_jax.models.layers.quant import QUANT_FORMATS, quant_format
from deepinfer_jax.models.loading import load_model
from deepinfer_jax.models.materialize import Materializer, Slot
from deepinfer_jax.models.rules import Rule

FORMATS = sorted(QUANT_FORMATS)
# Relative rms error of the format on normally distributed weights, and a bound on it.
WEIGHT_ERROR = {"int8": 0.01, "int4": 0.12, "fp8": 0.03}
LOGIT_ERROR = {"int8": 0.05, "int4": 0.5, "fp8": 0.15}


def weights(n: int = 192, k: int = 256, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, k)) * rng.uniform(0.1, 3, (n, 1))).astype(np.float32)


def numpy_dequantize(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Written from the format table in layers/quant.py, element by element."""
    if name == "int8":
        q, scale = parts
        return q.astype(np.float64) * scale[:, None]
    if name == "fp8":
        q, scale = parts
        return (
            q.astype(np.float64) * np.kron(scale, np.ones((128, 128)))[: q.shape[0], : q.shape[1]]
        )
    q, group, scale = parts
    n, k = q.shape[0], 2 * q.shape[1]
    w = np.empty((n, k))
    for j in range(k):
        byte = q[:, j // 64 * 32 + j % 32]
        nibble = byte & 15 if j % 64 < 32 else byte >> 4
        w[:, j] = (nibble.astype(int) - 8) * group[:, j // 32].astype(int) * scale.astype(float)
    return w


@pytest.mark.parametrize("name", FORMATS)
def test_storage_and_error(name: str) -> None:
    w, fmt = weights(), quant_format(name)
    parts = fmt.quantize(w)
    assert [(p.shape, p.dtype) for p in parts] == [
        (s, np.dtype(d)) for s, d in fmt.storage(*w.shape)
    ]
    expected = numpy_dequantize(name, parts)
    np.testing.assert_allclose(
        fmt.dequantize(jnp.float32, *map(jnp.asarray, parts)), expected, rtol=1e-6
    )
    error = np.sqrt(np.mean(((expected - w) / w.std(axis=1, keepdims=True)) ** 2))
    assert error < WEIGHT_ERROR[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 32, 130])
def test_matmul_equals_the_dequantised_one(name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, 256)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))).astype(
        np.float32
    )
    parts = quant_format(name).quantize(weights())
    y = np.asarray(jax.jit(matmul)(x, tuple(map(jnp.asarray, parts))))
    expected = x.astype(np.float64) @ numpy_dequantize(name, parts).T
    scale = np.abs(expected).max(axis=1, keepdims=True)
    np.testing.assert_allclose(y / scale, expected / scale, atol=2e-6)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(("implementation", "atol"), [("digits", 2e-4), ("xla", 1e-3)])
def test_other_implementations(name: str, implementation: str, atol: float) -> None:
    """What CPUs without compiled products run, and accelerators."""
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    parts = quant_format(name).quantize(weights())
    stored = tuple(map(jnp.asarray, parts))
    y = matmul(jnp.asarray(x), stored, implementation=implementation)
    np.testing.assert_allclose(y, x @ numpy_dequantize(name, parts).T, atol=atol)


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_zero_inputs_and_outliers(name: str) -> None:
    w = weights()
    w[0], w[1, 7], w[2, :64] = 0, 1e4, 0
    parts = tuple(map(jnp.asarray, quant_format(name).quantize(w)))
    x = np.zeros((2, 256), np.float32)
    x[1, 7] = 1
    y = np.asarray(matmul(jnp.asarray(x), parts))
    assert np.all(y[0] == 0) and y[1, 0] == 0
    assert y[1, 1] == pytest.approx(1e4, rel=0.01)


def test_bfloat16_inputs_keep_their_dtype() -> None:
    parts = quant_format("int8").quantize(weights())
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 256)), jnp.bfloat16)
    y = matmul(x, tuple(map(jnp.asarray, parts)))
    assert y.shape == (2, 3, 192) and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        y.astype(jnp.float32),
        np.asarray(x, np.float32) @ numpy_dequantize("int8", parts).T,
        rtol=0.01,
        atol=0.5,
    )


def test_digits_restore_float32() -> None:
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    digits, step = int8_digits(jnp.asarray(x))
    values = sum(np.asarray(digits[i], np.float64) * 254.0**-i for i in range(3)) * np.asarray(
        step, np.float64
    )
    np.testing.assert_allclose(values, x, atol=np.abs(x).max() * 2e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_stored_model_size(name: str) -> None:
    linear = nnx.eval_shape(lambda: Linear(4096, 4096, dtype=jnp.bfloat16, quant=name))
    nbytes = sum(
        a.size * a.dtype.itemsize for a in jax.tree.leaves(nnx.to_pure_dict(nnx.state(linear)))
    )
    assert nbytes / 4096**2 == pytest.approx(
        {"int8": 1.001, "int4": 0.532, "fp8": 1.0002}[name], rel=1e-3
    )


@pytest.mark.parametrize("name", FORMATS)
def test_slices_of_a_parameter_equal_the_whole(name: str) -> None:
    """What each device of a tp mesh reads: rows and columns of the kernel and of its companions."""
    fmt = quant_format(name)
    with Checkpoint(GOLDEN / "llama") as checkpoint:
        rule = Rule("w", tuple(f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)))
        specs = fmt.storage(128, 128)
        slots = [Slot("w", *specs[0][:1], np.dtype(specs[0][1]), (None, None), "normal", name)]
        slots += [
            Slot(f"w{x}", s, np.dtype(d), (None,) * len(s), "ones", None)
            for x, (s, d) in zip(fmt.suffixes, specs[1:], strict=True)
        ]
        job = Materializer(checkpoint, rule, slots, 1)
        whole = job.build([tuple(slice(0, n) for n in slot.shape) for slot in slots])
        if name != "fp8":
            halves = [
                (slice(32, 96), *(slice(n // 2, n) for n in slot.shape[1:])) for slot in slots
            ]
            for part, index, full in zip(job.build(halves), halves, whole, strict=True):
                np.testing.assert_array_equal(part, full[index])
        source = np.concatenate([checkpoint.read(n).copy() for n in rule.sources])
    error = numpy_dequantize(name, whole) - source
    assert np.sqrt(np.mean(error**2)) < WEIGHT_ERROR[name] * source.std()


@pytest.mark.parametrize("name", FORMATS)
def test_whole_model_stays_close(name: str) -> None:
    case = golden_prompts("llama")[2]
    driver = PagedDriver(load_model(GOLDEN / "llama", dtype="float32", quant=name))
    logits = driver.prefill({0: case["prompt"]})[0]
    error = np.sqrt(np.mean((logits - case["logits"]) ** 2)) / case["logits"].std()
    assert 0 < error < LOGIT_ERROR[name]


def test_dummy_quantised_weights_have_the_usual_size() -> None:
    for name in FORMATS:
        model = load_model(GOLDEN / "llama", dtype="float32", quant=name, load_format="dummy")
        down = model.params["layers"][0]["mlp"]["down"]
        w = numpy_dequantize(
            name, [np.asarray(down[f"kernel{s}"]) for s in ("", *quant_format(name).suffixes)]
        )
        assert w.std() == pytest.approx(128**-0.5, rel=0.1), name


def test_int4_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 96"):
        Linear(96, 8, dtype=jnp.float32, quant="int4")


def test_fp8_rows_that_cut_blocks_are_fused_first() -> None:
    """q, k and v of 64, 32 and 32 rows share one 128-row block; a stored fp8 tensor could not be
    fused so."""
    layer = load_model(GOLDEN / "llama", dtype="float32", quant="fp8").params["layers"][0]["attn"][
        "qkv"
    ]
    plain = load_model(GOLDEN / "llama", dtype="float32").params["layers"][0]["attn"]["qkv"][
        "kernel"
    ]
    assert layer["kernel"].dtype == ml_dtypes.float8_e4m3fn and layer["kernel_scale"].shape == (
        1,
        1,
    )
    np.testing.assert_allclose(
        np.asarray(layer["kernel"], np.float32) * np.asarray(layer["kernel_scale"]),
        plain,
        rtol=0.07,
        atol=1e-3,
    )
