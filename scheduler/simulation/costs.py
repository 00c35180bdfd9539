"""What a step costs: tables measured or planned per bucket, or a roofline from a few numbers of
model and device.

The simulator asks a `StepCosts` for the seconds of every step of a rank. Tables interpolate
linearly between their points.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.scheduler.roles import EngineType

FILE_FORMAT = "deepinfer-step-costs/1"


class StepCosts(Protocol):
    """Seconds per step of one rank. host_seconds: scheduling and processing per step, hidden behind
    the device with ZOS."""

    @property
    def host_seconds(self) -> float: ...

    @property
    def kv_bytes_per_token(self) -> float: ...

    def prefill_seconds(self, tokens: int, mean_context: float) -> float:
        """tokens: rows of the step; mean_context: keys one of them sees, averaged over the rows."""
        ...

    def decode_seconds(self, rows: int, mean_context: float) -> float:
        """rows: tokens of the step, drafts included; mean_context: keys per row."""
        ...


CostsByRole = StepCosts | dict[EngineType, StepCosts]


def costs_of(costs: CostsByRole, role: EngineType) -> StepCosts:
    """The costs of a role's engines. Raises ValueError if the table has none for it."""
    if not isinstance(costs, dict):
        return costs
    if role not in costs:
        raise ValueError(
            f"no step costs for {role.name}; the costs cover {', '.join(r.name for r in costs)}"
        )
    return costs[role]


class CostTable:
    """Seconds over one axis, or two: `x` tokens or rows, `y` mean context (None: the cost does not
    depend on it).

    Between points linear (bilinear); below the first point the first value holds (a step has a
    floor), above the last the last segment goes on. round_up: a step costs what the next larger x
    point costs, as a padded bucket does. total: `y` is the context of all rows together. Raises
    ValueError naming the axis.
    """

    def __init__(
        self,
        x: Any,
        seconds: Any,
        y: Any = None,
        *,
        round_up: bool = False,
        total: bool = False,
        name: str = "table",
    ) -> None:
        values = np.asarray(seconds, np.float64)
        self.x = _axis(name, "tokens or rows", x)
        self.y = [0.0] if y is None else _axis(name, "context", y)
        values = values[:, None] if y is None and values.ndim == 1 else values
        if values.shape != (len(self.x), len(self.y)):
            raise ValueError(
                f"{name}: seconds has shape {np.shape(seconds)}, its axes have {len(self.x)} x"
                f" {len(self.y)} points"
            )
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(
                f"{name}: seconds must be finite and >= 0, got"
                f" {values[~(np.isfinite(values) & (values >= 0))][0]}"
            )
        self.seconds = values.tolist()
        self.round_up, self.total = round_up, total

    def __call__(self, x: float, mean_context: float) -> float:
        y = x * mean_context if self.total else mean_context
        i, fx = _locate(self.x, x)
        if self.round_up and 0.0 < fx <= 1.0:
            fx = 1.0
        j, fy = _locate(self.y, y)
        low = self.seconds[i]
        high = self.seconds[i + 1] if fx else low
        if not fy:
            return max(low[j] + fx * (high[j] - low[j]), 0.0)
        at_low = low[j] + fy * (low[j + 1] - low[j])
        at_high = high[j] + fy * (high[j + 1] - high[j])
        return max(at_low + fx * (at_high - at_low), 0.0)


def _axis(name: str, what: str, points: Any) -> list[float]:
    values = np.asarray(points, np.float64)
    if (
        values.ndim != 1
        or not values.size
        or not np.isfinite(values).all()
        or (np.diff(values) <= 0).any()
        or values[0] < 0
    ):
        raise ValueError(
            f"{name}: the {what} axis must be non-negative, strictly ascending numbers, got"
            f" {points!r}"
        )
    return values.tolist()


