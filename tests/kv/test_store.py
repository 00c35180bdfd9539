"""The KV store's files: nothing damaged, foreign or half-written is ever read, whatever happens to
writers and file system."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from deepinfer_jax import cli
from deepinfer_jax.cli.kv import parse_bytes
from deepinfer_jax.kv import store as kv_store
from deepinfer_jax.kv import store_format as kv_store_format
from deepinfer_jax.kv.store import KVStore, collect, entries
from deepinfer_jax.kv.store_format import (
    CorruptEntry,
    EntryError,
    ForeignEntry,
    Page,
    chain_keys,
    root_key,
)
from deepinfer_jax.kv.tiers import HostTier, Prefix, TieredStore

LAYOUT = {"model": "m", "block_size": 4, "caches": {"k": {"dtype": "float32"}}}
SHAPES = {"k": ((2, 4, 3), np.float32), "v": ((2, 4, 3), ml_dtypes.bfloat16)}


def arrays_for(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What a model would compute: depends on the whole prefix."""
    rng = np.random.default_rng(tokens.astype(np.uint32).tolist())
    return {n: rng.standard_normal(shape).astype(dtype) for n, (shape, dtype) in SHAPES.items()}


def pages_of(tokens, layout=LAYOUT, namespace="", salt="") -> list[Page]:
    tokens = np.asarray(tokens, np.int32)
    root = root_key(layout, namespace, salt)
    keys = [root, *chain_keys(root, tokens, 4)]
    out = []
    for i in range(len(keys) - 1):
        prefix = tokens[: 4 * (i + 1)]
        out.append(Page(keys[i + 1], keys[i], namespace, salt, prefix, arrays_for(prefix)))
    return out


def blank() -> dict[str, np.ndarray]:
    return {n: np.zeros(shape, dtype) for n, (shape, dtype) in SHAPES.items()}


def reads(store: KVStore, page: Page) -> bool:
    """Whether the store serves the page; what it serves must be right."""
    out = blank()
    found = store.read(page.key, page.namespace, page.salt, page.tokens, out)
    if found:
        for name, array in page.arrays.items():
            np.testing.assert_array_equal(out[name].view(np.uint8), array.view(np.uint8))
    return found


def test_a_page_comes_back_and_any_safetensors_reader_opens_it(tmp_path):
    store = KVStore(tmp_path, LAYOUT)
    pages = pages_of(range(12))
    assert store.write(pages) == 3 and all(reads(store, p) for p in pages)
    data = load_file(store.path(pages[2].key, ""))
    np.testing.assert_array_equal(data["token_ids"], np.arange(12))
    np.testing.assert_array_equal(data["k"], pages[2].arrays["k"])
    assert store.counters["written"] == 3
    store.write(pages)
    assert store.counters["written"] == 3  # known pages are not written again


def test_a_flipped_bit_at_any_byte_is_detected(tmp_path):
    store, rng = KVStore(tmp_path, LAYOUT), random.Random(1)
    page = pages_of(range(8))[1]
    store.write([page])
    path = store.path(page.key, "")
    good = path.read_bytes()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with open(path, "rb") as f, pytest.raises(EntryError, match=str(path)):
            kv_store_format.read_page(f, str(path), LAYOUT, "", "", page.tokens, blank())
    for length in [0, 1, 7, 8, 9, *rng.sample(range(len(good)), 60)]:
        path.write_bytes(good[:length])
        with open(path, "rb") as f, pytest.raises(CorruptEntry):
            kv_store_format.read_page(f, str(path), LAYOUT, "", "", page.tokens, blank())
    path.write_bytes(good + b"\0")
    with open(path, "rb") as f, pytest.raises(CorruptEntry):
        kv_store_format.verify_file(f, str(path))


def test_a_bad_file_is_named_skipped_and_replaced_by_the_next_save(tmp_path, caplog):
    store, page = KVStore(tmp_path, LAYOUT), pages_of(range(4))[0]
    store.write([page])
    path = store.path(page.key, "")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert not reads(store, page)
    assert str(path) in caplog.text and store.counters["corrupt"] == 1
    assert not store.has(page.key, "") and not reads(store, page)
    store.write([page])
    assert reads(store, page)


