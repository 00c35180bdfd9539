"""A stack of dense decoder layers and the norm that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas import decoder_layers
from deepinfer_jax.kernels_pallas.decoder_layers import LayerWeights, Result, Rows
from deepinfer_jax.models.base import Caches, StepBatch
from deepinfer_jax.models.layers.norm import RMSNorm

Pool = Float[Array, "N bs KH D"]


class DenseLayer(Protocol):
    """What a layer of the stack offers: itself, and its parameters as plain arrays."""

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        cos: Float[Array, "T half_rotated"],
        sin: Float[Array, "T half_rotated"],
        k_pool: Pool,
        v_pool: Pool,
        batch: StepBatch,
    ) -> tuple[Float[Array, "T hidden"], Pool, Pool]: ...

    def weights(self) -> LayerWeights: ...


def run_layers(
    layers: Sequence[DenseLayer],
    last_norm: RMSNorm,
    x: Float[Array, "T hidden"],
    rotation: tuple[Float[Array, "T half_rotated"], Float[Array, "T half_rotated"]],
    caches: Caches,
    batch: StepBatch,
    *,
    scale: float,
) -> tuple[Float[Array, "T hidden"], Caches]:
    """x through all layers and the last norm, with caches "k" and "v" written.

    rotation: (cos, sin) of every row. scale: of the attention scores. The `decoder_layers` op
    decides whether one call takes the whole stack or each layer runs its own ops.
    """
    cos, sin = rotation

    def unfused() -> Result:
        hidden, keys, values = x, list(caches["k"]), list(caches["v"])
        for i, layer in enumerate(layers):
            hidden, keys[i], values[i] = layer(hidden, cos, sin, keys[i], values[i], batch)
        return Result(last_norm(hidden), tuple(keys), tuple(values))

    result = decoder_layers(
        x,
        Rows(cos, sin, batch.block_tables, batch.kv_lens, batch.write_slots),
        [layer.weights() for layer in layers],
        last_norm.weight[...],
        caches["k"],
        caches["v"],
        row_per_sequence=batch.is_decode and batch.q_per_seq == 1,
        eps=last_norm.eps,
        scale=scale,
        unfused=unfused,
    )
    return result.hidden, {**caches, "k": result.keys, "v": result.values}
