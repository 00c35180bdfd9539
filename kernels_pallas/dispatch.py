"""One table that says which implementation runs an op: (op, platform, compute capability, shapes)
-> function.

Order of preference is the order of the table. An implementation is refused with a reason (wrong
platform, capability, dtype or shape limit) and the next one is tried; the last one of each op is
the XLA path, which takes everything. Overrides, strongest first: the op's `implementation`
argument, then the environment variable
`DEEPINFER_KERNELS="paged_decode=xla,grouped_matmul=mosaic"`. An override that cannot run is an
error, never a silent fallback.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

ENVIRONMENT_VARIABLE = "DEEPINFER_KERNELS"


@dataclass(frozen=True)
class Target:
    """What the traced program is compiled for. capability: CUDA compute capability (major, minor);
    cores: streaming multiprocessors; both None off CUDA."""

    platform: str
    capability: tuple[int, int] | None = None
    cores: int | None = None

    def __str__(self) -> str:
        return (
            self.platform
            if self.capability is None
            else f"{self.platform} sm_{self.capability[0]}{self.capability[1]}"
        )


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    path: "module:function" below this package, imported on first use so that a CPU process never
    loads GPU code. check: "module:function" called with the op's arguments; returns why they are
    refused, or None. None: takes everything. platforms / capabilities: where it runs; an empty
    tuple means everywhere. capabilities are majors.
    """

    op: str
    name: str
    path: str
    platforms: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = ()
    check: str | None = None

    @property
    def is_kernel(self) -> bool:
        return self.path.startswith("mosaic.")


@dataclass(frozen=True)
class Choice:
    """The outcome of one selection: what runs, why, and what was refused (name, reason) on the way.

    is_kernel: whether it is a Mosaic kernel.
    """

    op: str
    target: Target
    name: str
    why: str
    refused: tuple[tuple[str, str], ...]
    is_kernel: bool = False

    def __str__(self) -> str:
        refused = "".join(f"; {name} refused: {reason}" for name, reason in self.refused)
        return f"{self.op} on {self.target}: {self.name} ({self.why}{refused})"


_HOPPER = (("cuda",), (9,))

