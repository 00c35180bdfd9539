"""The step programs of a golden model without its weights: for tests of shapes, memory and
compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.models.loading import abstract_model
from deepinfer_jax.runner.mesh import make_mesh
from deepinfer_jax.runner.model_source import ModelSource
from deepinfer_jax.runner.programs import StepPrograms

GOLDEN = Path(__file__).parent.parent / "golden"


def abstract_programs(name: str = "llama", **args: Any) -> StepPrograms:
    engine_args = EngineArgs(str(GOLDEN / name), **args)
    source = ModelSource.find(engine_args)
    config = EngineConfig.resolve(engine_args, source.config)
    graphdef, params, specs = abstract_model(
        source.config, source.model_class, config.axes, config.dtype, config.quantization
    )
    caches = source.model_class.cache_specs(source.config, config.axes, config.kv_dtype)
    mesh = make_mesh(config.axes, jax.devices()[: config.axes.dp * config.axes.tp])
    return StepPrograms(config, source.config, graphdef, params, specs, caches, mesh)
