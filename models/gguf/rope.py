"""GGUF's rope metadata and tensors as Hugging Face rope parameters.

Meanings as in llama.cpp (src/llama-model.cpp, src/llama-context.cpp): a factor without a type is
linear, `rope.scale_linear` is the factor's old name, type "none" switches it off,
`rope.scaling.attn_factor` multiplies cos and sin, and every pair's frequency is divided by its
entry of rope_freqs.weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.models.gguf.reader import GGUFFile, Tensor
from deepinfer_jax.models.layers.rope import RopeConfig, inv_frequencies, yarn_mscale

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FREQUENCIES, LONG, SHORT)
TYPES = ("none", "linear", "yarn", "longrope")


def rope_parameters(file: GGUFFile, dim: int) -> dict[str, Any]:
    """config.json's rope_parameters. dim: rotated width of a head. Raises CheckpointError naming
    the key or tensor that is not supported."""
    if (rotated := file.integer("{arch}.rope.dimension_count", dim)) != dim:
        raise file.fail(
            "{arch}.rope.dimension_count", f"rotating {rotated} of {dim} channels is not supported"
        )
    kind = file.text("{arch}.rope.scaling.type", "linear")
    if kind not in TYPES:
        raise file.fail("{arch}.rope.scaling.type", f"{kind!r} is not one of {TYPES}")
    factor = 1.0 if kind == "none" else _factor(file)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _theta(file)}
    if kind == "yarn":
        rope |= _yarn(file, factor)
    elif factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    _refuse_rest(file, kind)
    return _with_tensors(file, rope, dim, kind)


def _theta(file: GGUFFile) -> float:
    theta = file.number("{arch}.rope.freq_base", 10000.0)
    if theta <= 0:
        raise file.fail("{arch}.rope.freq_base", f"must be positive, got {theta}")
    return theta


def _factor(file: GGUFFile) -> float:
    new, old = "{arch}.rope.scaling.factor", "{arch}.rope.scale_linear"
    key = new if file.get(new) is not None else old
    factor = file.number(key, 0.0)
    if factor < 0:
        raise file.fail(key, f"must not be negative, got {factor}")
    return factor or 1.0  # 0 stands for "not given"


def _yarn(file: GGUFFile, factor: float) -> dict[str, Any]:
    original = "{arch}.rope.scaling.original_context_length"
    length = file.integer(original, file.integer("{arch}.context_length"))
    if length < 1:
        raise file.fail(original, f"must be positive, got {length}")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
    }
    for name in ("beta_fast", "beta_slow"):
        key = f"{{arch}}.rope.scaling.yarn_{name}"
        if file.get(key) is not None:
            yarn[name] = file.number(key)
    multiplier = file.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
    if file.arch == "deepseek2" and multiplier:
        # stored as 0.1 * mscale_all_dim; llama.cpp takes mscale to be the same
        mscale = float(str(np.float32(multiplier * 10)))
        yarn |= {"mscale": mscale, "mscale_all_dim": mscale}
    return yarn


def _refuse_rest(file: GGUFFile, kind: str) -> None:
    """Keys that llama.cpp reads for other architectures: refused unless they change nothing."""
    neutral = {
        "yarn_ext_factor": (1.0,) if kind == "yarn" else (0.0,),
        "yarn_attn_factor": (0.0, 1.0),
        "yarn_log_multiplier": None if file.arch == "deepseek2" and kind == "yarn" else (0.0,),
    }
    for name, values in neutral.items():
        key = f"{{arch}}.rope.scaling.{name}"
        value = file.number(key, -1.0)
        if values is not None and value >= 0 and value not in values:
            raise file.fail(key, f"{value} is not supported")


def _with_tensors(file: GGUFFile, rope: dict[str, Any], dim: int, kind: str) -> dict[str, Any]:
    """The parameters with attn_factor and the frequencies' divisors, where there are any."""
    attention = file.number("{arch}.rope.scaling.attn_factor", 1.0)
    if attention <= 0:
        raise file.fail("{arch}.rope.scaling.attn_factor", f"must be positive, got {attention}")
    divisors = _divisors(file, dim, kind)
    if divisors is None and attention == 1:
        return rope
    if "mscale" in rope:
        raise file.fail("{arch}.rope.scaling.attn_factor", "not supported beside a log multiplier")
    if divisors is None and rope["rope_type"] == "yarn":
        return rope | {"attention_factor": attention * yarn_mscale(rope["factor"], 1.0)}
    if rope["rope_type"] == "default" and attention == 1 and (known := _llama3(rope, divisors)):
        return known
    config = RopeConfig.from_hf({"rope_parameters": rope}, dim)
    plain = inv_frequencies(RopeConfig(dim, config.theta))
    scaled = inv_frequencies(config) / (1.0 if divisors is None else divisors)
    factors = [float(str(v)) for v in (plain / scaled).astype(np.float32)]
    return {
        "rope_type": "longrope",
        "rope_theta": rope["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": attention * config.cos_sin_scale,
    }


def _divisors(file: GGUFFile, dim: int, kind: str) -> np.ndarray | None:
    names = [FREQUENCIES] if FREQUENCIES in file.tensors else []
    if kind == "longrope" and not names:
        names = [name for name in (SHORT, LONG) if name in file.tensors]
        if not names:
            raise file.fail("{arch}.rope.scaling.type", f"'longrope' without {SHORT} and {LONG}")
    found = [_values(file, file.tensors[name], dim) for name in names]
    if len(found) == 2 and not np.array_equal(*found):
        raise file.fail(
            "{arch}.rope.scaling.type", f"{SHORT} and {LONG} differ, which is not supported"
        )
    return found[0] if found else None


def _values(file: GGUFFile, tensor: Tensor, dim: int) -> np.ndarray:
    values = tensor.data.view(np.float32).reshape(-1) if tensor.kind.name == "F32" else np.empty(0)
    if values.shape != (dim // 2,) or not (np.isfinite(values).all() and (values > 0).all()):
        raise file.fail(tensor.name, f"must be {dim // 2} positive float32 values")
    return values


def _llama3(rope: dict[str, Any], divisors: np.ndarray) -> dict[str, Any] | None:
    """Llama 3.1's scaling where the divisors are its own; None where they are others."""
    scaling = {
        "factor": float(round(float(divisors.max()), 4)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    dim, theta = 2 * len(divisors), rope["rope_theta"]
    config = RopeConfig(dim, theta, "llama3", original_max_position=8192, **scaling)
    expected = inv_frequencies(RopeConfig(dim, theta)) / inv_frequencies(config)
    if not np.allclose(divisors, expected, rtol=1e-3):
        return None
    known = {"rope_type": "llama3", "rope_theta": theta, "original_max_position_embeddings": 8192}
    return known | scaling
