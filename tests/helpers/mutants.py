"""Single-line mutants of the product, and which of them the tests notice.

    python tests/helpers/mutants.py                 the ones that once lived: all must be noticed
    python tests/helpers/mutants.py --sample 5      and 5 of every module of mutant_list, by --seed
    python tests/helpers/mutants.py --file scheduler/decode.py --sample 40

A mutant changes one comparison, one boundary, one operator, one constant, one condition, or drops
one keyword argument. It is killed when the mapped tests fail; when they pass it has survived and
its change is printed. docs/mutants.md lists survivors and why each may live.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant_list import KNOWN, TARGETS

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent

COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}


@dataclass(frozen=True)
class Mutant:
    """`source`, which is that of `file`, with its bytes [start, end) replaced by `text`."""

    file: str
    start: int
    end: int
    text: str
    tests: tuple[str, ...]
    source: bytes

    @property
    def changed(self) -> bytes:
        return self.source[: self.start] + self.text.encode() + self.source[self.end :]

    def __str__(self) -> str:
        line = self.source.count(b"\n", 0, self.start) + 1
        old = self.source[self.start : self.end].decode()
        return f"{self.file}:{line}: {' '.join(old.split())!r} -> {self.text!r}"


def known() -> list[Mutant]:
    """The mutants of mutant_list.KNOWN. ValueError for one whose text is not there exactly once."""
    found = []
    for k in KNOWN:
        source = (ROOT / k.file).read_bytes()
        if source.count(k.old.encode()) != 1:
            raise ValueError(f"{k.file}: {k.old!r} occurs {source.count(k.old.encode())} times")
        start = source.index(k.old.encode())
        end = start + len(k.old.encode())
        found.append(Mutant(k.file, start, end, k.new, k.tests, source))
    return found


class Source:
    """A file, and positions in it as offsets."""

    def __init__(self, file: str) -> None:
        self.file, self.data = file, (ROOT / file).read_bytes()
        self.tree = ast.parse(self.data)
        self._lines = [0]
        for line in self.data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> tuple | None:
        """Replaces the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.data.find(old.encode(), start, end)
        return None if at < 0 else (at, at + len(old), new)

    def mutants(self) -> Iterator[Mutant]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assert):
                continue
            for change in self._changes(node):
                if change is not None:
                    mutant = Mutant(self.file, *change, TARGETS[self.file], self.data)
                    if _compiles(mutant.changed):
                        yield mutant

    def _changes(self, node: ast.AST) -> Iterator[tuple | None]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield self.between(left, right, *COMPARE[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            if not isinstance(node.left, ast.Constant | ast.JoinedStr):
                yield self.between(node.left, node.right, *ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield self.between(left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield (self.span(node)[0], self.span(node.operand)[0], "")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield (*self.span(node), new)
        elif isinstance(node, ast.IfExp):
            start, end = self.span(node.test)
            yield (start, end, f"not ({self.data[start:end].decode()})")
        elif isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1:
            for keyword in node.keywords:
                yield self._without(keyword)

    def _without(self, keyword: ast.keyword) -> tuple[int, int, str] | None:
        start, end = self.span(keyword)
        after = self.data[end:].lstrip()
        if after.startswith(b","):
            return start, self.data.index(b",", end) + 1, ""
        before = self.data.rfind(b",", 0, start)
        return (before, end, "") if before >= 0 else None


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def sampled(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of each file, the same for the same seed and source."""
    chosen = []
    for file in files:
        mutants = list(Source(file).mutants())
        chosen += random.Random(f"{seed} {file}").sample(mutants, min(count, len(mutants)))
    return chosen


def verdict(mutant: Mutant, seconds: float) -> str:
    """ "killed", "survived", or "timeout" (a mutant that never ends is noticed too)."""
    with tempfile.NamedTemporaryFile(suffix=".py") as source:
        source.write(mutant.changed)
        source.flush()
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "MUTANT_FILE": mutant.file,
            "MUTANT_SOURCE": source.name,
            "PYTHONPATH": str(HELPERS),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-p", "mutant_loader", *mutant.tests]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                command + options,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}: {done.stdout[-500:]}")
    return "killed" if done.returncode else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="mutants per module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", action="append", help="only these modules")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="for one mutant's tests")
    parser.add_argument("--minutes", type=float, default=60, help="none is started after this")
    args = parser.parse_args()
    mutants = [m for m in known() if not args.file or m.file in args.file]
    mutants += sampled([f for f in TARGETS if f in (args.file or TARGETS)], args.sample, args.seed)
    end, counts = time.monotonic() + 60 * args.minutes, dict.fromkeys(("killed", "timeout"), 0)
    survivors: list[Mutant] = []

    def judge(mutant: Mutant) -> None:
        if time.monotonic() > end:
            return
        result = verdict(mutant, args.seconds)
        if result == "survived":
            survivors.append(mutant)
        else:
            counts[result] += 1
        print(f"{result:9}{mutant}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(judge, mutants))
    skipped = len(mutants) - len(survivors) - sum(counts.values())
    print(f"{counts}, {len(survivors)} survived, {skipped} not tried")
    for mutant in survivors:
        print(f"survived {mutant}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
