"""Matrix products with float32, bfloat16, int8 and 4-bit weights on a CPU, at the speed of its memory: C++ called by XLA.

Decode reads every weight once for a few rows. XLA's CPU dots reach the memory's speed for none of these formats
(docs/decisions/011-cpu-matmul.md), so `cpu_matmul.cc` (an XLA FFI custom call) is compiled with the system's C++ compiler on
first use, for this machine's instructions, into the cache folder ($DEEPINFER_CACHE_DIR, else the XDG cache folder).

Without a compiler callers use their XLA formulation: `in_use()` decides that, `status()` says what was decided and why, a
warning is logged once. DEEPINFER_CPU_MATMUL=auto|native|xla overrides; "native" makes a failed build an error.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

from .dispatch import current_target

ENVIRONMENT_VARIABLE = "DEEPINFER_CPU_MATMUL"
INT4_GROUP = 32
FORMATS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "int4": jnp.uint8}
MAX_ROWS = {"f32": 64, "bf16": 8, "int8": 1 << 30, "int4": 1 << 30}
"""From more rows on XLA's float products, which pack the weights first, are faster (docs/decisions/011-cpu-matmul.md)."""
_SOURCE = Path(__file__).with_name("cpu_matmul.cc")
_TARGET_NAME = "deepinfer_cpu_matmul"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """native: whether the compiled product is used; reason: why, or why not; library: the compiled file."""

    native: bool
    reason: str
    library: Path | None = None


def matmul_nt(
    x: jax.Array, weight: jax.Array, *, scale: jax.Array | None = None, group: jax.Array | None = None, format: str | None = None
) -> jax.Array:
    """`x[M, K] . weight[N, K]^T` -> float32 `[M, N]`, activations and sums in float32, by the compiled custom call.

    format (None: by the weight's dtype) and what it stores:
      "f32", "bf16"  weight [N, K]
      "int8"         weight int8 [N, K], scale float32 [N]                                w = q * scale
      "int4"         weight uint8 [N, K/2], group int8 [N, K/32], scale float32 [N]       w = (q - 8) * group * scale;
                     each run of 64 inputs is 32 bytes, its first 32 inputs the low nibbles, the other 32 the high ones
    Raises ValueError for operands that do not fit, RuntimeError where the custom call is not in use (see `in_use`).
    """
    if not in_use():
        raise RuntimeError(f"cpu_matmul is not in use: {status().reason}")
    names = {jnp.dtype(dtype): name for name, dtype in FORMATS.items()}
    found = names.get(jnp.dtype(weight.dtype))
    if found is None or format not in (None, found):
        raise ValueError(f"cpu_matmul: format {format!r} does not fit weights of {weight.dtype}; formats: {', '.join(FORMATS)}")
    operands = _companions(found, x.shape, weight.shape, scale, group)
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET_NAME, out, vmap_method="sequential")(x.astype(jnp.float32), weight, *operands)


def _companions(format: str, x_shape, w_shape, scale, group) -> list[jax.Array]:
    """The operands after the weight, checked: the custom call reads memory by these shapes."""
    n, k = w_shape[0], x_shape[-1]
    wanted = {"int8": {"scale": (n,)}, "int4": {"group": (n, k // INT4_GROUP), "scale": (n,)}}.get(format, {})
    given = {name: v.shape for name, v in (("group", group), ("scale", scale)) if v is not None}
    packing = 2 if format == "int4" else 1
    if len(x_shape) != 2 or tuple(w_shape) != (n, k // packing) or given != wanted or (format == "int4" and k % (2 * INT4_GROUP)):
        raise ValueError(f"cpu_matmul {format}: x {x_shape}, weight {w_shape} and {given} do not fit together, {wanted} expected")
    dtypes = {"group": jnp.int8, "scale": jnp.float32}
    parts = {"group": group, "scale": scale}
    for name in wanted:
        if parts[name].dtype != dtypes[name]:
            raise ValueError(f"cpu_matmul {format}: {name} must be {jnp.dtype(dtypes[name])}, got {parts[name].dtype}")
    return [parts[name] for name in wanted]


def in_use() -> bool:
    """Whether programs traced now can call `matmul_nt`: their target is a CPU and the library is there (built if need be)."""
    return current_target().platform == "cpu" and status().native


def preferred(weight_dtype: jnp.dtype, rows: int) -> bool:
    """Whether `rows` rows times weights of this type should go through `matmul_nt`: it can, and no XLA product is faster."""
    limits = {jnp.dtype(FORMATS[name]): limit for name, limit in MAX_ROWS.items()}
    dtype = jnp.dtype(weight_dtype)
    return dtype in limits and rows <= limits[dtype] and in_use()


def status() -> Status:
    """What runs CPU products in this process, and why. Builds the library on first use; raises RuntimeError when the build
    fails although DEEPINFER_CPU_MATMUL=native, ValueError for an unknown value of it."""
    mode = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if mode not in ("auto", "native", "xla"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be auto, native or xla, got {mode!r}")
    if mode == "xla":
        return Status(False, f"{ENVIRONMENT_VARIABLE}=xla")
    outcome = _load()
    if mode == "native" and not outcome.native:
        raise RuntimeError(f"{ENVIRONMENT_VARIABLE}=native, but {outcome.reason}")
    return outcome


@functools.cache
def _load() -> Status:
    try:
        library = _build()
        handle = ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:
        _logger.warning("CPU matrix products run on XLA, slower than they could: %s", error)
        return Status(False, str(error))
    jax.ffi.register_ffi_target(_TARGET_NAME, jax.ffi.pycapsule(handle.deepinfer_cpu_matmul), platform="cpu")
    return Status(True, "compiled for this machine", library)


def _build() -> Path:
    """The compiled library, from the cache folder if it has one for this source, compiler, machine and jaxlib."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("no C++ compiler found (CXX, c++, g++, clang++)")
    version = _run([compiler, "--version"])
    key = hashlib.sha256("\0".join((_SOURCE.read_text(), version, *_FLAGS, _machine(), jaxlib.__version__)).encode()).hexdigest()
    folder = _cache_dir() / "native"
    library = folder / f"cpu_matmul-{key[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # another process may build the same one: rename is atomic
            built = Path(scratch) / library.name
            _run([compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(built)])
            os.replace(built, library)
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _machine() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _cache_dir() -> Path:
    own = os.environ.get("DEEPINFER_CACHE_DIR")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepinfer-jax").expanduser()
