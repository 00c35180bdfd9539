"""Building one parameter, or one device's slice of it, on the host from checkpoint rows: fused,
cast, quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.models.checkpoint import Checkpoint
from deepinfer_jax.models.layers.quant import FP8_BLOCK, QuantFormat, expand_blocks, quant_format
from deepinfer_jax.models.rules import Rule, row_pieces, source_rows

CHUNK_BYTES = 8 << 20
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Slot:
    """A parameter to fill: global shape and dtype, its quantisation and whether its rows are split
    over tp."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str | None, ...]
    init: str | Callable[[], np.ndarray]
    quant: str | None

    @classmethod
    def of(cls, path: str, variable: nnx.Variable) -> Slot:
        meta, value = variable.get_metadata(), variable.get_value()
        axes = tuple(meta.get("logical_axes") or (None,) * len(value.shape))
        return cls(
            path,
            tuple(value.shape),
            np.dtype(value.dtype),
            axes,
            meta.get("init", "normal"),
            meta.get("quant"),
        )

    @property
    def format(self) -> QuantFormat | None:
        return None if self.quant is None else quant_format(self.quant)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the float tensor that is stored here."""
        return (
            self.shape
            if self.format is None
            else (*self.shape[:-1], self.shape[-1] * self.format.packing)
        )

    @property
    def companion_paths(self) -> tuple[str, ...]:
        """Paths of the parameters that are stored beside a quantised kernel."""
        return (
            ()
            if self.format is None
            else tuple(f"{self.path}{suffix}" for suffix in self.format.suffixes)
        )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like np.empty, on a 64-byte boundary: what lets a CPU device take the buffer over without a
    copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class RowReader:
    """Rows of one checkpoint tensor (or of one expert of a stacked one), as stored or
    as float32."""

    def __init__(self, checkpoint: Checkpoint, name: str, expert: int | None = None) -> None:
        self.data = checkpoint.read(name) if expert is None else checkpoint.read(name)[expert]
        scale_name = f"{name}_scale_inv"
        self.scale = None
        if scale_name in checkpoint.tensors:
            scale = checkpoint.read(scale_name)
            self.scale = np.asarray(scale if expert is None else scale[expert], np.float32)

    def float_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows as the floats they stand for (a view where the checkpoint holds floats)."""
        rows = self.data[start:stop]
        if self.scale is None:
            return rows
        first = start // FP8_BLOCK * FP8_BLOCK
        blocks = self.scale[first // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        factors = expand_blocks(blocks, stop - first, rows.shape[-1])[start - first :]
        return rows.astype(np.float32) * factors

    def quantized_rows(self, start: int, stop: int, fmt: QuantFormat) -> tuple[np.ndarray, ...]:
        """Rows of the kernel and of its companions in `fmt`; start is a multiple of
        fmt.row_block."""
        if fmt.name == "fp8" and self.scale is not None:
            return self.data[start:stop], self.scale[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        return fmt.quantize(np.asarray(self.float_rows(start, stop), np.float32))


class Materializer:
    """Fills the parameter of `rule` and its companions; `build` reads only the rows that the asked
    slices need.

    slots: the parameter, then the companions of its format, if any.
    """

    def __init__(self, checkpoint: Checkpoint, rule: Rule, slots: list[Slot], tp: int) -> None:
        self.checkpoint, self.rule, self.slot, self.slots = checkpoint, rule, slots[0], slots
        self.lead = 0 if rule.experts is None else 1
        slot = self.slot
        split = len(slot.shape) > self.lead and slot.logical_axes[self.lead] == "tp"
        self.pieces = (
            () if rule.transform else row_pieces(rule, slot.shape[self.lead], tp if split else 1)
        )

    def build(self, indices: list[Index]) -> list[np.ndarray]:
        """One slice (start and stop given) of each slot."""
        if self.rule.transform is not None:
            return self._transformed(indices)
        outs = [
            aligned_empty(_shape(index), slot.dtype)
            for index, slot in zip(indices, self.slots, strict=True)
        ]
        if self.slot.format is None:
            self._fill_float(outs[0], indices[0])
        elif self._cuts_blocks(self.slot.format.row_block):
            self._fill_requantized(outs, indices)
        else:
            self._fill_quantized(outs, indices)
        return outs

    def source_problems(self) -> list[str]:
        """What the checkpoint lacks or has in another shape or dtype, one line each."""
        problems = []
        for source, template in enumerate(self.rule.sources):
            experts = [None] if self.rule.experts is None else sorted(set(self.rule.experts))
            names = {(template.format(e=e) if e is not None else template) for e in experts}
            for name in sorted(names):
                problems += self._check(
                    name,
                    self._expected_shape(source, stacked=self.lead == 1 and "{e}" not in template),
                )
        return problems

    def _check(self, name: str, expected: tuple[int, ...] | None) -> list[str]:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            return [f"missing {name}"]
        wrong = []
        if expected is not None and info.shape != expected:
            wrong.append(f"wrong shape {name}: {info.shape} in the checkpoint, {expected} expected")
        if not jnp.issubdtype(info.dtype, jnp.floating) and jnp.issubdtype(
            self.slot.dtype, jnp.floating
        ):
            wrong.append(f"wrong dtype {name}: {info.dtype} in the checkpoint, a float expected")
        scale = self.checkpoint.tensors.get(f"{name}_scale_inv")
        if scale is None and info.dtype.itemsize == 1:
            wrong.append(f"missing {name}_scale_inv ({name} is {info.dtype})")
        if scale is not None and scale.shape != (
            blocks := (*info.shape[:-2], *(-(-n // FP8_BLOCK) for n in info.shape[-2:]))
        ):
            wrong.append(
                f"wrong shape {name}_scale_inv: {scale.shape} in the checkpoint, {blocks} expected"
            )
        return wrong

    def _expected_shape(self, source: int, stacked: bool) -> tuple[int, ...] | None:
        if self.rule.transform is not None:
            return None if self.rule.source_shapes is None else self.rule.source_shapes[source]
        shape = self.slot.dense_shape[self.lead :]
        rows = source_rows(self.rule, shape[0])[source]
        experts = () if not stacked else (max(self.rule.experts) + 1,)
        return (*experts, rows, *shape[1:])

    def _reader(self, source: int, slot_index: int | None) -> RowReader:
        template = self.rule.sources[source]
        if slot_index is None:
            return RowReader(self.checkpoint, template)
        expert = self.rule.experts[slot_index]
        name = template.format(e=expert)
        return RowReader(self.checkpoint, name, expert if name == template else None)

    def _chunks(
        self, index: Index, block: int
    ) -> Iterator[tuple[tuple[int, ...], RowReader, int, int, int]]:
        """(leading position in the slice, reader, first and last source row, row in the slice) for
        the rows in `index`."""
        rows = index[self.lead]
        leads = [None] if not self.lead else range(index[0].start, index[0].stop)
        for position, slot_index in enumerate(leads):
            for piece in self.pieces:
                first = max(rows.start, piece.target_row)
                last = min(rows.stop, piece.target_row + piece.count)
                if first >= last:
                    continue
                reader = self._reader(piece.source, slot_index)
                offset = piece.start - piece.target_row
                step = _rows_per_chunk(reader.data, block)
                for row in range(first, last, step):
                    stop = min(row + step, last)
                    yield (
                        (() if slot_index is None else (position,)),
                        reader,
                        row + offset,
                        stop + offset,
                        row - rows.start,
                    )

    def _fill_float(self, out: np.ndarray, index: Index) -> None:
        rest = index[self.lead + 1 :]
        for lead, reader, start, stop, row in self._chunks(index, 1):
            values = reader.float_rows(start, stop)[(slice(None), *rest)]
            np.copyto(out[lead][row : row + stop - start], values, casting="unsafe")

    def _fill_quantized(self, outs: list[np.ndarray], indices: list[Index]) -> None:
        fmt = self.slot.format
        blocks = [1] + [fmt.row_block] * len(fmt.suffixes)
        for lead, reader, start, stop, row in self._chunks(indices[0], fmt.row_block):
            parts = reader.quantized_rows(start, stop, fmt)
            for out, part, index, block in zip(outs, parts, indices, blocks, strict=True):
                rest = index[self.lead + 1 :]
                out[lead][row // block : row // block + part.shape[0]] = part[(slice(None), *rest)]

    def _cuts_blocks(self, block: int) -> bool:
        """Whether a scale block of the fused parameter would hold rows of two sources."""
        return any(p.start % block or p.target_row % block for p in self.pieces)

    def _fill_requantized(self, outs: list[np.ndarray], indices: list[Index]) -> None:
        """Fuses as float32 first, for sources whose rows do not fill whole blocks; stored fp8 would
        not survive that."""
        if stored := [
            name for name in self.rule.names() if f"{name}_scale_inv" in self.checkpoint.tensors
        ]:
            raise ValueError(f"{self.slot.path}: fusing {stored} would cut their fp8 blocks in two")
        dense = (*indices[0][:-1], slice(0, self.slot.dense_shape[-1]))
        values = np.empty(_shape(dense), np.float32)
        self._fill_float(values, dense)
        for out, part, index in zip(outs, self.slot.format.quantize(values), indices, strict=True):
            out[...] = part[..., index[-1]]

    def _transformed(self, indices: list[Index]) -> list[np.ndarray]:
        readers = (RowReader(self.checkpoint, name) for name in self.rule.sources)
        tensors = (np.asarray(r.float_rows(0, r.data.shape[0]), np.float32) for r in readers)
        value = np.asarray(self.rule.transform(*tensors))
        if value.shape != self.slot.dense_shape:
            raise ValueError(
                f"{self.slot.path}: its transform made {value.shape}, the parameter is"
                f" {self.slot.dense_shape}"
            )
        parts = (
            (value,)
            if self.slot.format is None
            else self.slot.format.quantize(np.asarray(value, np.float32))
        )
        outs = [
            aligned_empty(_shape(index), slot.dtype)
            for index, slot in zip(indices, self.slots, strict=True)
        ]
        for out, part, index in zip(outs, parts, indices, strict=True):
            np.copyto(out, part[index], casting="unsafe")
        return outs


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)


def _rows_per_chunk(data: np.ndarray, block: int) -> int:
    row_bytes = max(1, data[:1].nbytes * 4 // data.dtype.itemsize)
    return max(1, CHUNK_BYTES // row_bytes // block) * block


def random_experts(slot: Slot, index: Index, experts: tuple[int, ...]) -> np.ndarray:
    """`random_slice` of stacked experts: entry i of the first dimension is expert experts[i], so
    replicas of one are equal."""
    out = aligned_empty(_shape(index), slot.dtype)
    for row, expert in zip(out, experts[index[0]], strict=True):
        row[...] = random_slice(slot, (slice(expert, expert + 1), *index[1:]))[0]
    return out


def random_slice(slot: Slot, index: Index) -> np.ndarray:
    """Deterministic filling for dummy weights: normal with std 1/sqrt(inputs) or a constant, by the
    parameter's `init`.

    Quantised kernels get random bytes; their scales' `init` makes up for it. A block of random
    numbers of prime length is repeated, so rows differ.
    """
    out = aligned_empty(_shape(index), slot.dtype)
    if callable(slot.init):  # data with a start value of its own, such as expert placement
        out[...] = slot.init()[index]
        return out
    if slot.init != "normal":
        out[...] = {"ones": 1, "zeros": 0}.get(slot.init, slot.init)
        return out
    rng = np.random.default_rng(_seed(slot.path, index))
    flat = out.reshape(-1)
    noise = rng.standard_normal(min(flat.size, 1_048_573), np.float32) / np.sqrt(
        max(1, slot.dense_shape[-1])
    )
    if slot.quant in ("int8", "int4"):
        noise = rng.integers(0, 256, noise.size, np.uint8).view(slot.dtype)
    for start in range(0, flat.size, noise.size):
        part = flat[start : start + noise.size]
        np.copyto(part, noise[: part.size], casting="unsafe")
    return out


def _seed(path: str, index: Index) -> list[int]:
    return [*path.encode(), *(s.start for s in index)]
