"""The product's own source, read without importing it: modules, what each imports, and what the
house rules count.

A module's name is the one it is imported by, without the leading `deepinfer_jax.`: `config`,
`engine.llm_engine`, `scheduler.routing.router`. A *unit* is what may be named in a line
`Imports: a, b.` of a docstring: a folder with an `__init__.py`, or a plain module directly in
`deepinfer_jax/`.

Run as a program it takes the mended places off tests/project/known.txt.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACADE = "deepinfer_jax"
KNOWN = ROOT / "tests" / "project" / "known.txt"  # places that do not hold a rule yet
BESIDE = ("scheduler", "models", "kernels_pallas", "launch")  # imported as deepinfer_jax.NAME
IMPORTS_LINE = re.compile(r"Imports: ([^.]*(?:\.\w[^.]*)*)\.(?:\s|$)")


@dataclass(frozen=True)
class Module:
    """One .py file of the product. name: "" is `deepinfer_jax/__init__.py` itself."""

    name: str
    path: Path
    is_package: bool

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The package whose `__init__` this is or in which it lies."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def unit(self) -> str:
        return self.package or self.name or FACADE

    @property
    def shown(self) -> str:
        return self.name or FACADE


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the product, by name."""
    found = {}
    for top in (FACADE, *BESIDE):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root / FACADE if top == FACADE else root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Module(name, path, is_package)
    return found


def assembled(root: Path, folder: Path) -> Path:
    """A link to every module and package in `folder`/deepinfer_jax, as they are imported: for tools
    that know only packages that lie where their names say. Returns folder."""
    package = folder / FACADE
    package.mkdir(parents=True, exist_ok=True)
    entries = [*(root / FACADE).iterdir(), *(root / name for name in BESIDE)]
    for entry in entries:
        if entry.name != "__pycache__" and not (package / entry.name).exists():
            (package / entry.name).symlink_to(entry)
    return folder


def units(root: Path = ROOT) -> dict[str, Module]:
    """The module whose docstring says what a unit may import, by unit."""
    all_modules = modules(root)
    found = {m.unit: m for m in all_modules.values() if m.is_package}
    return found | {m.unit: m for m in all_modules.values() if m.unit == m.name}


def declared_imports(module: Module) -> tuple[str, ...] | None:
    """The units named in the docstring's line `Imports: a, b.`; None without such a line."""
    match = IMPORTS_LINE.search(ast.get_docstring(module.tree) or "")
    if match is None:
        return None
    names = [name.strip() for name in match[1].split(",")]
    return () if names == ["nothing of ours"] else tuple(names)


def imports(module: Module, root: Path = ROOT, tables: bool = True) -> set[str]:
    """Names of the modules that this one imports anywhere: at the top, inside a function, or for
    annotations only. tables: also those that it names in strings and loads with import_module."""
    known = modules(root)
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {_short(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            if base is not None:
                found |= {_source(base, alias.name, root) for alias in node.names}
    if tables and "import_module" in module.text:
        found |= {name for text in _strings(module.tree) for name in _named(module, text, known)}
    return {name for name in found if name in known} - {module.name}


def _short(name: str) -> str:
    """`deepinfer_jax.config` -> `config`; a name that is not ours -> one that no module has."""
    if name == FACADE:
        return ""
    return name.removeprefix(f"{FACADE}.") if name.startswith(f"{FACADE}.") else "?"


def _base(module: Module, node: ast.ImportFrom) -> str | None:
    """What stands behind `from`, as our own module's name; None if it is not ours."""
    if node.level == 0:
        name = _short(node.module or "")
        return None if name == "?" else name
    parts = module.package.split(".") if module.package else []
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *(node.module or "").split(".")]).strip(".")


def _source(base: str, name: str, root: Path) -> str:
    """The module that `from base import name` reaches: a submodule, or for a name that the facade
    exports, the module that it comes from."""
    below = f"{base}.{name}" if base else name
    if below in modules(root):
        return below
    return _exports(root).get(name, base) if base == "" else base


@functools.cache
def _exports(root: Path) -> dict[str, str]:
    for node in modules(root)[""].tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            return ast.literal_eval(node.value)
    return {}


def _strings(tree: ast.Module) -> Iterator[str]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield from [node.value] if isinstance(node.value, str) else []


def _named(module: Module, text: str, known: dict[str, Module]) -> Iterator[str]:
    """Modules that a string of a table means: `deepinfer_jax.cli.chat`, or `cpu.matmul:function`
    below the module's own package."""
    path = text.partition(":")[0].rstrip(".")  # "deepinfer_jax.launch." begins an f-string
    if path.startswith(f"{FACADE}."):
        yield _short(path)
    elif re.fullmatch(r"\w+(\.\w+)*", path):
        below = f"{module.package}.{path}" if module.package else path
        if below in known and (":" in text or "." in path or module.name == ""):
            yield below


