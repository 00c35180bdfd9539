"""Show the devices and versions in use and, with --model, the sizes of a model's weights and
caches.

Nothing is loaded: sizes come from the model's configuration. Engine flags (dtype, parallel sizes,
block size) are honoured.

  deepinfer-jax info
  deepinfer-jax info --model demo
"""

from __future__ import annotations

import argparse
import math
import platform
from importlib import metadata
from typing import Any

import numpy as np

from deepinfer_jax import __version__, json_text
from deepinfer_jax.cli import common
from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.flags import add_model_flag

_PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    sections = {"versions": versions(), "devices": devices()}
    if args.model is not None:
        sections |= model_sections(EngineArgs(args.model, **common.engine_values(args)))
    print(json_text.dumps(sections, indent=1) if args.json else _as_text(sections))
    return 0


def versions() -> dict[str, str]:
    """Versions of this package, Python, and what it stands on."""
    found = {"deepinfer-jax": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = metadata.version(name)
    return found


def devices() -> dict[str, Any]:
    """JAX's backend and this process's devices; memory in bytes where the device reports it."""
    import jax

    local = jax.local_devices()
    stats = local[0].memory_stats() or {}
    found: dict[str, Any] = {
        "backend": jax.default_backend(),
        "local": len(local),
        "global": jax.device_count(),
        "kind": local[0].device_kind,
    }
    if "bytes_limit" in stats:
        found["memory_bytes_each"] = stats["bytes_limit"]
    return found


def model_sections(engine_args: EngineArgs) -> dict[str, dict[str, Any]]:
    """The model's shape, the bytes of its weights, and the bytes of its caches: per token, block
    and longest sequence."""
    from deepinfer_jax.models import registry
    from deepinfer_jax.models.loading import load_hf_config

    hf = load_hf_config(engine_args.model)
    model_class = registry.resolve(hf)
    model_config = model_class.config_from_hf(hf)
    config = EngineConfig.resolve(engine_args, model_config)
    return {
        "model": _model_section(model_class, model_config, config),
        "caches": _cache_section(model_class, model_config, config),
    }


def _model_section(model_class: type, model_config: Any, config: EngineConfig) -> dict[str, Any]:
    import jax

    from deepinfer_jax.models.loading import abstract_model

    params = jax.tree.leaves(
        abstract_model(model_config, model_class, config.axes, config.dtype, config.quantization)[1]
    )
    return {
        "path": config.args.model,
        "class": model_class.__name__,
        "layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "heads": (
            f"{model_config.num_heads} query, {model_config.num_kv_heads} key/value,"
            f" {model_config.head_dim} wide"
        ),
        "vocab_size": model_config.vocab_size,
        "max_position_embeddings": model_config.max_position_embeddings,
        "parameters": sum(math.prod(p.shape) for p in params),
        "weight_bytes": sum(math.prod(p.shape) * p.dtype.itemsize for p in params),
        "dtype": (
            np.dtype(config.dtype).name
            + (f", {config.quantization}" if config.quantization else "")
        ),
    }


def _cache_section(model_class: type, model_config: Any, config: EngineConfig) -> dict[str, Any]:
    from deepinfer_jax.models.base import PagedCache
    from deepinfer_jax.runner import kv_pools

    specs = model_class.cache_specs(model_config, config.axes, config.kv_dtype)
    block = kv_pools.bytes_per_block(specs, config.axes, config.block_size)
    return {
        "paged": "; ".join(_spec_text(s) for s in specs if isinstance(s, PagedCache)),
        "block_size": config.block_size,
        "bytes_per_token": block // config.block_size,
        "bytes_per_block": block,
        "max_model_len": config.max_model_len,
        "bytes_per_longest_sequence": config.max_pages * block,
    }


def _spec_text(spec: Any) -> str:
    return f"{spec.name} {spec.layers} x {list(spec.entry_shape)} {np.dtype(spec.dtype).name}"


def _as_text(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for title, values in sections.items():
        lines.append(title)
        lines += [f"  {name:<27}{_readable(name, value)}" for name, value in values.items()]
    return "\n".join(lines)


def _readable(name: str, value: Any) -> str:
    """Large counts with separators; bytes also in binary units ("1,048,576 (1.0 MiB)")."""
    if not isinstance(value, int):
        return str(value)
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return (
        f"{value:,} ({size:.1f} {unit})"
        if "bytes" in name and value >= 1024
        else f"{value:,}"
        if value >= 10000
        else str(value)
    )