TABLE: tuple[Implementation, ...] = (
    Implementation(
        "decoder_layers",
        "native",
        "cpu.decoder:decoder_layers_native",
        ("cpu",),
        (),
        "cpu.decoder:unsupported_reason",
    ),
    Implementation("decoder_layers", "unfused", "decoder_layers:unfused_layers"),
    Implementation("kv_write", "xla", "kv_write:kv_write_xla"),
    Implementation(
        "take_blocks",
        "native",
        "cpu.blocks:take_native",
        ("cpu",),
        (),
        "cpu.blocks:unsupported_reason",
    ),
    Implementation("take_blocks", "loop", "copy_blocks:take_loop", ("cpu",)),
    Implementation("take_blocks", "xla", "copy_blocks:take_xla"),
    Implementation(
        "put_blocks",
        "native",
        "cpu.blocks:put_native",
        ("cpu",),
        (),
        "cpu.blocks:unsupported_reason",
    ),
    Implementation("put_blocks", "loop", "copy_blocks:put_loop", ("cpu",)),
    Implementation("put_blocks", "xla", "copy_blocks:put_xla"),
    Implementation(
        "paged_decode",
        "mosaic",
        "mosaic.paged_decode:paged_decode_mosaic",
        *_HOPPER,
        "mosaic.paged_decode:unsupported_reason",
    ),
    Implementation(
        "paged_decode",
        "mosaic_mla",
        "mosaic.mla_decode:mla_decode_mosaic",
        *_HOPPER,
        "mosaic.mla_decode:unsupported_reason",
    ),
    Implementation(
        "paged_decode",
        "native",
        "cpu.paged_decode:paged_decode_native",
        ("cpu",),
        (),
        "cpu.paged_decode:unsupported_reason",
    ),
    Implementation("paged_decode", "xla", "paged_decode:paged_decode_xla"),
    Implementation(
        "ragged_prefill",
        "mosaic",
        "mosaic.ragged_prefill:ragged_prefill_mosaic",
        *_HOPPER,
        "mosaic.ragged_prefill:unsupported_reason",
    ),
    Implementation(
        "ragged_prefill",
        "mosaic_mla",
        "mosaic.mla_decode:mla_prefill_mosaic",
        *_HOPPER,
        "mosaic.mla_decode:prefill_unsupported_reason",
    ),
    Implementation(
        "ragged_prefill",
        "native",
        "cpu.ragged_prefill:ragged_prefill_native",
        ("cpu",),
        (),
        "cpu.ragged_prefill:unsupported_reason",
    ),
    Implementation("ragged_prefill", "xla", "ragged_prefill:ragged_prefill_xla"),
    Implementation(
        "grouped_matmul",
        "mosaic",
        "mosaic.grouped_matmul:grouped_matmul_mosaic",
        *_HOPPER,
        "mosaic.grouped_matmul:unsupported_reason",
    ),
    Implementation("grouped_matmul", "xla", "grouped_matmul:grouped_matmul_xla"),
    Implementation(
        "matmul",
        "mosaic",
        "mosaic.grouped_matmul:matmul_mosaic",
        *_HOPPER,
        "mosaic.grouped_matmul:matmul_unsupported_reason",
    ),
    Implementation(
        "matmul",
        "native",
        "cpu.matmul:matmul_native",
        ("cpu",),
        (),
        "cpu.matmul:unsupported_reason",
    ),
    Implementation(
        "matmul",
        "digits",
        "matmul:matmul_digits",
        ("cpu",),
        (),
        "matmul:digits_unsupported_reason",
    ),
    Implementation("matmul", "xla", "matmul:matmul_xla"),
    Implementation(
        "moe_experts",
        "mosaic",
        "mosaic.grouped_matmul:moe_experts_mosaic",
        *_HOPPER,
        "mosaic.grouped_matmul:experts_unsupported_reason",
    ),
    Implementation("moe_experts", "xla", "grouped_matmul:moe_experts_xla"),
    Implementation("index_topk", "xla", "sparse.index_topk:index_topk_xla"),
    Implementation("sparse_attention", "xla", "sparse.sparse_attention:sparse_attention_xla"),
)

_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "deepinfer_kernel_target", default=None
)
_chosen: dict[Choice, None] = {}


def normalize_platform(platform: str) -> str:
    return {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "tpu": "tpu"}.get(platform, platform)


@contextlib.contextmanager
def use_target(
    platform: str, capability: tuple[int, int] | None = None, cores: int | None = None
) -> Iterator[Target]:
    """Trace the enclosed programs for `platform` ("cpu", "cuda"), CUDA compute capability and
    number of multiprocessors, e.g. ("cuda", (9, 0), 132) for an H200.

    Needed only to choose for a device that is neither the process's default one nor
    `jax.default_device`. Kernels that need to know `cores` refuse to be traced without.
    """
    target = Target(normalize_platform(platform), capability, cores)
    token = _target.set(target)
    try:
        yield target
    finally:
        _target.reset(token)


@functools.cache
def _target_of(device: jax.Device) -> Target:
    platform = normalize_platform(device.platform)
    if platform != "cuda":
        return Target(platform)
    major, minor = str(device.compute_capability).split(".")
    return Target(platform, (int(major), int(minor)), device.core_count)


def current_target() -> Target:
    """The target of `use_target`, else that of `jax.default_device`, else that of the default
    backend."""
    target = _target.get()
    if target is not None:
        return target
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return _target_of(device)


@functools.cache
def _load(path: str) -> Callable:
    module, function = path.split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)


