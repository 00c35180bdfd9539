"""What identifies computed KV: two engines may exchange blocks if and only if theirs are equal.

The KV store keeps pages apart by it, a snapshot carries it. Mesh and pool size are no part of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.kv.block_layout import BlockLayout

FORMAT = 2
"""Of the identity itself: raised when equal fields stop meaning exchangeable contents."""


class CacheIdentity(msgspec.Struct, frozen=True):
    """One cache of the model. entry: shape of a layer's block, or of its row per sequence."""

    kind: str  # "blocks" | "states"
    layers: int
    entry: list[int]
    dtype: str


class KVIdentity(msgspec.Struct, frozen=True):
    """model: `model_fingerprint` of the checkpoint. caches: by the model's name for them."""

    model: str
    dtype: str
    quantization: str | None
    load_format: str
    block_size: int
    caches: dict[str, CacheIdentity]
    format: int = FORMAT

    @classmethod
    def of(cls, fingerprint: str, config: EngineConfig, layout: BlockLayout) -> KVIdentity:
        """The identity of what an engine with this configuration computes."""
        described = layout.describe()
        return cls(
            model=fingerprint,
            dtype=np.dtype(config.dtype).name,
            quantization=config.quantization,
            load_format=config.args.load_format,
            block_size=described["block_size"],
            caches={
                c["name"]: CacheIdentity(c["kind"], c["layers"], c["entry"], c["dtype"])
                for c in described["caches"]
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return msgspec.to_builtins(self)

    def differences(self, found: KVIdentity) -> list[str]:
        """One sentence per field in which `found` is not this one, with both values."""
        return [
            f"{name}: {theirs!r} there, {ours!r} here"
            for name, ours in self.to_dict().items()
            if (theirs := found.to_dict()[name]) != ours
        ]


def model_fingerprint(folder: str | Path) -> str:
    """Equal for equal checkpoints: config.json and samples of every weight file, a few hundred
    kilobytes in all."""
    digest = hashlib.sha256()
    folder = Path(folder)
    if (folder / "config.json").is_file():
        digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            for i in range(32):
                f.seek(size * i // 32)
                digest.update(f.read(4096))
    return digest.hexdigest()[:32]
