"""Folders and files that nobody but this user can have put there: what a process loads as code, and
the locks beside it.

A cache folder may lie where several users can write (/tmp, a shared file system). So folders are
made for this user only, and nothing is followed, truncated or loaded that belongs to someone else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


class ForeignFileError(OSError):
    """A file or folder belongs to another user, or others may write to it."""


def cache_root() -> Path:
    """$DEEPINFER_CACHE_DIR, else $XDG_CACHE_HOME/deepinfer-jax, else ~/.cache/deepinfer-jax.

    Raises OSError naming DEEPINFER_CACHE_DIR where there is no home folder.
    """
    own, base = os.environ.get("DEEPINFER_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return Path(base or "~/.cache").expanduser() / "deepinfer-jax"
    except RuntimeError as error:  # Path.expanduser without a home
        raise OSError(f"no cache folder, set DEEPINFER_CACHE_DIR: {error}") from error


def private_folder(path: Path) -> Path:
    """`path`, made with its parents if need be, which this user alone may enter.

    A folder of this user that others could enter is closed to them, and what they may have put
    there is removed: links, other users' files, and files that others may write. Raises
    ForeignFileError for another user's folder and for a link, OSError where it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    handle = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        info = os.fstat(handle)
        if info.st_uid != os.geteuid():
            raise ForeignFileError(f"{path} {_foreign(info)}")
        if info.st_mode & 0o077:
            os.fchmod(handle, 0o700)
            _remove_foreign(path)
    finally:
        os.close(handle)
    return path


def _remove_foreign(folder: Path) -> None:
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        info = entry.stat(follow_symlinks=False)
        reason = "is a link" if stat.S_ISLNK(info.st_mode) else _foreign(info)
        if reason is None:
            continue
        if entry.is_dir(follow_symlinks=False):
            raise ForeignFileError(f"{entry.path} is a folder and {reason}")
        os.unlink(entry.path)
        logger.warning("%s removed: it %s", entry.path, reason)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, made if need be; waits for whoever holds it.

    Never truncates what is there. Raises ForeignFileError for a link and for another user's file.
    """
    handle = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        _check_file(path, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the file `path`, for reading.

    Raises ForeignFileError unless it is a regular file that only this user may write, in a folder
    that only this user may write; FileNotFoundError if there is none. What is checked is what the
    descriptor stands for, so nothing can be put in its place afterwards.
    """
    folder = _open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if reason := _foreign(os.fstat(folder)):
            raise ForeignFileError(f"{path.parent} {reason}")
        handle = _open(path, os.O_RDONLY, folder)
    finally:
        os.close(folder)
    try:
        _check_file(path, handle)
        yield handle
    finally:
        os.close(handle)


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    """folder: a descriptor of the folder that holds `path`, which then need not be looked up."""
    name = path if folder is None else path.name
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not stop the process
    try:
        return os.open(name, flags, 0o600, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink():
            raise ForeignFileError(f"{path} is a link") from error
        raise


def _check_file(path: Path, handle: int) -> None:
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        raise ForeignFileError(f"{path} is not a regular file")
    if reason := _foreign(info):
        raise ForeignFileError(f"{path} {reason}")


def _foreign(info: os.stat_result) -> str | None:
    """Why a file is not to be trusted; None if it is this user's alone to write."""
    if info.st_uid != os.geteuid():
        return f"belongs to user {info.st_uid}, this process runs as {os.geteuid()}"
    if info.st_mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None
