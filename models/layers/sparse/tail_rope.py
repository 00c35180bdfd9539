"""Rotary embedding of a head's last channels, as DeepSeek-V4 lays heads out: [plain, rotated]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.models.layers.rope import apply_rope


def rotate_tail(
    x: Float[Array, "T H D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]
) -> Float[Array, "T H D"]:
    """x with its last 2 R channels rotated, neighbouring channels forming pairs. With -sin it is
    rotated back."""
    plain = x.shape[-1] - 2 * cos.shape[-1]
    rotated: jax.Array = apply_rope(x[..., plain:], cos, sin, interleaved=True)
    return jnp.concatenate([x[..., :plain], rotated], axis=-1)
