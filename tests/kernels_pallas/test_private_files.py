"""What other users can do in a folder that they may write: nothing of theirs is opened, loaded,
truncated or waited for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from deepinfer_jax.kernels_pallas import private_files
from deepinfer_jax.kernels_pallas.private_files import (
    ForeignFileError,
    cache_root,
    locked,
    opened,
    private_folder,
)

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def content(path: Path) -> bytes:
    with opened(path) as handle:
        return os.read(handle, 100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return private_folder(tmp_path / "cache" / "native")


def test_folders_are_made_for_this_user_alone(tmp_path: Path):
    made = private_folder(tmp_path / "a" / "b")
    assert mode(made) == 0o700
    made.chmod(0o777)
    assert mode(private_folder(made)) == 0o700


@ROOT
def test_another_users_folder_is_refused(folder: Path):
    os.chown(folder, 65534, 65534)
    with pytest.raises(ForeignFileError, match="native belongs to user 65534"):
        private_folder(folder)


def test_a_link_is_no_folder(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        private_folder(tmp_path / "link")
    assert mode(tmp_path / "theirs") != 0o700


def test_own_files_are_opened(folder: Path):
    (folder / "x").write_bytes(b"mine")
    assert content(folder / "x") == b"mine"
    with pytest.raises(FileNotFoundError):
        content(folder / "y")


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o777])
def test_files_that_others_may_write_are_refused(folder: Path, bits: int):
    (folder / "x").write_bytes(b"")
    (folder / "x").chmod(bits)
    with pytest.raises(ForeignFileError, match=f"x may be written by others .mode 0{bits:o}"):
        content(folder / "x")
    folder.chmod(0o755)
    private_folder(folder)
    assert not list(folder.iterdir())


@ROOT
def test_another_users_files_are_refused_and_removed(folder: Path):
    (folder / "ours").write_bytes(b"")
    (folder / "theirs").write_bytes(b"")
    os.chown(folder / "theirs", 65534, 65534)
    with pytest.raises(ForeignFileError, match="theirs belongs to user 65534"):
        content(folder / "theirs")
    private_folder(folder)  # nobody else could have got into it since it was made
    assert (folder / "theirs").exists()
    folder.chmod(0o777)
    private_folder(folder)
    assert not (folder / "theirs").exists() and content(folder / "ours") == b""


def test_files_in_a_folder_that_others_may_write_are_refused(folder: Path):
    (folder / "x").write_bytes(b"")
    folder.chmod(0o770)
    with pytest.raises(ForeignFileError, match="native may be written by others"):
        content(folder / "x")


def test_links_and_pipes_are_not_followed(folder: Path):
    (folder / "x").write_bytes(b"mine")
    (folder / "link").symlink_to(folder / "x")
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(ForeignFileError, match="link is a link"):
        content(folder / "link")
    with pytest.raises(ForeignFileError, match="pipe is not a regular file"):
        content(folder / "pipe")
    folder.chmod(0o711)
    private_folder(folder)
    assert {p.name for p in folder.iterdir()} == {"x", "pipe"}


def test_a_lock_keeps_what_its_file_holds(folder: Path):
    (folder / "lock").write_bytes(b"precious")
    with locked(folder / "lock"):
        assert (folder / "lock").read_bytes() == b"precious"
    with locked(folder / "new"):
        assert mode(folder / "new") == 0o600


def test_a_lock_follows_no_link(folder: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (folder / "lock").symlink_to(victim)
    with pytest.raises(ForeignFileError, match="lock is a link"), locked(folder / "lock"):
        pass
    assert victim.read_bytes() == b"precious"


def test_one_holder_at_a_time(folder: Path):
    order: list[str] = []

    def second() -> None:
        with locked(folder / "lock"):
            order.append("second")

    with locked(folder / "lock"):
        waiter = threading.Thread(target=second)
        waiter.start()
        order.append("first")
    waiter.join(30)
    assert order == ["first", "second"]


def test_cache_root_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("DEEPINFER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert cache_root() == Path("/h/.cache/deepinfer-jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path("/h/.cache/deepinfer-jax")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "deepinfer-jax"
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "~/x")
    assert cache_root() == Path("/h/x")


def test_no_home_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DEEPINFER_CACHE_DIR", raising=False)
    monkeypatch.setattr(private_files.Path, "expanduser", no_home)
    with pytest.raises(OSError, match="set DEEPINFER_CACHE_DIR"):
        cache_root()
