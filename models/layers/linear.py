"""Linear layers: weights [out, in], plain or quantised, whole or split over the tp axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.kernels_pallas import matmul
from deepinfer_jax.kernels_pallas.decoder_layers import LinearWeights
from deepinfer_jax.kernels_pallas.matmul import Weights
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.layers.param import param, psum_tp
from deepinfer_jax.models.layers.quant import quant_format

WHOLE = ParallelAxes()


class Linear(nnx.Module):
    """`x [..., in] -> [..., out]`, in x's dtype.

    in_features, out_features: global sizes; inside `shard_map` the kernel is this rank's share.
    quant: None, "int8", "int4" or "fp8" (layers/quant.py). tp: None (replicated), "column" (this
    rank's rows of the kernel: the result is this rank's share of the outputs) or
        "row" (this rank's inputs: partial results are summed over tp, then the bias is added once).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        quant: str | None = None,
        tp: str | None = None,
        axes: ParallelAxes = WHOLE,
    ) -> None:
        if tp not in (None, "column", "row"):
            raise ValueError(f'tp must be None, "column" or "row", got {tp!r}')
        split = {None: None, "column": out_features, "row": in_features}[tp]
        if split is not None and split % axes.tp:
            raise ValueError(
                f"a {tp}-parallel linear splits {split} features over tp={axes.tp}, which does not"
                " divide it"
            )
        if tp is not None and quant is not None and axes.tp > 1:
            fmt = quant_format(quant)
            check_blocks(
                split // axes.tp,
                {"column": fmt.row_block, "row": fmt.col_block}[tp],
                f"{quant} with tp={axes.tp}",
            )
        self.quant, self.tp, self.axes = quant, tp, axes
        row_axis, col_axis = ("tp" if tp == "column" else None), ("tp" if tp == "row" else None)
        make_kernel(self, "kernel", (out_features, in_features), (row_axis, col_axis), dtype, quant)
        self.bias = param((out_features,), dtype, (row_axis,), init="zeros") if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.matmul(x)
        if self.tp == "row":
            y = psum_tp(y, self.axes)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def matmul(self, x: jax.Array) -> jax.Array:
        """x . kernel without bias and without the sum over tp."""
        return matmul(x, self.parts())

    def parts(self) -> Weights:
        """The kernel as stored: itself, or with its format's companions."""
        return stored_parts(self, "kernel", self.quant)

    def weights(self) -> LinearWeights:
        """The layer as ops over several layers take it."""
        return LinearWeights(self.parts(), None if self.bias is None else self.bias[...])


def check_blocks(features: int, block: int, what: str) -> None:
    """ValueError when a share of `features` would end inside a scale block."""
    if features % block:
        raise ValueError(
            f"{what}: a share of {features} features is not a multiple of the scale block {block}"
        )


def make_kernel(
    module: nnx.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype,
    quant: str | None,
) -> None:
    """Sets `module.<name>` of shape [..., N, K] split along `axes`; quantised, also its format's
    companions (`<name>_scale`).

    Leading dimensions (stacked experts) are kept in all of them.
    """
    if quant is None:
        setattr(module, name, param(shape, dtype, axes))
        return
    fmt, lead = quant_format(quant), len(shape) - 2
    (kernel_shape, kernel_dtype), *companions = fmt.storage(*shape[-2:])
    setattr(module, name, param((*shape[:lead], *kernel_shape), kernel_dtype, axes, quant=quant))
    for suffix, (part_shape, part_dtype) in zip(fmt.suffixes, companions, strict=True):
        part_axes = axes[: lead + len(part_shape)]
        init = (
            1 / (fmt.random_std * shape[-1] ** 0.5)
            if fmt.random_std and part_dtype == jnp.float32
            else "ones"
        )
        setattr(
            module,
            f"{name}{suffix}",
            param((*shape[:lead], *part_shape), part_dtype, part_axes, init=init),
        )


def stored_parts(module: nnx.Module, name: str, quant: str | None) -> Weights:
    """`module.<name>` and its format's companions, in the order that `matmul` takes them."""
    suffixes = () if quant is None else quant_format(quant).suffixes
    return tuple(getattr(module, f"{name}{suffix}")[...] for suffix in ("", *suffixes))
