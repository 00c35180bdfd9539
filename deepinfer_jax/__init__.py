"""DeepInfer-JAX: LLM inference in JAX with prefill and decode apart.

Names are imported when first used: `import deepinfer_jax.scheduler` on a machine that only
schedules loads no JAX.

Imports: llm, llm_engine, config, outputs, sampling_params, scheduler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.config import EngineArgs
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.llm_engine import LLMEngine
    from deepinfer_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
    from deepinfer_jax.scheduler.roles import EngineType

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "llm",
    "LLMEngine": "llm_engine",
    "EngineArgs": "config",
    "EngineType": "scheduler.roles",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineType",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