def cycles(root: Path = ROOT) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, each sorted. Tables of strings do not count: a row
    is looked up only after all modules are there."""
    graph = {name: imports(m, root, tables=False) for name, m in modules(root).items()}
    return cyclic(graph)


def cyclic(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of nodes that reach each other, each sorted."""
    return [tuple(sorted(group)) for group in components(graph) if len(group) > 1]


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def package_imports(root: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """unit -> unit that it imports -> the modules that do."""
    found: dict[str, dict[str, list[str]]] = {unit: {} for unit in units(root)}
    for module in modules(root).values():
        for name in sorted(imports(module, root)):
            other = modules(root)[name].unit
            if other != module.unit:
                found[module.unit].setdefault(other, []).append(module.shown)
    return found


def floors(root: Path = ROOT) -> list[str]:
    """The longest chain of imports between modules, from the top down; members of a cycle stand on
    one floor."""
    graph = {name: imports(m, root, tables=False) for name, m in modules(root).items()}
    groups = components(graph)  # those that are imported come first
    home = {name: i for i, group in enumerate(groups) for name in group}
    chains: list[list[int]] = []
    for i, group in enumerate(groups):
        below = {home[other] for name in group for other in graph[name]} - {i}
        chains.append([i, *max((chains[j] for j in below), key=len, default=[])])
    longest = max(chains, key=len)
    return [" = ".join(sorted(n or FACADE for n in groups[i])) for i in longest]


PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def private_names(module: Module) -> set[str]:
    """Names with one leading underscore that the module defines: functions, classes, variables,
    attributes of its own objects."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if PRIVATE.fullmatch(name)}


def private_reads(root: Path = ROOT) -> list[str]:
    """`module: name` where a module reads or imports a private name that only other packages of
    ours define."""
    own: dict[str, set[str]] = {}
    for module in modules(root).values():
        own.setdefault(module.unit, set()).update(private_names(module))
    everywhere = set().union(*own.values())
    found = []
    for module in modules(root).values():
        for node in ast.walk(module.tree):
            names = _private_uses(node)
            found += [
                f"{module.shown}: {name}"
                for name in names
                if name in everywhere and name not in own[module.unit]
            ]
    return found


def _private_uses(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names if PRIVATE.fullmatch(alias.name)]
    if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
        return [node.attr]
    return []


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of the functions and methods; not of functions inside functions."""

    def below(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{node.name}", node
            elif isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                yield from below(node.body, prefix)

    return below(module.tree.body, "")


def untyped(root: Path = ROOT) -> list[str]:
    """`module: function` where a parameter has no annotation, self and cls apart."""
    found = []
    for module in modules(root).values():
        for name, node in functions(module):
            a = node.args
            parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            if any(p and p.annotation is None and p.arg not in ("self", "cls") for p in parameters):
                found.append(f"{module.shown}: {name}")
    return found


def python_files(root: Path = ROOT) -> list[Path]:
    """Every .py file of the project: product, tests, benchmarks and documents."""
    folders = (FACADE, *BESIDE, "tests", "benchmarks", "docs", "examples")
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


MAX_MODULES = 20
MAX_LINES = 450
MAX_COLUMNS = 100


def undeclared_imports(root: Path = ROOT) -> list[str]:
    """`module -> unit` where the docstring of the module's unit does not name that unit."""
    homes = units(root)
    return [
        f"{name} -> {other}"
        for unit, others in package_imports(root).items()
        for other, names in others.items()
        if other not in (declared_imports(homes[unit]) or ())
        for name in sorted(set(names))
    ]


def large_folders(root: Path = ROOT) -> list[str]:
    """Folders where more than 20 modules lie side by side."""
    counts: dict[Path, int] = {}
    for path in python_files(root):
        if path.name != "__init__.py":
            counts[path.parent] = counts.get(path.parent, 0) + 1
    return [str(f.relative_to(root)) for f, count in counts.items() if count > MAX_MODULES]


def large_files(root: Path = ROOT) -> list[str]:
    """The product's modules with more than 450 lines."""
    return [
        str(m.path.relative_to(root))
        for m in modules(root).values()
        if m.text.count("\n") > MAX_LINES
    ]


def long_lines(root: Path = ROOT) -> list[str]:
    """Files with lines of more than 100 columns, or with marks that would allow them."""
    marks = ("fmt: " + "skip", "fmt: " + "off", "noqa: " + "E501")
    return [
        str(path.relative_to(root))
        for path in python_files(root)
        for line in path.read_text().splitlines()
        if len(line) > MAX_COLUMNS or any(mark in line for mark in marks)
    ]


def findings(root: Path = ROOT) -> dict[str, list[str]]:
    """Every place that breaks a rule of the house, by rule, without repetitions."""
    found = {
        "import": undeclared_imports(root),
        "cycle": [name or FACADE for group in cycles(root) for name in group],
        "private": private_reads(root),
        "untyped": untyped(root),
        "folder": large_folders(root),
        "file": large_files(root),
        "line": long_lines(root),
    }
    return {rule: sorted(set(places)) for rule, places in found.items()}


def known(rule: str) -> set[str]:
    """The places of known.txt, whose lines are `rule: place`."""
    lines = [line.partition(": ") for line in KNOWN.read_text().splitlines()]
    return {place for name, _, place in lines if name == rule}


def shrink() -> None:
    """Takes off known.txt what holds its rule by now; adds nothing."""
    lines = {
        f"{rule}: {p}\n" for rule, places in findings().items() for p in known(rule) & {*places}
    }
    KNOWN.write_text("".join(sorted(lines)))


if __name__ == "__main__":
    shrink()
