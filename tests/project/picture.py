"""Draws the packages and what each imports, from the real imports, into docs/architecture.md, and
writes docs/modules.md, a line per module from the first sentence of its docstring: `make picture`.
"""

from __future__ import annotations

import ast
import re

import source_tree
from source_tree import ROOT, Module

ARCHITECTURE = ROOT / "docs" / "architecture.md"
MODULES = ROOT / "docs" / "modules.md"
BEGIN, END = "<!-- picture: made by `make picture` -->", "<!-- end of picture -->"


def box(unit: str) -> str:
    """The column that a unit is drawn in: a package with the packages inside it; the scheduler's
    three stand apart."""
    return unit if unit.startswith("scheduler") else unit.partition(".")[0]


def graph() -> dict[str, set[str]]:
    """box -> boxes that its modules import."""
    found: dict[str, set[str]] = {}
    for unit, others in source_tree.package_imports().items():
        found.setdefault(box(unit), set()).update({box(other) for other in others} - {box(unit)})
    return found


def top_down(graph: dict[str, set[str]]) -> list[str]:
    """The boxes, each before what it imports; those with the longest way down come first."""
    heights: dict[str, int] = {}
    for group in source_tree.components(graph):  # what is imported comes first
        below = {heights[other] for name in group for other in graph[name] - {*group}}
        heights |= dict.fromkeys(group, max(below, default=-1) + 1)
    return sorted(graph, key=lambda name: (-heights[name], name))


def picture() -> str:
    """A staircase: under a package's name a dot in the row of every package that it imports."""
    boxes = graph()
    names = top_down(boxes)
    rows = []
    for i, name in enumerate(names):
        dots = "".join("● " if name in boxes[above] else "· " for above in names[:i])
        inside = [u.partition(".")[2] for u in source_tree.units() if box(u) == name != u]
        upward = sorted(boxes[name] & {*names[:i]})
        rows.append(
            f"{dots}{name}"
            + (f" ({', '.join(inside)})" if inside else "")
            + (f"   imports upward: {', '.join(upward)}" if upward else "")
        )
    return "\n".join(rows)


def sentence(module: Module) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(module.tree) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.][^.]\.)\s+(?=[A-Z`])", text)[0].rstrip(".")


def module_list() -> str:
    """docs/modules.md: a heading per package, what it imports, and its modules."""
    parts = [
        "# Modules\n\nMade by `make picture` from the docstrings and the real imports; "
        "[architecture.md](architecture.md) tells how they work together.\n"
    ]
    modules = source_tree.modules().values()
    plain = [m for m in modules if "." not in m.name and not m.is_package]
    packages = [m for m in modules if m.is_package]
    for package in packages:
        inside = [m for m in modules if m.package == package.name and not m.is_package]
        parts.append(section(package, inside if package.name else plain))
    return "\n".join(parts)


def section(package: Module, inside: list[Module]) -> str:
    imported = sorted(source_tree.package_imports()[package.unit])
    folder = package.path.parent.relative_to(ROOT)
    rows = [f"| `{m.path.name}` | {sentence(m)} |" for m in inside]
    return "\n".join(
        [
            f"## {folder}/\n",
            f"{sentence(package)}. Imports {', '.join(imported) or 'nothing of ours'}.\n",
            *(["| Module | One line |", "|---|---|", *rows, ""] if rows else []),
        ]
    )


def drawn(text: str) -> str:
    """docs/architecture.md with the picture of today; ValueError without the two marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"docs/architecture.md needs {BEGIN} and {END}, once each")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n```\n{picture()}\n```\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    ARCHITECTURE.write_text(drawn(ARCHITECTURE.read_text()))
    MODULES.write_text(module_list())