def test_foreign_files_are_refused_with_both_values(tmp_path):
    other = LAYOUT | {"model": "other"}
    page, mine = pages_of(range(4), layout=other)[0], pages_of(range(4))[0]
    theirs, store = KVStore(tmp_path, other), KVStore(tmp_path, LAYOUT)
    theirs.write([page])
    assert not reads(store, mine)  # kept apart by folder and key
    target = store.path(mine.key, "")
    target.parent.mkdir(parents=True)
    target.write_bytes(theirs.path(page.key, "").read_bytes())  # somebody copies files around
    with (
        open(target, "rb") as f,
        pytest.raises(ForeignEntry, match="model: 'other' there, 'm' here"),
    ):
        kv_store_format.read_page(f, "x", LAYOUT, "", "", mine.tokens, blank())
    assert not reads(store, mine) and store.counters["foreign"] == 1


def test_equal_keys_of_different_prefixes_never_mix(tmp_path, monkeypatch):
    monkeypatch.setitem(
        globals(), "chain_keys", lambda parent, tokens, size: ["ab" * 32] * (len(tokens) // size)
    )
    store = KVStore(tmp_path, LAYOUT)
    first, second = pages_of([1, 2, 3, 4])[0], pages_of([5, 6, 7, 8])[0]
    long = pages_of([9, 9, 9, 9, 1, 2, 3, 4])[1]  # the same last page after another beginning
    store.write([first])
    assert first.key == second.key == long.key
    assert (
        reads(store, first)
        and not reads(KVStore(tmp_path, LAYOUT), second)
        and not reads(KVStore(tmp_path, LAYOUT), long)
    )
    host = HostTier(1 << 20)
    host.put(first, False)
    assert (
        host.get(first.key, first.tokens) is first and host.get(second.key, second.tokens) is None
    )


def test_namespaces_and_salts_are_apart(tmp_path):
    store = KVStore(tmp_path, LAYOUT)
    pages = [
        pages_of(range(4), namespace=n, salt=s)[0]
        for n in ("", "a", "shared", "a/../b", "." * 3, "x" * 300)
        for s in ("", "s")
    ]
    assert len({p.key for p in pages}) == len(pages)
    for i, page in enumerate(pages):
        assert not reads(store, page)
        store.write([page])
        assert all(reads(store, p) for p in pages[: i + 1])
    assert len(list(entries(tmp_path))) == len(pages)
    assert all(p.is_relative_to(tmp_path) for p in tmp_path.rglob("*.kv"))


# ---- size ----------------------------------------------------------------------------------------


def test_the_least_recently_used_pages_go_first(tmp_path):
    pages = [p for start in range(0, 400, 20) for p in pages_of(range(start, start + 8))]
    size = sum(map(len, kv_store_format.encode(pages[1], LAYOUT)))
    store = KVStore(tmp_path, LAYOUT, max_bytes=10 * size)
    for i in range(0, len(pages), 2):
        store.write(pages[i : i + 2])
        store.touch([p.key for p in pages[:2]], "")
        assert sum(e.nbytes for e in entries(tmp_path)) <= 10 * size
    assert reads(store, pages[0]) and reads(store, pages[1])  # always in use
    assert reads(store, pages[-1]) and not reads(store, pages[2])
    assert store.counters["evicted"] > 20
    for first, second in zip(pages[::2], pages[1::2], strict=True):
        assert reads(store, first) or not reads(
            store, second
        )  # never a later page without the one before


def test_collect_removes_temporary_files_of_dead_writers(tmp_path):
    store = KVStore(tmp_path, LAYOUT)
    store.write(pages_of(range(4)))
    old, new = (next(tmp_path.rglob("*.kv")).with_name(f".{n}.kv.host.1.1.tmp") for n in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert collect(tmp_path, 1 << 30)[0] == 0
    assert not old.exists() and new.exists()


# ---- crashes -------------------------------------------------------------------------------------


def writer(folder: Path, seed: int) -> subprocess.Popen:
    """A process that writes pages for ever; prints a line when it begins."""
    code = (
        "import importlib.util, sys, itertools\nspec ="
        f" importlib.util.spec_from_file_location('cases', {str(Path(__file__))!r})\nm ="
        " importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\nstore ="
        f" m.KVStore({str(folder)!r}, m.LAYOUT, fsync=False)\nprint('go', flush=True)\nfor i in"
        f" itertools.count({seed}):\n    store.write(m.pages_of([i % 50] * 4 + list(range(12))))\n "
        "   store._bad.update(e.path for e in m.entries(store.folder))  # so that known pages are"
        " replaced, too\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_only_whole_pages(tmp_path):
    rng = random.Random(3)
    for attempt in range(6):
        process = writer(tmp_path, attempt * 10)
        process.stdout.readline()
        deadline = time.monotonic() + rng.random() * 0.2
        while time.monotonic() < deadline:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for entry in entries(tmp_path):
            with open(entry.path, "rb") as f:
                kv_store_format.verify_file(f, str(entry.path))
    assert list(entries(tmp_path))


def test_a_writer_that_dies_at_any_call_leaves_old_or_new(tmp_path, monkeypatch):
    """Every system call of a save fails once: what is readable is right, and the next save
    completes it."""
    page = pages_of(range(4))[0]

    class Dies(BaseException):
        pass

    def dying(real, countdown):
        def call(*args, **kwargs):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Dies
            return real(*args, **kwargs)

        return call

    for n in range(1, 12):
        folder = tmp_path / str(n)
        countdown = [n]
        with monkeypatch.context() as patch:
            for target, name in (
                (os, "replace"),
                (os, "fsync"),
                (os, "open"),
                (Path, "mkdir"),
                (kv_store, "encode"),
            ):
                patch.setattr(target, name, dying(getattr(target, name), countdown))
            with contextlib.suppress(Dies):
                KVStore(folder, LAYOUT).write([page])
        for entry in entries(folder):
            with open(entry.path, "rb") as f:
                kv_store_format.verify_file(f, str(entry.path))
        store = KVStore(folder, LAYOUT)
        store.write([page])
        assert reads(store, page)


def test_two_writers_and_a_reader_share_a_folder(tmp_path):
    store = KVStore(tmp_path, LAYOUT, fsync=False)
    processes = [writer(tmp_path, 0) for _ in range(2)]
    for p in processes:
        p.stdout.readline()
    deadline, hits = time.monotonic() + 1.0, 0
    while time.monotonic() < deadline:
        for i in range(50):
            hits += sum(reads(store, page) for page in pages_of([i] * 4 + list(range(12))))
    for p in processes:
        p.kill()
        p.wait()
    assert hits and not store.counters["corrupt"] and not store.counters["foreign"]


# ---- a file system that fails --------------------------------------------------------------------


def check_goes_on_without(store: KVStore, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        for start in range(0, 4000, 8):
            store.write(pages_of(range(start, start + 8)))
    assert store.disabled and store.counters["errors"] >= 1
    assert len([r for r in caplog.records if "requests go on without it" in r.message]) == 1
    assert not store.has("ab" * 32, "") and store.stats()["disabled"]


def test_disk_full(tmp_path, caplog):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
    ).returncode:
        pytest.skip(
            "cannot mount a small tmpfs here; test_every_error_of_the_file_system raises ENOSPC"
            " instead"
        )
    try:
        store = KVStore(mount, LAYOUT)
        check_goes_on_without(store, caplog)
        assert not list(mount.rglob("*.tmp"))
        for entry in entries(mount):
            with open(entry.path, "rb") as f:
                kv_store_format.verify_file(f, str(entry.path))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    """Root may write anywhere, so a file stands where the folder should be."""
    (tmp_path / "store").write_text("not a folder")
    check_goes_on_without(KVStore(tmp_path / "store", LAYOUT), caplog)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO, errno.EROFS])
def test_every_error_of_the_file_system(code, tmp_path, caplog, monkeypatch):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    store = KVStore(tmp_path, LAYOUT)
    check_goes_on_without(store, caplog)
    assert not list(tmp_path.rglob("*.tmp")) and not list(entries(tmp_path))
    monkeypatch.undo()
    store._disabled_until = 0.0  # the time to try again has come
    page = pages_of(range(4))[0]
    assert store.write([page]) == 1 and reads(store, page)


# ---- host memory ---------------------------------------------------------------------------------


def prefix_of(tokens, first=0) -> Prefix:
    tokens = np.asarray(tokens, np.int32)
    root = root_key(LAYOUT, "", "")
    keys = [root, *chain_keys(root, tokens, 4)]
    return Prefix("", "", keys[first], keys[first + 1 :], tokens, first, 4)


def save(tiers: TieredStore, tokens, first=0) -> None:
    prefix = prefix_of(tokens, first)
    pages = [arrays_for(prefix.tokens_to(first + i)) for i in range(len(prefix.keys))]
    tiers.save(prefix, {n: np.stack([p[n] for p in pages]) for n in SHAPES})


def check_load(tiers: TieredStore, tokens, expected: int, first=0) -> None:
    prefix = prefix_of(tokens, first)
    loaded = tiers.load(prefix)
    assert loaded.count == expected
    for i in range(expected):
        for name, array in arrays_for(prefix.tokens_to(first + i)).items():
            np.testing.assert_array_equal(
                loaded.arrays[name][i].view(np.uint8), array.view(np.uint8)
            )


def test_tiers_and_their_counters(tmp_path):
    tiers = TieredStore(SHAPES, KVStore(tmp_path, LAYOUT), host_bytes=1 << 20)
    save(tiers, range(16))
    check_load(tiers, range(16), 4)
    assert tiers.counters["host_hits"] == 4
    fresh = TieredStore(SHAPES, KVStore(tmp_path, LAYOUT), host_bytes=1 << 20)
    check_load(fresh, [*range(16), 7, 7, 7, 7], 4)
    assert (fresh.counters["disk_hits"], fresh.counters["misses"]) == (4, 1)
    check_load(fresh, range(16), 2, first=2)
    assert fresh.counters["host_hits"] == 2  # promoted by the first load
    check_load(fresh, [0, 1, 2, 3, 9, 9, 9, 9], 1)
    tiers.close()
    fresh.close()


def test_a_damaged_page_ends_the_prefix(tmp_path):
    store = KVStore(tmp_path, LAYOUT)
    tiers = TieredStore(SHAPES, store)
    save(tiers, range(20))
    path = store.path(prefix_of(range(20)).keys[2], "")
    path.write_bytes(path.read_bytes()[:-1])
    check_load(tiers, range(20), 2)
    check_load(tiers, range(20), 2)
    assert store.counters["corrupt"] == 1
    save(tiers, range(20))
    check_load(tiers, range(20), 5)
    tiers.close()


def test_write_back_reaches_the_disk_when_memory_is_full_or_at_the_end(tmp_path):
    page = pages_of(range(4))[0]
    tiers = TieredStore(
        SHAPES, KVStore(tmp_path, LAYOUT), host_bytes=8 * page.nbytes, write_back=True
    )
    save(tiers, range(16))
    assert not list(entries(tmp_path))
    for start in range(100, 200, 10):
        save(tiers, range(start, start + 8))
    written = len(list(entries(tmp_path)))
    assert written and tiers.counters["written_back"] == written
    check_load(tiers, range(16), 4)  # gone from memory, not lost
    assert tiers.counters["disk_hits"] >= 1
    tiers.close()
    assert len(list(entries(tmp_path))) == 24
    check_load(TieredStore(SHAPES, KVStore(tmp_path, LAYOUT)), range(190, 198), 2)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    layout = LAYOUT | {"caches": {"k": {"dtype": "float32", "layers": 2, "entry": [4, 3]}}}
    store = KVStore(tmp_path, layout)
    store.write([*pages_of(range(20), layout), *pages_of(range(8), layout, namespace="alice")])
    run = lambda *args: cli.main(["kv", args[0], str(tmp_path), *args[1:]])  # noqa: E731
    assert run("ls") == 0
    out = capsys.readouterr().out
    assert (
        "namespace 'alice'  2 pages" in out
        and "namespace ''  5 pages" in out
        and "model m, 4 tokens per page" in out
        and "7 pages" in out
    )
    assert run("verify") == 0 and "7 pages are good, 0 are bad" in capsys.readouterr().out
    victim = sorted(e.path for e in entries(tmp_path))[3]
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert run("verify", "--delete") == 1
    assert (
        str(victim) in (out := capsys.readouterr().out)
        and "6 pages are good, 1 are bad and removed" in out
    )
    assert run("rm") == 2 and "needs --namespace" in capsys.readouterr().err
    assert run("rm", "--namespace", "alice") == 0 and "removed" in capsys.readouterr().out
    left = list(entries(tmp_path))
    assert (
        run("gc", "--max-bytes", str(left[0].nbytes * 2)) == 0
        and "are left" in capsys.readouterr().out
    )
    assert len(list(entries(tmp_path))) in (1, 2)
    assert run("rm", "--all") == 0 and not list(entries(tmp_path))
    assert run("gc") == 2 and cli.main(["kv", "ls", str(tmp_path / "none")]) == 2
    assert [parse_bytes(x) for x in ("7", "2K", "1.5M", "3GiB")] == [7, 2048, 3 << 19, 3 << 30]
