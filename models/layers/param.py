"""Parameters as placeholders: a global shape, a dtype and, per dimension, the logical axis it is
split over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from deepinfer_jax.models.base import ParallelAxes

LOGICAL_AXES = ("expert", "tp")
"""Names a dimension may carry: "expert" is laid over the ep mesh axis, "tp" over the tp mesh axis.
"""

INITS = ("normal", "ones", "zeros")


def param(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    axes: tuple[str | None, ...] | None = None,
    *,
    init: str | float = "normal",
    quant: str | None = None,
) -> nnx.Param:
    """A parameter of global `shape`; built inside `nnx.eval_shape` it holds a ShapeDtypeStruct and
    no memory.

    axes: the logical axis ("expert", "tp" or None) of each dimension; None: replicated. init: how
    `load_format="dummy"` fills it: "normal" (std 1/sqrt(last dimension)), "ones", "zeros" or a
    number. quant: the storage format (layers/quant.py) of this tensor, whose companions
    (`<name>_scale`) lie beside it.
    """
    axes = (None,) * len(shape) if axes is None else tuple(axes)
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axis names {axes} for a parameter of shape {tuple(shape)}")
    if unknown := [a for a in axes if a is not None and a not in LOGICAL_AXES]:
        raise ValueError(f"unknown logical axes {unknown}; known: {LOGICAL_AXES}")
    if not isinstance(init, float) and init not in INITS:
        raise ValueError(f"unknown init {init!r}; known: {INITS}")
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes, init=init, quant=quant)


def partition_spec(variable: nnx.Variable, axes: ParallelAxes) -> PartitionSpec:
    """The PartitionSpec of a parameter made by `param`; axes of size 1 stay in the spec (they
    change nothing)."""
    mesh_axis = {"expert": axes.ep_axis, "tp": axes.tp_axis, None: None}
    logical = variable.get_metadata().get("logical_axes", ())
    return PartitionSpec(*(mesh_axis[name] for name in logical))


def psum_tp(x: jax.Array, axes: ParallelAxes) -> jax.Array:
    """Sum over the tp mesh axis; nothing to do when it has one member."""
    return jax.lax.psum(x, axes.tp_axis) if axes.tp > 1 else x
