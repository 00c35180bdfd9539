"""From EngineArgs to what an engine is made of: model configuration, weights on the mesh."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from deepinfer_jax import environ
from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.kernels_pallas.private_files import cache_root, private_folder
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.loading import LoadedModel, load_model, read_model_config
from deepinfer_jax.models.resolve import resolve_model_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model folder read as far as its configuration: enough to check arguments and to plan,
    before any weight is loaded."""

    folder: Path
    model_class: type
    config: Any
    overrides: dict[str, Any]

    @classmethod
    def find(cls, args: EngineArgs) -> ModelSource:
        """Raises CheckpointError for an unknown folder or architecture."""
        folder = resolve_model_path(args.model)
        model_class, config = read_model_config(folder)
        overrides: dict[str, Any] = {}
        if hasattr(config, "moe"):
            overrides["moe"] = _moe_options(args)
        if args.keeps_state_in_blocks and hasattr(config, "reuse_overrides"):
            overrides |= config.reuse_overrides()
        if args.index_cache_dtype != "auto":
            overrides |= _index_overrides(args, config)
        return cls(folder, model_class, dataclasses.replace(config, **overrides), overrides)

    def load(self, config: EngineConfig, mesh: Mesh) -> LoadedModel:
        """The weights, laid over `mesh`."""
        return load_model(
            self.folder,
            dtype=config.dtype,
            quant=config.quantization,
            mesh=mesh,
            axes=config.axes,
            load_format=config.args.load_format,
            config_overrides=self.overrides,
        )


def _index_overrides(args: EngineArgs, config: Any) -> dict[str, Any]:
    if args.index_cache_dtype != "fp8":
        raise ValueError(f"index_cache_dtype must be auto or fp8, got {args.index_cache_dtype!r}")
    if not hasattr(config, "index_overrides"):
        raise ValueError(
            f"index_cache_dtype 'fp8' needs a model with such index keys (DeepSeek-V3.2), got"
            f" {config.model_type!r}"
        )
    return config.index_overrides()


def _moe_options(args: EngineArgs) -> MoeOptions:
    # "auto" is padded everywhere: with the flag that ragged needs, XLA sends more bytes than padded
    # (docs/decisions/031-moe-dispatch.md)
    dispatch = "padded" if args.moe_dispatch == "auto" else args.moe_dispatch
    extra = args.num_redundant_experts
    if extra is None:
        extra = environ.get("OVERRIDE_NUM_EXTRA_EXPERTS", int)
    even = environ.get("FORCE_LOAD_BALANCE", bool)
    options = MoeOptions(
        dispatch=dispatch,
        extra_experts=extra,
        forced_imbalance=1.0 if even else environ.get("FORCE_IMBALANCE_RATIO", float),
    )
    options.check_backend()
    return options


def use_compilation_cache() -> None:
    """Lets restarts find every compiled program on disk: in $DEEPINFER_JIT_CACHE_DIR, else in
    "xla" of the cache folder, which this user alone may enter, since programs are loaded from it.

    A folder that the user names is taken as it is; one given to JAX stays, with the user's limits.
    Where the folder cannot be written a warning says so, and programs are compiled at each start.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        if given := environ.get("JIT_CACHE_DIR", str):
            folder = Path(given)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = private_folder(cache_root() / "xla")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        logger.warning(
            "compiled programs are not kept between starts: %s; DEEPINFER_CACHE_DIR or"
            " DEEPINFER_JIT_CACHE_DIR may name a folder that can be written",
            error,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
