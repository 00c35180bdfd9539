"""What an expert placement file says: how tokens spread over experts and ranks, as table and heat
map, and what that does to steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.experts.policy import RankLayout, imbalance, rank_loads, replica_counts
from deepinfer_jax.models.layers.dispatch import MoeOptions
from deepinfer_jax.models.layers.placement import initial_physical_to_logical, num_physical_experts
from deepinfer_jax.models.layers.router import RouterConfig


@dataclass(frozen=True)
class ExpertView:
    """One placement under the loads of its file. initial: the same for the checkpoint's order."""

    record: PlacementRecord
    slots: Int[np.ndarray, "layers physical"]
    ranks: int

    @property
    def experts(self) -> int:
        return self.record.loads.shape[2]

    @property
    def now(self) -> Float[np.ndarray, " layers"]:
        return imbalance(self.record.loads, self.slots, self.ranks)

    @property
    def initial(self) -> Float[np.ndarray, " layers"]:
        first = initial_physical_to_logical(self.experts, self.slots.shape[1])
        return imbalance(self.record.loads, np.tile(first, (len(self.slots), 1)), self.ranks)


def view(
    record: PlacementRecord, ranks: int | None = None, physical: int | None = None
) -> ExpertView:
    """The file's placement; for other ranks or slots, the one that the policy makes of its loads.
    ValueError for numbers that do not divide."""
    ranks = record.ranks if ranks is None else ranks
    fitting = math.ceil(record.slots.shape[1] / ranks) * ranks
    slots = record.slots_for(fitting if physical is None else physical, RankLayout(ranks))
    return ExpertView(record, slots, ranks)


def planned_imbalance(
    path: str, config: EngineConfig, router: RouterConfig, options: MoeOptions
) -> float:
    """Mean over layers of max / mean rank load that a role's ranks would have with the loads of a
    placement file. ValueError when the file is of another model."""
    record = PlacementRecord.load(path)
    record.check(record.slots.shape[0], router.num_experts, path)
    physical = num_physical_experts(router.num_experts, config.axes.ep, options.extra_experts)
    return float(view(record, config.axes.ep, physical).now.mean())


def table(v: ExpertView) -> str:
    """A line per layer: balance before and after, hottest experts and their replicas."""
    loads, counts = v.record.loads, replica_counts(v.slots, v.experts)
    totals = loads.sum(1, dtype=np.int64)
    lines = [
        f"placement {v.record.version}: {len(v.slots)} layers, {v.experts} experts in"
        f" {v.slots.shape[1]} slots on {v.ranks} ranks, counts of {loads.shape[1]} steps",
        "max/mean of ranks: initial order, now; an expert's share of the tokens, x replicas",
        f"{'layer':>5} {'initial':>8} {'now':>8}  busiest experts",
    ]
    for layer, (before, now) in enumerate(zip(v.initial, v.now, strict=True)):
        share = totals[layer] / max(totals[layer].sum(), 1)
        hot = np.argsort(-share, kind="stable")[:5]
        named = ", ".join(f"{e}: {100 * share[e]:.1f} % x{counts[layer, e]}" for e in hot)
        lines.append(f"{layer:>5} {before:>8.3f} {now:>8.3f}  {named}")
    lines.append(f"{'mean':>5} {v.initial.mean():>8.3f} {v.now.mean():>8.3f}")
    return "\n".join(lines)


def draw(v: ExpertView, path: str) -> None:
    """Heat maps: tokens of each expert, and of each rank in the initial order and now, over the
    mean."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'deepinfer-jax[plot]'") from None
    loads = v.record.loads
    first = np.tile(initial_physical_to_logical(v.experts, v.slots.shape[1]), (len(v.slots), 1))
    parts = [
        ("tokens of each expert", "expert", loads.sum(1, dtype=np.float64)),
        ("of each rank, initial order", "rank", rank_loads(loads, first, v.ranks).sum(1)),
        ("of each rank, now", "rank", rank_loads(loads, v.slots, v.ranks).sum(1)),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(15, 5))
    for ax, (title, name, values) in zip(axes, parts, strict=True):
        over_mean = values / np.maximum(values.mean(1, keepdims=True), 1e-12)
        picture = ax.imshow(over_mean, aspect="auto", interpolation="nearest", vmin=0)
        ax.set(title=f"{title}, over the mean", xlabel=name, ylabel="layer")
        figure.colorbar(picture, ax=ax)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