def _locate(axis: list[float], value: float) -> tuple[int, float]:
    """(i, f): value = axis[i] + f * (axis[i+1] - axis[i]); f = 0 below the first point, f > 1 above
    the last."""
    if value <= axis[0] or len(axis) == 1:
        return 0, 0.0
    i = min(bisect_left(axis, value), len(axis) - 1) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Costs from tables. prefill: over tokens and, if two-dimensional, mean context; decode: over
    rows and mean context."""

    prefill: CostTable | None = None
    decode: CostTable | None = None
    host_seconds: float = 0.0
    kv_bytes_per_token: float = 0.0
    name: str = "table"

    def __post_init__(self) -> None:
        for field in ("host_seconds", "kv_bytes_per_token"):
            _non_negative(f"{self.name}: {field}", getattr(self, field))

    def prefill_seconds(self, tokens: int, mean_context: float) -> float:
        if self.prefill is None:
            raise ValueError(
                f"{self.name}: no prefill table, but an engine with these costs prefills"
            )
        return self.prefill(tokens, mean_context)

    def decode_seconds(self, rows: int, mean_context: float) -> float:
        if self.decode is None:
            raise ValueError(
                f"{self.name}: no decode table, but an engine with these costs decodes"
            )
        return self.decode(rows, mean_context)


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """Roofline of one rank: max(FLOPs / peak, bytes / bandwidth) + step_overhead (Williams et al.
    2009, Roofline).

    FLOPs: 2 * active_parameters per token + attention_flops_per_key per token and key it sees
    (dense attention: 4 * layers * heads * head_dim). Bytes: the weights that the tokens touch and,
    once per step, the KV they read. Of a mixture of experts with P parameters, A active per token,
    n tokens touch about P * (1 - (1 - A/P)^n) (independent choices). Defaults: an 8-billion dense
    bf16 model with grouped-query attention (32 layers, 8 KV heads of 128) on an H100 SXM (data
    sheet: 989e12 bf16 FLOP/s, 3.35e12 B/s), of which compute_efficiency and memory_efficiency are
    reached.

    expert_imbalance: tokens of the most loaded expert-parallel rank over those of the mean rank, as
    engines measure it (stats, `plan --experts`). A step takes as long as that rank does, whose
    experts compute and touch that much more. shared_parameters: the active ones that every token
    passes, outside the experts. Raises ValueError naming the field.
    """

    parameters: float = 8.03e9
    active_parameters: float | None = None
    shared_parameters: float = 0.0
    expert_imbalance: float = 1.0
    bytes_per_parameter: float = 2.0
    attention_flops_per_key: float = 4 * 32 * 32 * 128
    kv_bytes_per_token: float = 2 * 32 * 8 * 128 * 2
    peak_flops: float = 989e12
    bandwidth: float = 3.35e12
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    step_overhead: float = 50e-6
    host_seconds: float = 100e-6

    def __post_init__(self) -> None:
        for field in ("parameters", "bytes_per_parameter", "peak_flops", "bandwidth"):
            if not getattr(self, field) > 0 or not math.isfinite(getattr(self, field)):
                raise ValueError(
                    f"analytic costs: {field} must be > 0 and finite, got {getattr(self, field)}"
                )
        for field in (
            "attention_flops_per_key",
            "kv_bytes_per_token",
            "step_overhead",
            "host_seconds",
            "shared_parameters",
        ):
            _non_negative(f"analytic costs: {field}", getattr(self, field))
        for field in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(
                    f"analytic costs: {field} must lie in (0, 1], got {getattr(self, field)}"
                )
        if not 1 <= self.expert_imbalance < math.inf:
            raise ValueError(
                f"analytic costs: expert_imbalance must be at least 1, got {self.expert_imbalance}"
            )
        if self.shared_parameters > self._active:
            raise ValueError(
                f"analytic costs: shared_parameters {self.shared_parameters:g} exceed the active"
                f" {self._active:g}"
            )
        if not 0 < self._active <= self.parameters:
            raise ValueError(
                f"analytic costs: active_parameters must lie in (0, {self.parameters:g}], got"
                f" {self._active:g}"
            )

    @property
    def _active(self) -> float:
        return self.parameters if self.active_parameters is None else self.active_parameters

    def prefill_seconds(self, tokens: int, mean_context: float) -> float:
        # Every prompt's keys are read once for all its rows. One chunk of T tokens after s others:
        # mean s + T/2, keys s + T; many whole prompts: keys T.
        return self._seconds(tokens, mean_context, max(tokens, mean_context + tokens / 2))

    def decode_seconds(self, rows: int, mean_context: float) -> float:
        return self._seconds(rows, mean_context, rows * mean_context)

    def _seconds(self, tokens: int, mean_context: float, keys_read: float) -> float:
        routed, uneven = self._active - self.shared_parameters, self.expert_imbalance
        active = self._active + (uneven - 1) * (routed if self._active < self.parameters else 0)
        flops = tokens * (2 * active + self.attention_flops_per_key * mean_context)
        touched = self.parameters * (1 - (1 - self._active / self.parameters) ** (tokens * uneven))
        num_bytes = touched * self.bytes_per_parameter + keys_read * self.kv_bytes_per_token
        compute = flops / (self.peak_flops * self.compute_efficiency)
        return (
            max(compute, num_bytes / (self.bandwidth * self.memory_efficiency)) + self.step_overhead
        )


def _non_negative(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


# ---- files


def load_costs(path: str | Path) -> CostsByRole:
    """Reads a cost file (docs/simulator.md): one set of tables, or one per role under "roles".

    Raises ValueError naming file and field; OSError if it cannot be read.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    if not isinstance(record, dict) or record.get("format") != FILE_FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}: field 'format' must be {FILE_FORMAT!r}, got {found!r}")
    if "roles" not in record:
        return _table_costs(str(path), record)
    roles = record["roles"]
    if not isinstance(roles, dict) or not roles:
        raise ValueError(f"{path}: field 'roles' must map role names to costs, got {roles!r}")
    return {
        _role(path, name): _table_costs(
            f"{path}: roles.{name}", {**record, **_object(path, name, part)}
        )
        for name, part in roles.items()
    }


