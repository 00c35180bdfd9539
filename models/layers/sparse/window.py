"""The sliding window of DeepSeek-V4: the newest keys of a sequence, in a ring per sequence or in
pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.kernels_pallas import KeySource, kv_write
from deepinfer_jax.models.layers.sparse.rings import StepRows, write_ring


def paged_window(
    keys: Float[Array, "T D"],
    pool: Float[Array, "N bs D"],
    step: StepRows,
    window: int,
) -> tuple[KeySource, Float[Array, "N bs D"]]:
    """As `window_source`, with every token's key in pages."""
    batch = step.batch
    pool = kv_write(pool, keys, batch.write_slots)
    back = jnp.arange(window, dtype=jnp.int32)
    positions = jnp.maximum(batch.positions[:, None] - back, 0)
    counts = jnp.minimum(batch.visible, window)
    return KeySource(pool, counts, positions, batch.block_tables, step.sequences), pool


def window_source(
    keys: Float[Array, "T D"],
    ring: Float[Array, "slots L D"],
    step: StepRows,
    window: int,
) -> tuple[KeySource, Float[Array, "slots L D"]]:
    """(each row's own key and the window - 1 before it, the ring with this step's newest keys).

    A decode step writes first and reads the ring alone, which has room for its few rows beside
    their windows. A prefill step, whose rows may be more than a ring holds, reads a copy of its
    sequences' rings beside its own rows.
    """
    batch, length = step.batch, ring.shape[1]
    counts = jnp.minimum(batch.visible, window)
    back = jnp.arange(window, dtype=jnp.int32)
    positions = jnp.maximum(batch.positions[:, None] - back, 0)
    written = write_ring(ring, keys, step)
    if batch.is_decode:
        if batch.q_per_seq > length - window + 1:
            raise ValueError(
                f"a ring of {length} keys has no room for {batch.q_per_seq} rows per sequence"
                f" beside a window of {window}"
            )
        rings = batch.state_slots[:, None]
        return KeySource(written, counts, positions % length, rings, step.sequences), written
    sequences = batch.kv_lens.shape[0]
    before = ring[batch.state_slots].reshape(-1, ring.shape[2]).astype(keys.dtype)
    pool = jnp.concatenate([before, keys])[:, None]
    rows, here = step.row_of(step.sequences, positions)
    old = step.sequences[:, None] * length + positions % length
    places = jnp.where(here, sequences * length + rows, old)
    return KeySource(pool, counts, places.astype(jnp.int32)), written
