"""What statistics read of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deepinfer_jax.config import EngineArgs, EngineConfig
from deepinfer_jax.experts.report import BalanceReport
from deepinfer_jax.runner.model_runner import ModelRunner
from deepinfer_jax.scheduler.roles import RolePolicy
from deepinfer_jax.scheduler.scheduler import Scheduler


class CountsPages(Protocol):
    """A prefix store."""

    def stats(self) -> dict[str, Any]:
        """Pages by what became of them."""
        ...


class ShowsBalance(Protocol):
    """Which experts tokens chose, and how evenly ranks got them."""

    @property
    def report(self) -> BalanceReport: ...


class StatsSource(Protocol):
    """An engine, as far as it is counted and shown."""

    name: str
    args: EngineArgs
    config: EngineConfig
    policy: RolePolicy
    runner: ModelRunner
    schedulers: Sequence[Scheduler]
    prefix_store: CountsPages | None
    experts: ShowsBalance | None
    warm_up_seconds: float