def _object(path: Path, name: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ValueError(f"{path}: field 'roles.{name}' must be an object, got {part!r}")
    return part


def _role(path: Path, name: str) -> EngineType:
    try:
        return EngineType[name.upper()]
    except KeyError:
        raise ValueError(
            f"{path}: unknown role {name!r}; known: {', '.join(r.name.lower() for r in EngineType)}"
        ) from None


def _table_costs(where: str, record: dict[str, Any]) -> TableCosts:
    if "prefill" not in record and "decode" not in record:
        raise ValueError(f"{where}: neither 'prefill' nor 'decode' is given")
    return TableCosts(
        prefill=_table(f"{where}: prefill", record.get("prefill"), "tokens"),
        decode=_table(f"{where}: decode", record.get("decode"), "rows"),
        host_seconds=record.get("host_seconds", 0.0),
        kv_bytes_per_token=record.get("kv_bytes_per_token", 0.0),
        name=where,
    )


def _table(where: str, record: Any, axis: str) -> CostTable | None:
    if record is None:
        return None
    if not isinstance(record, dict) or axis not in record or "seconds" not in record:
        raise ValueError(
            f"{where} must be an object with {axis!r} and 'seconds', got {record!r:.200}"
        )
    unknown = set(record) - {axis, "mean_context", "total_context", "seconds", "rounding"}
    if unknown:
        raise ValueError(
            f"{where}: unknown field {', '.join(map(repr, sorted(unknown)))}; known: {axis},"
            " mean_context, total_context, seconds, rounding"
        )
    if "mean_context" in record and "total_context" in record:
        raise ValueError(f"{where}: give either 'mean_context' or 'total_context'")
    rounding = record.get("rounding", "linear")
    if rounding not in ("linear", "up"):
        raise ValueError(f"{where}: field 'rounding' must be 'linear' or 'up', got {rounding!r}")
    total = "total_context" in record
    context = (
        record["total_context" if total else "mean_context"]
        if total or "mean_context" in record
        else None
    )
    try:
        return CostTable(
            record[axis],
            record["seconds"],
            context,
            round_up=rounding == "up",
            total=total,
            name=where,
        )
    except (TypeError, ValueError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None


def save_costs(path: str | Path, costs: TableCosts | dict[EngineType, TableCosts]) -> None:
    """Writes what load_costs() reads."""
    if isinstance(costs, dict):
        record: dict[str, Any] = {
            "roles": {role.name.lower(): _record(part) for role, part in costs.items()}
        }
    else:
        record = _record(costs)
    Path(path).write_text(
        json.dumps({"format": FILE_FORMAT, **record}, indent=1) + "\n", encoding="utf-8"
    )


def _record(costs: TableCosts) -> dict[str, Any]:
    record: dict[str, Any] = {
        "host_seconds": costs.host_seconds,
        "kv_bytes_per_token": costs.kv_bytes_per_token,
    }
    for name, axis, table in (
        ("prefill", "tokens", costs.prefill),
        ("decode", "rows", costs.decode),
    ):
        if table is not None:
            flat = table.y == [0.0]
            values = [row[0] for row in table.seconds] if flat else table.seconds
            context = {} if flat else {"total_context" if table.total else "mean_context": table.y}
            record[name] = {
                axis: table.x,
                **context,
                "seconds": values,
                "rounding": "up" if table.round_up else "linear",
            }
    return record
