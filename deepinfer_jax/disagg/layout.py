"""What an engine's blocks are, and whether two engines can exchange them. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deepinfer_jax.scheduler.roles import EngineType

PROTOCOL = 2
"""Version of the hand-over's messages; compared at connect."""

_Size = Annotated[int, Meta(ge=1, lt=2**40)]


class LayoutMismatch(ValueError):
    """The two sides of a connection could not understand each other's blocks; the message names
    both values."""


class CacheLayout(msgspec.Struct, frozen=True):
    """One cache of a model. kind: indexed by blocks, or by states. entry: shape of one layer's
    entry; () where nothing is handed over."""

    kind: str
    layers: _Size
    entry: tuple[_Size, ...]
    dtype: str


class Layout(msgspec.Struct, frozen=True):
    """What one side is. roles: the integers of the role names; they pass over the wire."""

    protocol: int
    role: int
    roles: dict[str, int]
    model: str
    block_size: _Size
    caches: dict[str, CacheLayout]
    max_model_len: _Size

    @classmethod
    def of_plain(cls, values: Any) -> Layout:
        """From what another process says. Raises LayoutMismatch for anything that is no layout."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise LayoutMismatch(f"this is no layout of an engine's caches: {error}") from error

    def to_plain(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def make_layout(
    role: EngineType, fingerprint: str, blocks: Mapping[str, Any], max_model_len: int
) -> Layout:
    """blocks: `BlockMover.describe()`."""
    return Layout(
        PROTOCOL,
        int(role),
        {r.name: int(r) for r in EngineType},
        fingerprint,
        blocks["block_size"],
        {
            c["name"]: CacheLayout(c["kind"], c["layers"], tuple(c["entry"]), c["dtype"])
            for c in blocks["caches"]
        },
        max_model_len,
    )


def check_layouts(source: Layout, target: Layout) -> None:
    """Raises LayoutMismatch naming every difference with both values. source: the prompt engine's,
    target: the completion one's."""
    problems = differences(source, target, "on the prompt side", "on the completion side")
    for side, layout, role in (
        ("prompt", source, EngineType.PROMPT),
        ("completion", target, EngineType.COMPLETION),
    ):
        if layout.role != int(role):
            problems.append(
                f"role of the {side} side: {layout.role!r}, expected {role.name}={int(role)}"
            )
    if problems:
        raise LayoutMismatch("the engines cannot exchange KV: " + "; ".join(problems))


def differences(ours: Layout, theirs: Layout, here: str, there: str) -> list[str]:
    """Every difference but the role's, in words: "block_size: 16 {here}, 32 {there}"."""
    problems = [
        f"{name}: {getattr(ours, name)!r} {here}, {getattr(theirs, name)!r} {there}"
        for name in ("protocol", "roles", "model", "block_size", "max_model_len")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    for name in dict.fromkeys((*ours.caches, *theirs.caches)):
        a, b = ours.caches.get(name), theirs.caches.get(name)
        if a is None or b is None:
            problems.append(f"cache {name!r}: {a} {here}, {b} {there}")
            continue
        problems += [
            f"cache {name!r} {key}: {getattr(a, key)!r} {here}, {getattr(b, key)!r} {there}"
            for key in CacheLayout.__struct_fields__
            if getattr(a, key) != getattr(b, key)
        ]
    return problems
