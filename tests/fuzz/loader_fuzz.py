"""Damages model files at random and loads them: whatever comes of it, it is a CheckpointError.

python tests/fuzz/loader_fuzz.py --steps 20000 [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.checkpoint import Checkpoint
from deepinfer_jax.models.gguf import convert_gguf
from deepinfer_jax.models.loading import read_model_config
from deepinfer_jax.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("llama", "qwen2", "qwen3_moe", "deepseek_v3_halves")
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    {},
    {"x": {}},
    ["a"] * 100,
)


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut out, repeated or put in, mostly near the start, where headers are."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(result), rng.choice((32, 4096, 1 << 30)))) if result else 0
        match rng.randrange(5):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                result[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x01" + bytes(7)))
            case 2:
                del result[at : at + rng.choice((1, 8, 1000))]
            case 3:
                result[at:at] = result[at : at + 64]
            case 4:
                del result[at:]
    return bytes(result)


def damage_json(rng: random.Random, text: str) -> bytes:
    """One value, somewhere, replaced by an odd one or removed; sometimes bytes as well."""
    value = json.loads(text)
    place, key = value, None
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        parent, key = place, rng.choice(keys)
        place = place[key]
        if rng.random() < 0.4:
            break
    if key is not None and rng.random() < 0.2 and isinstance(parent, dict):
        del parent[key]
    elif key is not None:
        parent[key] = rng.choice(ODD)
    data = json.dumps(value).encode()
    return damage_bytes(rng, data) if rng.random() < 0.1 else data


class Fuzzer:
    """One folder per kind of file, damaged and restored step by step."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self.rng = random.Random(seed)
        self.scratch = scratch
        self.counts: Counter[str] = Counter()
        for name in MODELS:
            shutil.copytree(GOLDEN / name, scratch / name, ignore=shutil.ignore_patterns("*.npz"))
        gguf_files.write(scratch / "m.gguf", metadata={"rope.scaling.factor": 2.0})
        self.gguf = (scratch / "m.gguf").read_bytes()
        self.tokenizers = scratch / "tokenizer"
        (scratch / "converted").mkdir()
        convert_gguf(scratch / "m.gguf", scratch / "converted")
        self.tokenizers.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(scratch / "converted" / name, self.tokenizers)

    def step(self) -> None:
        kinds = (self.config, self.safetensors, self.tokenizer, self.gguf_file)
        kind = self.rng.choices(kinds, weights=(4, 4, 1, 2))[0]
        kind()

    def config(self) -> None:
        folder = self.scratch / self.rng.choice(MODELS)
        self.damaged(folder / "config.json", damage_json, lambda: read_model_config(folder))

    def safetensors(self) -> None:
        folder = self.scratch / self.rng.choice(MODELS)

        def damage(rng: random.Random, data: bytes) -> bytes:
            length = int.from_bytes(data[:8], "little")
            if rng.random() < 0.3:
                return damage_bytes(rng, data)
            header = damage_json(rng, data[8 : 8 + length].decode())
            return len(header).to_bytes(8, "little") + header + data[8 + length :]

        def read() -> None:
            with Checkpoint(folder) as checkpoint:
                for name in checkpoint.tensors:
                    checkpoint.read(name)

        self.damaged(folder / "model.safetensors", damage, read)

    def tokenizer(self) -> None:
        file = self.rng.choice(sorted(self.tokenizers.iterdir()))

        def use() -> None:
            load_tokenizer(self.tokenizers).encode("hello")

        self.damaged(file, damage_json, use)

    def gguf_file(self) -> None:
        target = self.scratch / "out"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        path = self.scratch / "m.gguf"
        self.damaged(path, damage_bytes, lambda: convert_gguf(path, target))

    def damaged(self, file: Path, damage: Callable[..., bytes], use: Callable[[], object]) -> None:
        """Anything but a CheckpointError leaves here, with the damaged file kept beside."""
        original = file.read_bytes()
        content = original.decode() if damage is damage_json else original
        file.write_bytes(damage(self.rng, content))
        try:
            use()
            self.counts["loaded"] += 1
        except CheckpointError:
            self.counts["refused"] += 1
        except BaseException:
            shutil.copy(file, self.scratch / f"culprit-{file.name}")
            raise
        finally:
            file.write_bytes(original)


def run(steps: int, seed: int, scratch: Path) -> Counter[str]:
    """How many damaged files were refused, and how many still loaded."""
    fuzzer = Fuzzer(seed, scratch)
    for step in range(steps):
        try:
            fuzzer.step()
        except BaseException as error:
            error.add_note(f"step {step} of seed {seed}; the file is in {scratch}")
            raise
    return fuzzer.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="loader-fuzz-"))
    counts = run(options.steps, options.seed, scratch)
    shutil.rmtree(scratch)
    print(f"{options.steps} damaged files, seed {options.seed}: {dict(counts)}")


if __name__ == "__main__":
    main()
