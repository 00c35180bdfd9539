"""Look after a KV store: a folder of computed prefixes that engines share (EngineArgs.kv_store).

deepinfer-jax kv ls FOLDER                     what is in it, by layout and namespace deepinfer-jax
kv verify FOLDER [--delete]      read every page and check every byte; exit code 1 if one is bad
deepinfer-jax kv gc FOLDER --max-bytes 50G     remove the least recently used pages until so much is
left deepinfer-jax kv rm FOLDER --namespace alice   remove a namespace ("" is the shared one), a
layout, or --all
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from deepinfer_jax.kv.store import Entry, collect, entries, namespace_folder
from deepinfer_jax.kv.store_format import EntryError, open_page, read_header, verify_file

BAD_PAGES = 1
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "verify", "gc", "rm"), help="what to do")
    parser.add_argument("folder", type=Path, help="the store's folder")
    parser.add_argument("--layout", help="only pages of this layout (its id, as ls shows it)")
    parser.add_argument("--namespace", help='only pages of this namespace ("" is the shared one)')
    parser.add_argument("--pages", action="store_true", help="ls: one line per page")
    parser.add_argument("--delete", action="store_true", help="verify: remove bad pages")
    parser.add_argument(
        "--max-bytes", type=parse_bytes, help="gc: the most bytes to leave, such as 800M or 50G"
    )
    parser.add_argument("--all", action="store_true", help="rm: everything")


def run(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a folder")
    return {"ls": _ls, "verify": _verify, "gc": _gc, "rm": _rm}[args.action](args)


def parse_bytes(text: str) -> int:
    """ "800M" -> 838860800; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a number of bytes: {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show_bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _chosen(args: argparse.Namespace) -> Iterator[Entry]:
    wanted = None if args.namespace is None else namespace_folder(args.namespace)
    for entry in entries(args.folder):
        layout, namespace = entry.path.relative_to(args.folder).parts[:2]
        if args.layout in (None, layout) and wanted in (None, namespace):
            yield entry


def _ls(args: argparse.Namespace) -> int:
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in _chosen(args):
        groups[entry.path.relative_to(args.folder).parts[:2]].append(entry)
    for (layout, _), found in sorted(groups.items()):
        about = _describe(found)
        size, newest = sum(e.nbytes for e in found), max(e.used for e in found)
        print(
            f"layout {layout}  namespace {about[1]!r}  {len(found)} pages  {show_bytes(size)}  last"
            f" used {_when(newest)}"
        )
        print(f"  {about[0]}")
        for entry in sorted(found, key=lambda e: e.used) if args.pages else ():
            print(f"  {entry.path.stem}  {show_bytes(entry.nbytes)}  {_when(entry.used)}")
    total = [e for found in groups.values() for e in found]
    print(f"{len(total)} pages, {show_bytes(sum(e.nbytes for e in total))}")
    return 0


def _describe(found: list[Entry]) -> tuple[str, str]:
    """(what the pages are, their namespace), from the first one that can be read."""
    for entry in found:
        with (
            contextlib.suppress(OSError, EntryError, LookupError, TypeError),
            open_page(entry.path) as file,
        ):
            header = read_header(file, str(entry.path))
            layout = header.layout
            caches = ", ".join(
                f"{n} {c['layers']} x {c['entry']} {c['dtype']}"
                for n, c in layout["caches"].items()
            )
            return (
                f"model {layout['model']}, {layout['block_size']} tokens per page, caches {caches}",
                header.meta["namespace"],
            )
    return "no readable page", "?"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _verify(args: argparse.Namespace) -> int:
    good = bad = 0
    for entry in _chosen(args):
        try:
            with open_page(entry.path) as file:
                header = verify_file(file, str(entry.path))
            if header.meta.get("key") != entry.path.stem:
                raise EntryError(f"{entry.path}: holds page {header.meta.get('key')}")
            if not header.layout:
                raise EntryError(f"{entry.path}: says nothing of its layout")
            good += 1
        except FileNotFoundError:
            continue  # collected meanwhile
        except EntryError as error:
            bad += 1
            print(error)
            if args.delete:
                entry.path.unlink(missing_ok=True)
    print(f"{good} pages are good, {bad} are bad{' and removed' if bad and args.delete else ''}")
    return BAD_PAGES if bad else 0


def _gc(args: argparse.Namespace) -> int:
    if args.max_bytes is None:
        raise ValueError("gc needs --max-bytes")
    if args.layout is not None or args.namespace is not None:
        raise ValueError(
            "gc looks at the whole folder: --layout and --namespace are for ls, verify and rm"
        )
    removed, freed, left = collect(args.folder, args.max_bytes)
    print(f"removed {removed} pages, {show_bytes(freed)}; {show_bytes(left)} are left")
    return 0


def _rm(args: argparse.Namespace) -> int:
    if args.layout is None and args.namespace is None and not args.all:
        raise ValueError("rm needs --namespace, --layout or --all")
    removed = freed = 0
    for entry in _chosen(args):
        entry.path.unlink(missing_ok=True)
        removed, freed = removed + 1, freed + entry.nbytes
    print(f"removed {removed} pages, {show_bytes(freed)}")
    return 0
