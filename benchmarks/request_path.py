"""What one greedy request runs through: functions, files and lines of function bodies.

    python benchmarks/request_path.py [--root FOLDER]

Every function of the product that is called between handing a prompt to `LLM.generate` and its
result is noted (sys.monitoring, all threads); compiling comes before. A line counts if it lies in
the body of a function that was called, its docstring apart; a function inside another one belongs
to the outer one. "whole" counts signatures, decorators and docstrings too. Then the numbers of the
tree itself. --root measures another checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "tests" / "project"))

import source_tree  # noqa: E402

PROMPT = "The capital of France is"


def called_functions(root: Path, disaggregate: str | None) -> set[tuple[str, int]]:
    """(file below root, first line) of every function that one greedy request calls."""
    from deepinfer_jax import LLM, SamplingParams

    limits = dict(max_model_len=128, max_num_seqs=2, num_blocks=64, max_num_batched_tokens=128)
    apart = {} if disaggregate is None else {"disaggregate": disaggregate}
    with LLM("demo", **limits, **apart) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.generate(PROMPT, params, use_tqdm=False)  # whatever happens only once happens here
        return noted(root, lambda: llm.generate(PROMPT, params, use_tqdm=False))


def noted(root: Path, run: Callable[[], object]) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    monitoring = sys.monitoring

    def start(code: CodeType, _offset: int) -> object:
        path = os.path.realpath(code.co_filename)
        if (
            os.path.isfile(path)
            and path.startswith(f"{root}{os.sep}")
            and code.co_name != "<module>"
        ):
            found.add((os.path.relpath(path, root), code.co_firstlineno))
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.PROFILER_ID, "request_path")
    monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, start)
    monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
    try:
        run()
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    return found


def read(path: Path, first_lines: set[int]) -> dict[str, list]:
    """Of the functions that start at first_lines: the lines of their bodies, all their lines, and
    their names."""
    lines: set[int] = set()
    whole: set[int] = set()
    names: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, prefix)
                continue
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            inside = {first} & first_lines
            if inside and not isinstance(child, ast.ClassDef):
                body = child.body[1:] if ast.get_docstring(child) else child.body
                lines.update(n for s in body for n in range(s.lineno, s.end_lineno + 1))
                whole.update(range(first, child.end_lineno + 1))
                names.append(f"{prefix}{child.name}")
            else:
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return {"lines": sorted(lines), "whole": sorted(whole), "functions": sorted(names)}


def summary(root: Path, called: set[tuple[str, int]]) -> dict[str, dict]:
    """file -> what of it was called."""
    by_file: dict[str, set[int]] = {}
    for file, line in called:
        by_file.setdefault(file, set()).add(line)
    files = {file: read(root / file, firsts) for file, firsts in sorted(by_file.items())}
    return {file: entry for file, entry in files.items() if entry["functions"]}


def totals(files: dict[str, dict]) -> list[int]:
    """Files, functions, lines of bodies, whole lines."""
    kinds = ("functions", "lines", "whole")
    return [len(files), *(sum(len(f[kind]) for f in files.values()) for kind in kinds)]


def added(files: dict[str, dict], base: dict[str, dict]) -> dict[str, dict]:
    """What `files` has beyond `base`."""
    new = {}
    for name, entry in files.items():
        old = base.get(name, {})
        rest = {
            kind: list((Counter(values) - Counter(old.get(kind, ()))).elements())
            for kind, values in entry.items()
        }
        if rest["functions"]:
            new[name] = rest
    return new


def measured(root: Path, mode: str) -> dict:
    """One mode in a process of its own: this file again, with that tree's packages."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(source_tree.assembled(root, Path(folder))),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        command = [sys.executable, __file__, "--root", str(root), "--mode", mode]
        out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def tree(root: Path) -> dict[str, int]:
    """Numbers of the source itself."""
    python = source_tree.python_files(root)
    modules = Counter(m.path.parent for m in source_tree.modules(root).values() if not m.is_package)
    folder, most = modules.most_common(1)[0]
    long = sum(len(line) > 100 for p in python for line in p.read_text().splitlines())
    return {
        "import floors": len(source_tree.floors(root)),
        "modules in cycles": sum(map(len, source_tree.cycles(root))),
        "arrows between modules": sum(
            len(source_tree.imports(m, root)) for m in source_tree.modules(root).values()
        ),
        f"most modules in a folder: {folder.relative_to(root)}/": most,
        "lines over 100 columns": long,
        "private reads across packages": len(source_tree.private_reads(root)),
        "functions with untyped parameters": len(source_tree.untyped(root)),
        "product modules over 450 lines": len(source_tree.large_files(root)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to measure")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--files", action="store_true", help="list files and functions too")
    args = parser.parse_args()
    root = args.root.resolve()
    if args.mode:
        called = called_functions(root, None if args.mode == "normal" else args.mode)
        print(json.dumps(summary(root, called)))
        return
    normal, apart = measured(root, "normal"), measured(root, "1P:1D")
    more = added(apart, normal)
    print("| | files | functions | lines of bodies | whole |\n|---|---|---|---|---|")
    for name, files in (("NORMAL", normal), ("1P:1D", apart), ("1P:1D beyond NORMAL", more)):
        print("| {} | {} | {} | {} | {} |".format(name, *totals(files)))
    print("\n| | |\n|---|---|")
    for name, value in tree(root).items():
        print(f"| {name} | {value} |")
    if args.files:
        for title, files in (("NORMAL", normal), ("1P:1D beyond NORMAL", more)):
            print(f"\n{title}")
            for file, entry in sorted(files.items(), key=lambda f: -len(f[1]["lines"])):
                print(f"{len(entry['lines']):5} {file}: {', '.join(entry['functions'])}")


if __name__ == "__main__":
    main()
