"""One transfer per step: all small host inputs of a program travel as a single int32 array per
rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

Field = tuple[tuple[int, ...], type | np.dtype]


class PackedLayout:
    """Named fields laid out one after another in an int32 row; float32 and uint32 fields travel as
    their bits.

    >>> layout = PackedLayout({"tokens": ((4,), np.int32), "scale": ((), np.float32)})
    >>> layout.size
    5
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = {
            name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in fields.items()
        }
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, (shape, dtype) in self.fields.items():
            if dtype.itemsize != 4:
                raise ValueError(f"field {name}: only 4-byte types can be packed, got {dtype}")
            self.offsets[name] = offset
            offset += math.prod(shape)
        self.size = offset

    def view(self, row: np.ndarray, name: str) -> np.ndarray:
        """A writable view of one field of `row`, in the field's own dtype and shape."""
        shape, dtype = self.fields[name]
        start = self.offsets[name]
        return row[start : start + math.prod(shape)].view(dtype).reshape(shape)

    def unpack(self, row: jax.Array) -> dict[str, jax.Array]:
        """Inside a trace: the fields of `row` (int32 [size])."""
        out = {}
        for name, (shape, dtype) in self.fields.items():
            start = self.offsets[name]
            flat = row[start : start + math.prod(shape)]
            if dtype != np.int32:
                flat = jax.lax.bitcast_convert_type(flat, jnp.dtype(dtype))
            out[name] = flat.reshape(shape)
        return out
