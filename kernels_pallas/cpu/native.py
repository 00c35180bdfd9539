"""C++ that XLA calls on a CPU: compiled with the system's compiler on first use, for this machine,
into the cache folder.

Each `<name>.cc` beside this file becomes one library that exports the custom call
`deepinfer_cpu_<name>` (docs/decisions/011-cpu-matmul.md, 012-cpu-decode-step.md). Libraries lie in
`native` of the cache folder (private_files.cache_root); only this user's own are loaded.

Without a compiler callers use their XLA formulation: `in_use()` decides that, `status()` says what
was decided and why, a warning is logged once. DEEPINFER_CPU_NATIVE=auto|native|xla overrides;
"native" makes a failed build an error.
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
import jaxlib

from deepinfer_jax.kernels_pallas import private_files
from deepinfer_jax.kernels_pallas.dispatch import current_target

ENVIRONMENT_VARIABLE = "DEEPINFER_CPU_NATIVE"
_FOLDER = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra")
"""There are none; a newer compiler's are logged at debug level and stop nothing."""

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """native: whether the compiled code is used; reason: why, or why not; library: the compiled
    file."""

    native: bool
    reason: str
    library: Path | None = None


def target_name(name: str) -> str:
    """The custom call that `cpu_<name>.cc` implements."""
    return f"deepinfer_cpu_{name}"


def custom_call(name: str) -> str:
    """`target_name(name)`, ready to be called; RuntimeError where it is not in use."""
    if not in_use(name):
        raise RuntimeError(f"cpu_{name} is not in use: {status(name).reason}")
    return target_name(name)


def in_use(name: str) -> bool:
    """Whether programs traced now can call `cpu_<name>.cc`: their target is a CPU and the library
    is there (built if need be)."""
    return current_target().platform == "cpu" and status(name).native


def status(name: str) -> Status:
    """What runs in this process in place of `cpu_<name>.cc`, and why. Builds the library on first
    use; raises RuntimeError when the build fails although DEEPINFER_CPU_NATIVE=native, ValueError
    for an unknown value of it."""
    mode = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if mode not in ("auto", "native", "xla"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be auto, native or xla, got {mode!r}")
    if mode == "xla":
        return Status(False, f"{ENVIRONMENT_VARIABLE}=xla")
    outcome = _load(name)
    if mode == "native" and not outcome.native:
        raise RuntimeError(f"{ENVIRONMENT_VARIABLE}=native, but {outcome.reason}")
    return outcome


def unsupported_reason(name: str) -> str | None:
    """Why `cpu_<name>.cc` is not in use; None if it is."""
    outcome = status(name)
    return None if outcome.native else outcome.reason


@functools.cache
def _load(name: str) -> Status:
    try:
        library = _build(name)
        with private_files.opened(library) as handle:
            # by a descriptor where that has a name: what was checked is what is loaded. It stays
            # open, for the loader takes a name that it knows for the library that it knows
            descriptor = Path(f"/proc/self/fd/{os.dup(handle)}")
            loaded = ctypes.CDLL(str(descriptor if descriptor.exists() else library))
        handler = getattr(loaded, target_name(name))
    except (OSError, RuntimeError, AttributeError) as error:
        _logger.warning("cpu_%s runs on XLA, slower than it could: %s", name, error)
        return Status(False, str(error))
    jax.ffi.register_ffi_target(target_name(name), jax.ffi.pycapsule(handler), platform="cpu")
    return Status(True, "compiled for this machine", library)


def _build(name: str) -> Path:
    """The compiled library, from the cache folder if it has one for this source, compiler, machine
    and jaxlib."""
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if not compiler:
        raise RuntimeError("no C++ compiler found (CXX, c++, g++, clang++)")
    source = _FOLDER / f"{name}.cc"
    texts = [path.read_text() for path in (source, *sorted(_FOLDER.glob("*.h")))]
    parts = (*texts, _run([compiler, "--version"]), *_FLAGS, _machine(), jaxlib.__version__)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = private_files.private_folder(private_files.cache_root() / "native")
    library = folder / f"cpu_{name}-{key[:24]}.so"
    if not library.exists():
        # the processes of a deployment start together: one builds
        with private_files.locked(folder / f"{library.stem}.lock"):
            if not library.exists():
                _compile(compiler, source, library)
    return library


def _compile(compiler: str, source: Path, library: Path) -> None:
    # in a folder of its own: a build that is cut off leaves no library
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        include = ("-isystem", jax.ffi.include_dir())
        warnings = _run([compiler, *_FLAGS, *WARNINGS, *include, str(source), "-o", str(built)])
        if warnings:
            _logger.debug("%s: %s", source.name, warnings)
        built.chmod(0o600)
        os.replace(built, library)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout + done.stderr


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    )
