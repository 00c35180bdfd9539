"""Token embedding, which is also the output head when the two are tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas import matmul
from deepinfer_jax.models.layers.linear import make_kernel, stored_parts
from deepinfer_jax.models.layers.quant import quant_format


class Embedding(nnx.Module):
    """tokens i32 [T] -> [T, dim]; `attend` uses the same table as the output head. The table is
    replicated.

    quant: stores the table row-wise quantised ("int8" or "int4"); useful when it is also the head,
    which every step reads in full. "fp8" has scales that span rows, so it keeps the table in
    `dtype` (as DeepSeek's checkpoints do).
    """

    def __init__(
        self, vocab_size: int, dim: int, dtype: jnp.dtype, *, quant: str | None = None
    ) -> None:
        self.dtype = dtype
        self.quant = None if quant == "fp8" else quant
        make_kernel(self, "kernel", (vocab_size, dim), (None, None), dtype, self.quant)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.quant is None:
            return jnp.take(self.kernel[...], tokens, axis=0, mode="clip")
        rows = [
            jnp.take(part, tokens, axis=0, mode="clip")
            for part in stored_parts(self, "kernel", self.quant)
        ]
        return quant_format(self.quant).dequantize(self.dtype, *rows)

    def attend(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, dim] -> float32 logits [R, vocab]."""
        return matmul(hidden, stored_parts(self, "kernel", self.quant), out_dtype=jnp.float32)


class LMHead(nnx.Module):
    """The output head when it is not tied: hidden [R, dim] -> float32 logits [R, vocab];
    replicated."""

    def __init__(
        self, dim: int, vocab_size: int, dtype: jnp.dtype, *, quant: str | None = None
    ) -> None:
        self.quant = None if quant == "fp8" else quant
        make_kernel(self, "kernel", (vocab_size, dim), (None, None), dtype, self.quant)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return matmul(hidden, stored_parts(self, "kernel", self.quant), out_dtype=jnp.float32)
