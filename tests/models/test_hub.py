"""Hub ids: the local cache first, then huggingface_hub; what is wrong is said."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest
from paged_driver import GOLDEN

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models.resolve import resolve_model_path

COMMIT = "0123abc"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


def fill(cache: Path, *files: str) -> Path:
    """A snapshot of org/name, its files links to blobs as the hub's client makes them."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / COMMIT
    for made in (snapshot, folder / "refs", folder / "blobs"):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file in files:
        shutil.copy(GOLDEN / "llama" / file, folder / "blobs" / f"blob-{file}")
        (snapshot / file).symlink_to(folder / "blobs" / f"blob-{file}")
    return snapshot


def test_a_cached_model_is_found_without_the_hub(cache: Path, monkeypatch) -> None:
    snapshot = fill(cache, "config.json", "model.safetensors")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve_model_path("org/name") == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.parent / "elsewhere"))
    with pytest.raises(CheckpointError, match="org/name is neither a folder nor complete"):
        resolve_model_path("org/name")


def test_a_folder_of_that_name_wins(cache: Path, tmp_path: Path) -> None:
    fill(cache, "config.json", "model.safetensors")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model_path("org/name") == Path("org/name")


def test_what_is_not_complete_is_downloaded(cache: Path, monkeypatch) -> None:
    fill(cache, "config.json")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
        resolve_model_path("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'deepinfer-jax\[hub\]'"):
        resolve_model_path("org/name")
    calls: list[tuple] = []

    def download(model: str, **options: object) -> str:
        calls.append((model, options["cache_dir"]))
        shutil.copy(GOLDEN / "llama" / "model.safetensors", snapshot)
        return str(snapshot)

    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    client = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    assert resolve_model_path("org/name") == snapshot and calls == [("org/name", cache)]
    assert resolve_model_path("org/name") == snapshot and len(calls) == 1


def test_a_failed_download_says_why(cache: Path, monkeypatch) -> None:
    def download(model: str, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    client = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    with pytest.raises(CheckpointError, match="cannot be downloaded: no route to host"):
        resolve_model_path("org/name")


@pytest.mark.parametrize("name", ["nowhere", "/a/b", "../x/y", "a/b/c", "org/../name", "-x/y"])
def test_other_names_are_no_hub_ids(cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no such model"):
        resolve_model_path(name)
