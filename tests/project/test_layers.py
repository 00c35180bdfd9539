"""The rules of the house, read from the source: who imports whom, who reads whose private names,
what is typed, what is too large.

Places that do not hold a rule yet stand in known.txt, one "rule: place" a line. The list only
shrinks: a place that is not on it fails, and so does one on it that holds the rule by now.
`python tests/project/source_tree.py` takes the latter off the list.
"""

from __future__ import annotations

import tomllib

import pytest
import source_tree
from source_tree import known

RULES = {
    "import": "is not named in the line `Imports: a, b.` of its package's docstring. Imports point "
    "down: move what both need to the lower package, or let the lower one define a Protocol",
    "cycle": "is in a cycle of imports, those inside functions and for annotations included",
    "private": "reads a name with an underscore that only other packages define: make it public "
    "there, or ask the object for what it means",
    "untyped": "has a parameter without a type",
    "folder": "has more than 20 modules",
    "file": "has more than 450 lines",
    "line": "has lines of more than 100 columns, or a mark that allows them",
}


@pytest.fixture(scope="module")
def findings() -> dict[str, list[str]]:
    return source_tree.findings()


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds_everywhere_but_in_known_places(rule, findings):
    assert findings.keys() == RULES.keys()
    new = sorted(set(findings[rule]) - known(rule))
    assert new == [], f"each {RULES[rule]}"


@pytest.mark.parametrize("rule", RULES)
def test_known_places_still_break_the_rule(rule, findings):
    mended = sorted(known(rule) - set(findings[rule]))
    assert mended == [], "mended: run `python tests/project/source_tree.py`, commit known.txt"


def test_every_package_says_what_it_imports():
    homes = source_tree.units()
    silent = [u for u, m in homes.items() if source_tree.declared_imports(m) is None]
    assert silent == [], (
        "the docstring needs a line `Imports: a, b.` or `Imports: nothing of ours.`"
    )
    unknown = [
        f"{unit}: {name}"
        for unit, module in homes.items()
        for name in source_tree.declared_imports(module)
        if name not in homes
    ]
    assert unknown == []


def test_no_package_names_what_it_does_not_import():
    real = source_tree.package_imports()
    idle = [
        f"{unit}: {name}"
        for unit, module in source_tree.units().items()
        for name in source_tree.declared_imports(module) or ()
        if name not in real[unit]
    ]
    assert idle == [], "take it out of the docstring's line `Imports: a, b.`"


def test_every_package_is_installed():
    table = tomllib.loads((source_tree.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [m for m in source_tree.modules().values() if m.is_package]
    names = {f"deepinfer_jax.{m.name}".rstrip("."): m.path.parent for m in packages}
    assert set(table["packages"]) == names.keys()
    folders = {name: source_tree.ROOT / place for name, place in table["package-dir"].items()}
    outside = {n: p for n, p in names.items() if p.relative_to(source_tree.ROOT).parts[0] != n[:13]}
    assert folders == {"deepinfer_jax": source_tree.ROOT / "deepinfer_jax"} | outside


def test_declared_imports_have_no_cycle():
    """Above and below exist. A package and the packages inside it count as one, except in the
    scheduler: it knows neither routing nor simulation, and routing not simulation."""

    def group(unit: str) -> str:
        return unit if unit.startswith("scheduler") else unit.partition(".")[0]

    graph: dict[str, set[str]] = {}
    for unit, module in source_tree.units().items():
        below = {group(name) for name in source_tree.declared_imports(module) or ()}
        graph.setdefault(group(unit), set()).update(below - {group(unit)})
    assert source_tree.cyclic(graph) == []
