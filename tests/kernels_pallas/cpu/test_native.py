"""How the C++ is built, kept and loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from deepinfer_jax.kernels_pallas.cpu import native

pytestmark = pytest.mark.skipif(not native.in_use("blocks"), reason=native.status("blocks").reason)
SOURCES = sorted(path.stem for path in Path(native.__file__).parent.glob("*.cc"))


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize(
    ("name", "machine"), [*((name, "native") for name in SOURCES), ("decoder", "x86-64")]
)
def test_compiles_without_warnings(name: str, machine: str, compiler: str):
    if subprocess.run(["which", compiler], capture_output=True).returncode:
        pytest.skip(f"no {compiler} here")
    source = Path(native.__file__).parent / f"{name}.cc"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-march={machine}", "-Werror"]
    command += [*native.WARNINGS, "-isystem", jax.ffi.include_dir(), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_library_loads_into_one_process():
    """Where one does, all do: tests that need one are skipped without it."""
    assert {name: native.status(name).reason for name in SOURCES} == dict.fromkeys(
        SOURCES, "compiled for this machine"
    )


def status_in(cache: Path) -> str:
    """What a new process says of the "blocks" library, with this cache folder."""
    code = (
        "from deepinfer_jax.kernels_pallas.cpu import native; s = native.status('blocks');"
        " print(s.native, s.library or s.reason)"
    )
    env = os.environ | {"DEEPINFER_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr


def test_only_own_libraries_are_loaded(tmp_path: Path):
    """A library planted under the right name, and a lock that is a link to someone's file."""
    cache = tmp_path / "cache"
    library = Path(status_in(cache).split()[1])
    assert library.parent == cache / "native"
    assert [p.stat().st_mode & 0o777 for p in (library.parent, library)] == [0o700, 0o600]
    planted = tmp_path / "planted.cc"
    planted.write_text(
        "#include <cstdlib>\n__attribute__((constructor)) static void f() { std::_Exit(9); }\n"
    )
    subprocess.run(["c++", "-shared", "-fPIC", planted, "-o", library], check=True)
    library.parent.chmod(0o777)
    library.chmod(0o777)
    victim, lock = tmp_path / "victim", library.with_suffix(".lock")
    victim.write_text("precious")
    lock.unlink()
    lock.symlink_to(victim)
    said = status_in(cache)
    assert said.startswith(f"True {library}") and "removed: it may be written by others" in said
    assert victim.read_text() == "precious" and not lock.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_users_folder_is_refused_with_a_reason(tmp_path: Path):
    folder = tmp_path / "native"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    assert status_in(tmp_path).startswith(f"False {folder} belongs to user 65534")
