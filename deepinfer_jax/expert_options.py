"""How an engine counts and rearranges its experts: arguments, environment and role in one record.

Imports: environ, scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_jax import environ
from deepinfer_jax.scheduler.roles import RolePolicy

ROLE_PERIOD = -1
"""As an interval: the one of the role table."""


@dataclass(frozen=True)
class ExpertOptions:
    """Validated at construction.

    window: steps of counts that are kept; 0: nothing is counted.
    interval: counted steps between two rearrangements; 0: none.
    counts_prefill: prefill steps count, for the window and the interval.
    between_decodes: experts move before decode steps only.
    layers_per_step: the most layers whose experts move between two steps, which is what a step may
    have to wait for.
    nodes: hosts that groups of experts must not leave; 1: no such limit.
    placement_file: where the placement is read from at start and kept up to date; None: nowhere.
    stat_interval: counted steps between two looks at the balance; 0: none.
    show_detail: log every layer's balance, not only the mean.
    """

    window: int = 0
    interval: int = 0
    counts_prefill: bool = True
    between_decodes: bool = False
    layers_per_step: int = 1
    nodes: int = 1
    placement_file: str | None = None
    stat_interval: int = 0
    show_detail: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("window", 0),
            ("interval", 0),
            ("layers_per_step", 1),
            ("nodes", 1),
            ("stat_interval", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"experts: {name} must be >= {least}, got {getattr(self, name)}")
        if (self.interval or self.stat_interval or self.placement_file) and not self.window:
            raise ValueError(
                "experts: balance needs counts, but EXPERT_COUNT_WINDOW_SIZE keeps 0 steps of them"
            )

    @property
    def moves(self) -> bool:
        """Whether experts may change their slots while the engine lives."""
        return self.interval > 0 or self.placement_file is not None

    @classmethod
    def resolve(
        cls,
        policy: RolePolicy,
        ranks: int,
        has_experts: bool,
        *,
        interval: int | None,
        layers_per_step: int,
        nodes: int,
        placement_file: str | None,
    ) -> ExpertOptions:
        """ranks: of the expert-parallel group. interval None: the environment's. ValueError for an
        argument that could not do anything."""
        asked = [
            f"{name}={value}"
            for name, value in (
                ("expert_rearrangement_interval", interval),
                ("expert_placement", placement_file),
            )
            if value
        ]
        if asked and not has_experts:
            raise ValueError(f"{', '.join(asked)}: the model has no experts")
        if interval and ranks == 1:
            raise ValueError(
                f"expert_rearrangement_interval={interval} needs expert_parallel_size > 1:"
                " on one rank there is nothing to balance"
            )
        if not has_experts or (ranks == 1 and placement_file is None):
            return cls()
        given = environ.get("EXPERT_REARRANGEMENT_STEP_INTERVAL", int)
        period = given if interval is None else interval
        prefill = policy.eplb_counts_prefill_steps or environ.get(
            "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", bool
        )
        period = policy.expert_rearrangement_interval if period == ROLE_PERIOD else period
        stat_interval = environ.get("MOE_LB_STAT_INTERVAL", int)
        if not (period or stat_interval or placement_file):
            return cls()
        return cls(
            window=environ.get("EXPERT_COUNT_WINDOW_SIZE", int),
            interval=period,
            counts_prefill=prefill,
            between_decodes=policy.does_decode,
            layers_per_step=layers_per_step,
            nodes=nodes,
            placement_file=placement_file,
            stat_interval=stat_interval,
            show_detail=environ.get("SHOW_EPLB_DETAIL", bool),
        )
