"""What others may have put into a store's folder: never used, never waited for, replaced."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.kv.store import KVStore, collect, entries
from deepinfer_jax.kv.store_format import (
    EntryError,
    Page,
    chain_keys,
    encode,
    open_page,
    root_key,
    verify_file,
)

LAYOUT = {"model": "m", "block_size": 4}
TOKENS = np.arange(4, dtype=np.int32)
ROOT = root_key(LAYOUT, "", "")
KEY = chain_keys(ROOT, TOKENS, 4)[0]
PAGE = Page(KEY, ROOT, "", "", TOKENS, {"k": np.arange(8, dtype=np.float32).reshape(2, 4)})
ZEROS = b'"header_sha256":"' + b"0" * 64 + b'"'


def store(folder: Path, **options: Any) -> KVStore:
    return KVStore(folder, LAYOUT, fsync=False, **options)


def reads(folder: Path) -> bool:
    """Whether a fresh store reads the page, and reads it right."""
    out = {"k": np.zeros((2, 4), np.float32)}
    found = store(folder).read(KEY, "", "", TOKENS, out)
    assert not found or np.array_equal(out["k"], PAGE.arrays["k"])
    return found


def forged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The page's file with another header, its checksum mended."""
    _, raw, *data = encode(PAGE, LAYOUT)
    header = json.loads(bytes(raw))
    header["__metadata__"]["header_sha256"] = "0" * 64
    changed = change(header)
    raw = changed if isinstance(changed, bytes) else json.dumps(header, separators=(",", ":"))
    raw = raw if isinstance(raw, bytes) else raw.encode()
    digest = hashlib.sha256(raw).hexdigest().encode()
    raw = raw.replace(ZEROS, b'"header_sha256":"' + digest + b'"', 1)
    return struct.pack("<Q", len(raw)) + raw + b"".join(map(bytes, data))


