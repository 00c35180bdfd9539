"""Role-aware scheduler: host side, NumPy only. One `Scheduler` per data-parallel rank, stepped
together by `SchedulerGroup`.

Imports: nothing of ours.
"""

from deepinfer_jax.scheduler.block_manager import BlockManager
from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.group import DPGroup, LocalDPGroup, SchedulerGroup
from deepinfer_jax.scheduler.outputs import PrefillItem, Processed, SchedulerOutputs, StepType
from deepinfer_jax.scheduler.roles import ROLE_POLICIES, EngineType, RolePolicy
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import FINISH_REASONS, ImageSpan, Sequence, SequenceStatus
from deepinfer_jax.scheduler.state_manager import StateManager

__all__ = [
    "FINISH_REASONS",
    "ROLE_POLICIES",
    "BlockManager",
    "DPGroup",
    "EngineType",
    "ImageSpan",
    "LocalDPGroup",
    "PrefillItem",
    "Processed",
    "RolePolicy",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerGroup",
    "SchedulerOutputs",
    "Sequence",
    "SequenceStatus",
    "StateManager",
    "StepType",
]
