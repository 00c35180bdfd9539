"""From EngineArgs to what an engine is made of: weights on the mesh, tokenizer, EOS ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from deepinfer_jax.config import EngineArgs, _axes, _dtype
from deepinfer_jax.models.loading import LoadedModel, load_model
from deepinfer_jax.models.resolve import resolve_model_path
from deepinfer_jax.parallel import make_mesh
from deepinfer_jax.tokenizer import Tokenizer, load_eos_token_ids, load_tokenizer


def cache_dir() -> Path:
    """$DEEPINFER_CACHE_DIR, else the XDG cache folder."""
    given = os.environ.get("DEEPINFER_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deepinfer-jax"


def use_compilation_cache() -> None:
    """Lets restarts find compiled programs on disk, unless the user has set a cache folder already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def load_for_engine(args: EngineArgs, devices: Sequence[Any] | None) -> tuple[LoadedModel, Tokenizer | None, tuple[int, ...], Mesh]:
    """(weights, tokenizer or None, EOS ids, mesh) for an engine's arguments."""
    if args.compilation_cache:
        use_compilation_cache()
    folder = resolve_model_path(args.model)
    axes = _axes(args)
    mesh = make_mesh(axes, devices)
    loaded = load_model(
        folder, dtype=_dtype("dtype", args.dtype), quant=args.quantization, mesh=mesh, axes=axes, load_format=args.load_format
    )
    tokenizer = load_tokenizer(folder if args.tokenizer == args.model else resolve_model_path(args.tokenizer))
    eos = load_eos_token_ids(folder) or (tokenizer.eos_token_ids if tokenizer else ())
    return loaded, tokenizer, tuple(eos), mesh