@functools.lru_cache(maxsize=8)
def _parse_overrides(text: str) -> dict[str, str]:
    overrides: dict[str, str] = {}
    ops = {i.op for i in TABLE}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, _, name = item.partition("=")
        names = [i.name for i in TABLE if i.op == op]
        if op not in ops or name not in names:
            known = "; ".join(
                f"{o}={'|'.join(i.name for i in TABLE if i.op == o)}" for o in sorted(ops)
            )
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {item!r} is not one of {known}")
        overrides[op] = name
    return overrides


def _unsupported_reason(
    implementation: Implementation, target: Target, args: tuple, kwargs: dict
) -> str | None:
    if implementation.platforms and target.platform not in implementation.platforms:
        return f"needs {' or '.join(implementation.platforms)}"
    if implementation.capabilities and (
        target.capability is None or target.capability[0] not in implementation.capabilities
    ):
        return (
            "needs compute capability"
            f" {' or '.join(f'{major}.x' for major in implementation.capabilities)}"
        )
    return _load(implementation.check)(*args, **kwargs) if implementation.check else None


def select(
    op: str, args: tuple, kwargs: dict, implementation: str | None = None
) -> tuple[Callable, Choice]:
    """Pick the function that runs `op` on these arguments (arrays or ShapeDtypeStructs) for the
    current target.

    Raises ValueError when an override names an unknown implementation, or one that refuses the
    arguments or the target.
    """
    target = current_target()
    forced, why = implementation, "argument"
    if forced is None:
        forced, why = (
            _parse_overrides(os.environ.get(ENVIRONMENT_VARIABLE, "")).get(op),
            ENVIRONMENT_VARIABLE,
        )
    candidates = [i for i in TABLE if i.op == op and forced in (None, i.name)]
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = _unsupported_reason(candidate, target, args, kwargs)
        if reason is None:
            choice = Choice(
                op,
                target,
                candidate.name,
                why if forced else "first that fits",
                tuple(refused),
                candidate.is_kernel,
            )
            _chosen.setdefault(choice)
            return _load(candidate.path), choice
        refused.append((candidate.name, reason))
    known = [i.name for i in TABLE if i.op == op]
    if forced is not None and forced not in known:
        raise ValueError(f"{op}: unknown implementation {forced!r}; known: {', '.join(known)}")
    raise ValueError(
        f"{op} on {target}: {'; '.join(f'{name} refused: {reason}' for name, reason in refused)}"
    )


def dispatch[R](op: str, *args: object, implementation: str | None = None, **kwargs: object) -> R:
    """What the chosen implementation of `op` returns for these arguments; raises as `select`."""
    function, choice = select(op, args, kwargs, implementation)
    if not choice.is_kernel:
        return function(*args, **kwargs)
    static = {name: value for name, value in kwargs.items() if _is_static(value)}
    arrays = {name: value for name, value in kwargs.items() if name not in static}
    return _traced_once(function, choice.target, tuple(static.items()))(*args, **arrays)


def _is_static(value: object) -> bool:
    return not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))


@functools.cache
def _traced_once(
    function: Callable, target: Target, static: tuple[tuple[str, object], ...]
) -> Callable:
    """`function` as a program of its own inside the caller's.

    A model calls a kernel once per layer with the same shapes. Within `jax.jit` it is traced and
    lowered once for all of them (docs/decisions/070-warm-up.md). The target is part of the key
    because kernels ask for it.
    """
    del target

    # not functools.partial: JAX takes equal partials for one function, whatever the target
    @functools.wraps(function)
    def traced(*args: object, **arrays: object) -> object:
        return function(*args, **dict(static), **arrays)

    return jax.jit(traced)


def choices() -> tuple[Choice, ...]:
    """The distinct choices this process has made so far, in the order made."""
    return tuple(_chosen)


def explain() -> str:
    """One line per distinct choice this process has made so far, in the order made: op, target,
    implementation and why."""
    return "\n".join(str(choice) for choice in _chosen)


def reset_explain() -> None:
    _chosen.clear()
