"""How a checkpoint's tensors become parameters, as data: one `Rule` per parameter.

A model class declares

    @classmethod
    def weight_rules(cls, config, axes) -> WeightRules

with a rule for every parameter (path as in the module tree, "layers.0.attn.qkv.kernel") except the
companions of quantised kernels (`<name>_scale`), which the loader makes itself. Examples:

    Rule("norm.weight", ("model.norm.weight",))                                one tensor, copied
    Rule("layers.0.mlp.gate_up.kernel", (gate, up))                            rows one after the
    other: gate, then up
    Rule("layers.0.attn.qkv.kernel", (q, k, v), rows=(q_rows, kv_rows, kv_rows), units=(q_heads,
    kv_heads, kv_heads))
    Rule("layers.1.moe.gate_up", ("…experts.{e}.gate_proj.weight", "…experts.{e}.up_proj.weight"),
    experts=(0, 1, 2, 3))
    Rule("layers.1.attn.w_uk", ("…kv_b_proj.weight",), rows=…, transform=function)

`linear_rules` writes the kernel's and the bias's rule of a `Linear` at once. What the loader adds
by itself:

- rows over tp: when the parameter's row dimension carries the "tp" axis, rows are laid out
  tp-major: rank 0's share of every source, then rank 1's, … so that a shard holds whole (q, k, v)
  or (gate, up) triples. A source with fewer `units` than ranks (key/value heads) is repeated.
- `X.weight_scale_inv` of an fp8 `X.weight`: read with it, never listed. An fp8 source is
  dequantised for a float parameter and kept as it is for an "fp8" one; a float source is quantised
  for an "int8", "int4" or "fp8" one.
- dtype: any float source is cast to the parameter's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Gate, up and down of a feed-forward layer, as most checkpoints call them."""

DEFAULT_IGNORED = (
    r"(.*\.)?rotary_(pos_)?emb\..*",
    r"(.*\.)?(original_)?inv_freq",
    r"(.*\.)?(cos|sin)_cached",
    r"(.*\.)?rope\.freqs",
    r"(.*\.)?(masked_bias|position_ids|_extra_state)",
)
"""Buffers that training frameworks save beside parameters: all are computed from the
configuration."""


@dataclass(frozen=True)
class Rule:
    """One parameter and the checkpoint tensors it is made of.

    target: parameter path. sources: checkpoint names, with "{e}" for the logical expert where
    `experts` is given. rows: rows of each source as the checkpoint has them; None: the parameter's
    rows in equal shares. units: equal pieces of each source that tp must not cut (heads); None:
    single rows. experts: for each entry of the parameter's first dimension, the logical expert that
    fills it. Names without "{e}" are
        tensors that stack all logical experts themselves ([E, rows, cols]).
    transform: called with the sources, whole and as float32, and returns the parameter in its
    global shape; `rows` then is
        not used, nor is a shape expected of the sources unless `source_shapes` says one.
    """

    target: str
    sources: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None
    transform: Callable[..., np.ndarray] | None = None
    source_shapes: tuple[tuple[int, ...], ...] | None = None

    def names(self) -> list[str]:
        """Every checkpoint tensor the rule reads, experts expanded, without repeats."""
        if self.experts is None:
            return list(self.sources)
        return list(
            dict.fromkeys(s.format(e=e) for e in sorted(set(self.experts)) for s in self.sources)
        )


@dataclass(frozen=True)
class Rename:
    r"""A checkpoint name that `pattern` matches in full is taken for `name`, in which \1 is the
    pattern's first group."""

    pattern: str
    name: str


@dataclass(frozen=True)
class WeightRules:
    """All rules of a model. ignored: regular expressions of checkpoint names that are not loaded
    (matched in full). renames: other spellings of names, applied one after the other before
    anything else."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    renames: tuple[Rename, ...] = ()

    def canonical(self, name: str) -> str:
        """The name that the rules use for a checkpoint's `name`."""
        for rename in self.renames:
            if match := re.fullmatch(rename.pattern, name):
                name = match.expand(rename.name)
        return name

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in (*DEFAULT_IGNORED, *self.ignored))


@dataclass(frozen=True)
class Piece:
    """Rows `start : start + count` of source `source` go to rows `target_row : target_row + count`
    of the parameter."""

    source: int
    start: int
    count: int
    target_row: int


def linear_rules(
    target: str,
    sources: tuple[str, ...],
    *,
    bias: bool = False,
    rows: tuple[int, ...] | None = None,
    units: tuple[int, ...] | None = None,
) -> list[Rule]:
    """Rules of a `Linear` at `target` made of the checkpoint modules `sources` (names without
    ".weight" / ".bias")."""
    rules = [Rule(f"{target}.kernel", tuple(f"{s}.weight" for s in sources), rows, units)]
    if bias:
        rules.append(Rule(f"{target}.bias", tuple(f"{s}.bias" for s in sources), rows, units))
    return rules


def swiglu_rules(
    target: str,
    source: str,
    *,
    bias: bool = False,
    projections: tuple[str, str, str] = PROJECTIONS,
) -> list[Rule]:
    """Rules of a `SwiGLU` at `target` from `source`'s gate, up and down projections."""
    gate, up, down = (f"{source}.{name}" for name in projections)
    fused = linear_rules(f"{target}.gate_up", (gate, up), bias=bias)
    return fused + linear_rules(f"{target}.down", (down,), bias=bias)


def source_rows(rule: Rule, target_rows: int) -> tuple[int, ...]:
    """Rows of each source in the checkpoint; ValueError when the target cannot be
    shared equally."""
    if rule.rows is not None:
        return rule.rows
    if target_rows % len(rule.sources):
        raise ValueError(
            f"{rule.target}: {target_rows} rows cannot be shared equally by {len(rule.sources)}"
            " sources"
        )
    return (target_rows // len(rule.sources),) * len(rule.sources)


def row_pieces(rule: Rule, target_rows: int, tp: int) -> list[Piece]:
    """The parameter's rows as pieces of the sources, in order; tp-major when tp > 1. ValueError
    when they do not fill it."""
    rows = source_rows(rule, target_rows)
    units = rule.units or rows
    pieces, row = [], 0
    for rank in range(tp):
        for source, (n, u) in enumerate(zip(rows, units, strict=True)):
            if n % u or (u % tp and tp % u):
                raise ValueError(
                    f"{rule.target}: {n} rows of {rule.sources[source]} in {u} units cannot be"
                    f" split over tp={tp}"
                )
            count = n // min(u, tp)
            start = rank * count if u >= tp else (rank * u // tp) * count
            pieces.append(Piece(source, start, count, row))
            row += count
    if row != target_rows:
        raise ValueError(
            f"{rule.target} has {target_rows} rows, its sources {rule.sources} fill {row}"
        )
    return pieces
