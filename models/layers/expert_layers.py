"""Mixture-of-experts layers found among a model's parameters, whatever the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from deepinfer_jax.models.layers.moe import TABLES

OWN_EXPERTS = "layers"
"""The group of the model's own layers, which are counted in every step."""


@dataclass(frozen=True)
class ExpertLayer:
    """Where one layer's arrays are among the flattened parameters.

    weights: arrays whose first dimension is the physical slot, scales included. tables: those of
    `models.layers.placement.Placement`, in the order of TABLES.
    """

    name: str
    weights: tuple[int, ...]
    tables: tuple[int, ...]


@dataclass(frozen=True)
class ExpertGroup:
    """Layers that are counted and balanced together: the model's own, or a draft's. In their order
    in the model."""

    name: str
    layers: tuple[ExpertLayer, ...]
    num_experts: int
    num_physical: int


def expert_groups(params: Any) -> tuple[ExpertGroup, ...]:
    """params: the nested dict of a loaded model, arrays or ShapeDtypeStructs. A group per first
    name of a path: "layers" are the model's own. () for a model without experts."""
    leaves = [(_path(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]
    index = {path: i for i, (path, _) in enumerate(leaves)}
    found: dict[str, list[ExpertLayer]] = {}
    for home in _homes(index):
        weights = tuple(i for path, i in index.items() if path[:-1] == (*home, "experts"))
        tables = tuple(index[*home, "placement", table] for table in TABLES)
        found.setdefault(home[0], []).append(ExpertLayer(".".join(home), weights, tables))
    groups = []
    for name, layers in found.items():
        physical, _, replicas = (leaves[i][1].shape[0] for i in layers[0].tables)
        groups.append(ExpertGroup(name, tuple(layers), replicas, physical))
    return tuple(groups)


def _homes(paths: dict[tuple[str, ...], int]) -> Iterator[tuple[str, ...]]:
    """Paths of the layers, numbers in their order."""
    homes = [p[:-2] for p in paths if p[-2:] == ("placement", TABLES[0])]
    yield from sorted(homes, key=lambda home: [_natural(part) for part in home])


def _natural(part: str) -> list[tuple[int, int, str]]:
    """ "layer10" sorts behind "layer9"."""
    pieces = re.findall(r"\d+|\D+", part)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in pieces]


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path)
