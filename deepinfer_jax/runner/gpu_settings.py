"""What XLA and the CUDA client are told on a GPU, each with its reason; what the operator has set
wins.

XLA's flags go with each program as compiler options, so the process's environment stays as it is.
The client's share of memory can only be given by the environment, before the backend starts.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass

from jax.extend.backend import backends

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.94
"""Share of a GPU's memory that the client's pool takes. The rest, 9 GB of an H200, is for what lies
outside the pool: the CUDA context, NCCL's buffers, cuBLAS's workspaces, and instantiated graphs."""

_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_POOL_VARIABLES = (
    *_FRACTION_VARIABLES,
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@dataclass(frozen=True)
class Flag:
    """One XLA flag. since: the jaxlib whose effect was seen."""

    name: str
    value: str | int | bool
    reason: str
    since: str


FLAGS: tuple[Flag, ...] = (
    Flag(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,COLLECTIVES,CONDITIONAL,"
        "WHILE",
        "one graph per step: WHILE and COLLECTIVES are off by default, and outside a graph a while"
        " or a conditional makes the host wait for the device",
        "0.12.0; 0.11.2 takes the flag and leaves while, conditional and collectives outside",
    ),
    Flag(
        "xla_gpu_graph_min_graph_size",
        1,
        "what lies between two kernels of a step is short: no stretch is too small for a graph",
        "0.11.2",
    ),
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "expert exchanges start as early as their inputs allow, beside the shared experts",
        "0.11.2",
    ),
)


def compiler_options(platform: str) -> dict[str, str | int | bool]:
    """Options of `jax.jit` for programs on `platform`; none off the GPU. A flag that XLA_FLAGS
    names is left to it."""
    if platform not in ("gpu", "cuda"):
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return {flag.name: flag.value for flag in FLAGS if f"--{flag.name}=" not in given}


def reserve_memory() -> None:
    """Gives the CUDA client MEMORY_FRACTION of the device; to be called before the backend starts.

    Leaves everything as it is where no CUDA plugin is installed, or the operator has set any of the
    client's memory variables. Warns when the backend runs already, with JAX's share.
    """
    if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        return
    if any(os.environ.get(name) for name in _POOL_VARIABLES):
        return
    if _started():
        if "cuda" in backends():
            logger.warning(
                "JAX's backend runs already, with JAX's default share of the GPU's memory: set"
                " XLA_CLIENT_MEM_FRACTION=%s before the process starts",
                MEMORY_FRACTION,
            )
        return
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)


def _started() -> bool:
    from jax._src import xla_bridge  # jax.extend has no way to ask without starting one

    return xla_bridge.backends_are_initialized()


def memory_fraction() -> float:
    """The share of a GPU's memory that this process's client has or will have."""
    for name in _FRACTION_VARIABLES:
        if given := os.environ.get(name):
            return float(given)
    return 0.75  # JAX's own


def budget_bytes(device_bytes: int, utilization: float, fraction: float = MEMORY_FRACTION) -> int:
    """What an engine may use of a GPU with `device_bytes`: `utilization` of it, within the client's
    pool. Plans and engines ask the same function."""
    return int(device_bytes * min(utilization, fraction))
