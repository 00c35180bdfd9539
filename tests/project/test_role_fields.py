"""Every field of the role table decides something, or is documented as waiting for its feature."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from deepinfer_jax.scheduler import RolePolicy

ROOT = Path(__file__).parents[2]
PRODUCT = ("deepinfer_jax", "scheduler", "models", "kernels_pallas", "launch")
WAITING = {
    "builds_multimodal_processor",
    "default_multimodal_pool",
    "fuses_norm_rope_unless_batch_invariant",
    "loads_all_draft_parameters",
}


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def read_in_product() -> set[str]:
    """Attributes read outside the table, and what the table's own methods that are called read."""
    table = ROOT / "scheduler" / "roles.py"
    outside: set[str] = set()
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            if path != table:
                outside |= attributes(ast.parse(path.read_text()))
    methods = [
        node
        for node in ast.walk(ast.parse(table.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in outside
    ]
    return outside.union(*map(attributes, methods))


def test_every_field_is_read_or_waits_for_its_feature():
    assert {field.name for field in fields(RolePolicy)} - read_in_product() == WAITING


def test_documentation_lists_the_waiting_fields():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("fields waiting for their feature", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^- `(\w+)`", section, re.M)) == WAITING
