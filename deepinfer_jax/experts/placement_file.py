"""A placement at rest: which slot held which expert, and the loads it was made for.

A safetensors file: i32 `slots` [layers, physical], i32 `loads` [layers, steps, experts], and in its
metadata the format, the placement's version and the ranks. It is written to a temporary name and
moved over the old one, so a reader sees one version or the other. An engine with other slots or
ranks makes its own placement from the loads.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from deepinfer_jax.experts.policy import Policy, RankLayout, balance

FORMAT = "deepinfer-jax expert placement 1"
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class PlacementRecord:
    """version: rearrangements that led here. loads: tokens per expert, none read: 0 steps."""

    version: int
    ranks: int
    slots: Int[np.ndarray, "layers physical"]
    loads: Int[np.ndarray, "layers steps experts"]

    def check(self, layers: int, experts: int, source: str | None = None) -> None:
        """ValueError unless this is of a model with so many layers and experts."""
        have = (self.loads.shape[0], self.loads.shape[2])
        if have != (layers, experts):
            raise ValueError(
                f"expert placement{f' {source}' if source else ''}: {have[0]} layers of {have[1]}"
                f" experts, the model has {layers} of {experts}"
            )

    def slots_for(
        self, num_physical: int, layout: RankLayout, policy: Policy = balance
    ) -> Int[np.ndarray, "layers physical"]:
        """These slots where they are of that number on those ranks, else what the policy makes of
        the loads."""
        if self.slots.shape[1] == num_physical and self.ranks == layout.ranks:
            return self.slots
        return policy(self.loads, num_physical, layout)

    def save(self, path: str | Path) -> None:
        """Writes the file, or leaves the old one as it was. OSError."""
        path = Path(path)
        metadata = {"format": FORMAT, "version": str(self.version), "ranks": str(self.ranks)}
        data = save(self.tensors(), metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    def tensors(self) -> dict[str, np.ndarray]:
        return {
            "slots": np.ascontiguousarray(self.slots, np.int32),
            "loads": np.ascontiguousarray(self.loads, np.int32),
        }

    @classmethod
    def load_if_there(cls, path: str | Path) -> PlacementRecord | None:
        """None when the file does not exist: it will be written."""
        return cls.load(path) if Path(path).exists() else None

    @classmethod
    def load(cls, path: str | Path) -> PlacementRecord:
        """ValueError naming the file and what is wrong with it."""
        try:
            if (size := os.path.getsize(path)) > MAX_BYTES:
                raise ValueError(f"{size} bytes, a placement has at most {MAX_BYTES}")
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls._of(metadata, tensors)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"expert placement {path}: {error}") from error

    @classmethod
    def _of(cls, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> PlacementRecord:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, expected {FORMAT!r}")
        if set(tensors) != {"slots", "loads"}:
            raise ValueError(f"holds {sorted(tensors)}, expected ['loads', 'slots']")
        slots, loads = tensors["slots"], tensors["loads"]
        version, ranks = (int(metadata.get(name, -1)) for name in ("version", "ranks"))
        record = cls(version, ranks, slots, loads)
        record.validate()
        return record

    def validate(self) -> None:
        """ValueError naming what cannot be."""
        slots, loads = self.slots, self.loads
        if slots.ndim != 2 or loads.ndim != 3 or len(slots) != len(loads) or not loads.shape[2]:
            raise ValueError(f"slots of shape {slots.shape} do not go with loads {loads.shape}")
        if slots.dtype != np.int32 or loads.dtype != np.int32 or (loads < 0).any():
            raise ValueError("slots and loads must be int32, loads at least 0")
        if self.version < 0 or self.ranks < 1 or slots.shape[1] % self.ranks:
            raise ValueError(
                f"version {self.version}, {slots.shape[1]} slots on {self.ranks} ranks"
            )
        _check_slots(slots, loads.shape[2])


def _check_slots(slots: Int[np.ndarray, "layers physical"], experts: int) -> None:
    for layer, held in enumerate(slots):
        if held.min(initial=0) < 0 or held.max(initial=0) >= experts:
            raise ValueError(f"layer {layer} names an expert outside 0..{experts - 1}")
        missing = np.setdiff1d(np.arange(experts), held)
        if missing.size:
            raise ValueError(f"layer {layer} has no slot for the experts {missing.tolist()}")