HEADERS = {
    "no metadata": lambda h: b'{"x":{' + ZEROS + b"}}",
    "a list": lambda h: b"[{" + ZEROS + b"}]",
    "no JSON": lambda h: b"xx " + ZEROS,
    "deep": lambda h: b"{" + ZEROS + b',"a":' + b"[" * 300000 + b"]" * 300000 + b"}",
    "metadata is text": lambda h: h.update(__metadata__=json.loads("{" + ZEROS.decode() + "}")),
    "dtype": lambda h: h["k"].update(dtype="Q9"),
    "dtype is a list": lambda h: h["k"].update(dtype=["F32"]),
    "no shape": lambda h: h["k"].pop("shape"),
    "tensor is a number": lambda h: h.update(k=3),
    "huge": lambda h: h["token_ids"].update(shape=[1 << 40]),
    "beyond 64 bits": lambda h: h["token_ids"].update(shape=[1 << 62, 8]),
    "8 GB": lambda h: h["token_ids"].update(shape=[2 * 10**9]),
    "8 GB in all": lambda h: h["token_ids"].update(shape=[2 * 10**9], data_offsets=[0, 8 * 10**9]),
    "negative": lambda h: h["token_ids"].update(shape=[-4]),
    "negative offset": lambda h: h["token_ids"].update(data_offsets=[-16, 0]),
    "text offsets": lambda h: h["token_ids"].update(data_offsets=["a", "b"]),
    "three offsets": lambda h: h["token_ids"].update(data_offsets=[0, 16, 16]),
    "bool offsets": lambda h: h["token_ids"].update(data_offsets=[False, 16]),
    "overlap": lambda h: h["k"].update(data_offsets=[0, 32]),
    "no layout": lambda h: h["__metadata__"].pop("layout"),
    "layout no JSON": lambda h: h["__metadata__"].update(layout="{"),
    "layout a list": lambda h: h["__metadata__"].update(layout="[]"),
    "layout a number": lambda h: h["__metadata__"].update(layout=7),
    "no namespace": lambda h: h["__metadata__"].pop("namespace"),
    "no salt": lambda h: h["__metadata__"].pop("salt"),
    "no checksum": lambda h: h["__metadata__"].pop("crc32:k"),
    "version": lambda h: h["__metadata__"].update(version="9"),
    "another shape": lambda h: h["k"].update(shape=[4, 2]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_is_refused_and_the_page_replaced(tmp_path, name):
    path = store(tmp_path).path(KEY, "")
    path.parent.mkdir(parents=True)
    path.write_bytes(forged(HEADERS[name]))
    own = store(tmp_path)
    assert not own.read(KEY, "", "", TOKENS, {"k": np.zeros((2, 4), np.float32)})
    assert own.counters["corrupt"] + own.counters["foreign"] == 1 and not own.disabled
    assert own.write([PAGE]) == 1 and reads(tmp_path)


PLACED = {
    "fifo": os.mkfifo,
    "folder": lambda p: (p / "inside").mkdir(parents=True),
    "endless": lambda p: p.symlink_to("/dev/zero"),
    "dangling": lambda p: p.symlink_to("/nonexistent/x"),
    "loop": lambda p: p.symlink_to(p.name),
    "empty": lambda p: p.touch(),
    "sparse": lambda p: (p.touch(), os.truncate(p, 1 << 40)),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_is_no_page_is_not_opened_and_gets_replaced(tmp_path, name):
    path = store(tmp_path).path(KEY, "")
    path.parent.mkdir(parents=True)
    PLACED[name](path)
    own = store(tmp_path)
    assert not own.read(KEY, "", "", TOKENS, {"k": np.zeros((2, 4), np.float32)})
    assert own.write([PAGE]) == 1 and reads(tmp_path)
    collect(tmp_path, 0, stale_temps=-1)
    assert not list(entries(tmp_path)) and not list(tmp_path.glob("*/*/*/.*"))


def test_a_real_page_behind_a_link_is_not_used(tmp_path):
    store(tmp_path / "theirs").write([PAGE])
    path = store(tmp_path / "mine").path(KEY, "")
    path.parent.mkdir(parents=True)
    path.symlink_to(store(tmp_path / "theirs").path(KEY, ""))
    assert reads(tmp_path / "theirs") and not reads(tmp_path / "mine")


def test_a_lock_behind_a_link_harms_nobody(tmp_path, caplog):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ".gc.lock").symlink_to(victim)
    own = store(folder, max_bytes=700)
    with caplog.at_level(logging.WARNING):
        own.write([PAGE])
        own.write([Page("ab" * 32, ROOT, "", "", TOKENS, PAGE.arrays)])
    assert victim.read_text() == "precious" and "collecting failed" in caplog.text
    with pytest.raises(OSError, match="symbolic links"):
        collect(folder, 0)


def test_a_collection_keeps_what_another_wrote_into_the_lock(tmp_path):
    (tmp_path / ".gc.lock").write_text("held by 7")
    collect(tmp_path, 0)
    assert (tmp_path / ".gc.lock").read_text() == "held by 7"


def test_files_and_folders_are_their_owners_alone(tmp_path):
    old = os.umask(0o022)
    try:
        store(tmp_path / "deep" / "store", max_bytes=10**6).write([PAGE])
        collect(tmp_path / "deep" / "store", 10**6)
    finally:
        os.umask(old)
    for path in [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_folder_that_others_write_is_pointed_out(tmp_path, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        store(tmp_path / "open")
        assert "other users can write it" in caplog.text
        caplog.clear()
        store(tmp_path / "fresh")
        assert not caplog.text


@pytest.mark.parametrize(
    "namespace", ["../../etc", "a/b", "..", ".", "", "a" * 300, "\0", "\ud800"]
)
def test_no_namespace_leaves_the_folder(tmp_path, namespace):
    path = store(tmp_path).path(KEY, namespace)
    assert path.resolve().is_relative_to(tmp_path.resolve())
    assert len(path.relative_to(tmp_path).parts) == 4


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_a_file_is_an_entry_error(tmp_path_factory, data):
    """Bits flipped, cut or put in anywhere: an EntryError, nothing else, and at once."""
    raw = bytearray(b"".join(map(bytes, encode(PAGE, LAYOUT))))
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del raw[at:]
        case "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    path = tmp_path_factory.mktemp("page") / "p.kv"
    path.write_bytes(raw)
    started = time.monotonic()
    with pytest.raises(EntryError), open_page(path) as file:
        verify_file(file, "p")
    assert time.monotonic() - started < 5
