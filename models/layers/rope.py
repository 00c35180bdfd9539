"""Rotary position embedding (Su et al., 2021) and its length extensions, as Hugging Face
configurations spell them.

linear: positions divided by `factor`. llama3: by wavelength (Llama 3.1). yarn: Peng et al., 2023,
sections 3.2-3.4, with `mscale` as DeepSeek uses it. longrope: a divisor per frequency (Ding et al.,
2024, section 3), the same for short and long sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.models.layers.rope_parameters import (
    KEYS,
    number,
    numbers,
    original_length,
    rope_parameters,
)

ROPE_TYPES = tuple(KEYS)


@dataclass(frozen=True)
class RopeConfig:
    """dim: rotated width of a head (even); the rest of the head, if any, passes unrotated.
    divisors: of each pair's frequency, longrope only."""

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {self.rope_type!r} is not supported; supported: {ROPE_TYPES}"
            )
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"the rotated head width must be even and positive, got {self.dim}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position <= 0:
            raise ValueError(f"rope type {self.rope_type!r} needs original_max_position_embeddings")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must exceed low_freq_factor, got {self.high_freq_factor} and"
                f" {self.low_freq_factor}"
            )
        if self.rope_type == "yarn" and self.theta <= 1:
            raise ValueError(f"rope type 'yarn' needs rope_theta > 1, got {self.theta}")

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], dim: int | None = None, *, default_theta: float = 10000.0
    ) -> RopeConfig:
        """From config.json in any spelling (see rope_parameters.py).

        dim: rotated width; None: head_dim (or hidden_size / num_attention_heads) times
        partial_rotary_factor. Raises ValueError naming the rope type or key that is not supported,
        missing or out of range.
        """
        rope = rope_parameters(config)
        rope_type = rope["rope_type"]
        if dim is None:
            head_dim = (
                config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            )
            dim = int(
                head_dim * number("partial_rotary_factor", rope.get("partial_rotary_factor", 1))
            )
        original = original_length(config, rope)
        names = ("low_freq_factor", "high_freq_factor", "attention_factor")
        optional = {k: number(k, rope[k]) for k in names if k in rope}
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0 means: not given
        optional |= {k: number(k, rope[k]) for k in names if rope.get(k)}
        if rope_type == "longrope":
            optional |= _longrope(config, rope, dim)
        return cls(
            dim=dim,
            theta=number("rope_theta", rope.get("rope_theta") or default_theta),
            rope_type=rope_type,
            factor=_factor(config, rope, original),
            original_max_position=original,
            truncate=bool(rope.get("truncate", True)),
            **optional,
        )

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin: attention_factor where it is given, else YaRN's attention
        temperature (eq. 22), and 1 for other types."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale_factor(self) -> float:
        """Factor on the softmax scale that DeepSeek applies on top: mscale(factor,
        mscale_all_dim)^2; 1 for other types."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def _factor(config: dict[str, Any], rope: dict[str, Any], original: int) -> float:
    factor = rope.get("factor")
    if factor is not None:
        return number("factor", factor)
    match rope["rope_type"]:
        case "default" | "longrope":
            return 1.0
        case "yarn" if original and config.get("max_position_embeddings"):
            return max(1.0, config["max_position_embeddings"] / original)
    raise ValueError(f"rope type {rope['rope_type']!r} needs a factor")


def _longrope(config: dict[str, Any], rope: dict[str, Any], dim: int) -> dict[str, Any]:
    """Divisors and the factor on cos and sin, sqrt(1 + ln(scale) / ln(original length)) by
    default."""
    short, long = (numbers(k, rope.get(k), dim // 2) for k in ("short_factor", "long_factor"))
    if short != long:
        raise ValueError(
            "rope type 'longrope' is supported only where short_factor equals long_factor: other"
            " ones make keys depend on how long their sequence will become"
        )
    if rope.get("attention_factor") is not None:
        return {"divisors": short}
    original = original_length(config, rope)
    scale = rope.get("factor") or config.get("max_position_embeddings", 0) / max(original, 1)
    if original < 2:
        raise ValueError("rope type 'longrope' needs original_max_position_embeddings")
    attention = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    return {"divisors": short, "attention_factor": attention}


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 when nothing is extended."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inv_frequencies(config: RopeConfig) -> np.ndarray:
    """Angle per position of each rotated pair: float32 [dim / 2]."""
    exponents = np.arange(0, config.dim, 2, dtype=np.float32) / np.float32(config.dim)
    inv_freq = np.float32(1.0) / np.power(np.float32(config.theta), exponents, dtype=np.float32)
    match config.rope_type:
        case "linear":
            return inv_freq / np.float32(config.factor)
        case "llama3":
            return _llama3(inv_freq, config)
        case "yarn":
            return _yarn(inv_freq, config)
        case "longrope":
            return inv_freq / np.asarray(config.divisors, np.float32)
        case _:
            return inv_freq


def _llama3(inv_freq: np.ndarray, c: RopeConfig) -> np.ndarray:
    """Long wavelengths divided by factor, short ones kept, the middle blended."""
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = (
        c.original_max_position / c.low_freq_factor,
        c.original_max_position / c.high_freq_factor,
    )
    blend = (c.original_max_position / wavelength - c.low_freq_factor) / (
        c.high_freq_factor - c.low_freq_factor
    )
    smoothed = (1 - blend) * inv_freq / c.factor + blend * inv_freq
    scaled = np.where(wavelength > longest, inv_freq / c.factor, inv_freq)
    middle = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(middle, smoothed, scaled).astype(np.float32)


def _yarn(inv_freq: np.ndarray, c: RopeConfig) -> np.ndarray:
    """Pairs that turn more than beta_fast times in the original length are kept, under beta_slow
    interpolated."""

    def pair_index(turns: float) -> float:
        return (
            c.dim
            * math.log(c.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(c.theta))
        )

    low, high = pair_index(c.beta_fast), pair_index(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.dim - 1)
    high = high + 0.001 if low == high else high
    interpolated = np.clip((np.arange(c.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (inv_freq / c.factor * interpolated + inv_freq * (1 - interpolated)).astype(np.float32)


def rope_cos_sin(config: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """positions i32 [T] -> (cos, sin) float32 [T, dim / 2], with `cos_sin_scale` applied."""
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(inv_frequencies(config))
    return jnp.cos(angles) * config.cos_sin_scale, jnp.sin(angles) * config.cos_sin_scale


def apply_rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False
) -> jax.Array:
    """Rotates the first 2 * cos.shape[-1] channels of each head of x [T, H, D] and passes the rest.

    interleaved False: channel i pairs with i + dim/2 (Hugging Face Llama). True: 2i pairs with 2i +
    1 (DeepSeek, GPT-J).
    """
    dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = x[..., :dim].astype(jnp.float32)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    else:
        a, b = jnp.split(rotated, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    out = out.astype(x.dtype)
    return out if dim == x.shape[-1] else jnp.concatenate([out, x[..., dim:]], axis=-1)
