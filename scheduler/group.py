"""The ranks of one data-parallel group take their steps together.

Attention is data parallel while experts are spread over the same ranks, so a step has one type on
all of them: NORMAL ranks vote. The votes go through a `DPGroup`: in one process it is a Python
min(), between processes a host-side collective.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from deepinfer_jax.scheduler.config import SchedulerConfig
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.roles import RolePolicy


class DPGroup(Protocol):
    """Ranks that vote. local_ranks: the ranks this process schedules."""

    @property
    def size(self) -> int: ...

    @property
    def local_ranks(self) -> Seq[int]: ...

    def all_reduce_min(self, values: list[int]) -> int:
        """Minimum over all ranks; `values` are those of the local ranks, in order."""
        ...

    def agree_min(self, value: int) -> int:
        """Minimum over the processes, each with one value; for start-up, where they may be minutes
        apart."""
        ...


class RankScheduler(Protocol):
    """What a group asks of the scheduler of one rank (`scheduler.Scheduler`)."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def policy(self) -> RolePolicy: ...

    def has_unfinished(self) -> bool: ...

    def has_nothing_to_decode(self) -> bool: ...

    def wants_prefill(self) -> bool: ...

    def schedule_prefill(self) -> SchedulerOutputs | None: ...

    def schedule_decode(self) -> SchedulerOutputs: ...

    def empty_prefill(self) -> SchedulerOutputs: ...


class LocalDPGroup:
    """All ranks live in this process."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a DP group needs at least one rank, got {size}")
        self.size = size
        self.local_ranks = tuple(range(size))

    def all_reduce_min(self, values: list[int]) -> int:
        if len(values) != self.size:
            raise ValueError(f"{len(values)} votes for {self.size} ranks")
        return min(values)

    def agree_min(self, value: int) -> int:
        return value


class SchedulerGroup:
    """Schedules the local ranks of a DP group; every rank of every process takes the same step
    type."""

    def __init__(self, schedulers: Seq[RankScheduler], dp_group: DPGroup) -> None:
        if len(schedulers) != len(dp_group.local_ranks):
            raise ValueError(
                f"{len(schedulers)} schedulers for {len(dp_group.local_ranks)} local ranks"
            )
        if any(s.config != schedulers[0].config for s in schedulers):
            raise ValueError("the schedulers of a group must have equal configs")
        self.schedulers = schedulers
        self.dp_group = dp_group
        self.decode_step = 0
        """Decode steps since the last prefill step."""

    def schedule(self) -> list[SchedulerOutputs]:
        """One step for every local rank, all of the same type."""
        policy = self.schedulers[0].policy
        if policy.votes_on_step_type:
            return self._schedule_by_vote()
        if policy.does_prefill:
            return [_step(s.schedule_prefill()) for s in self.schedulers]
        return self._decode()

    def has_unfinished(self) -> bool:
        """Some local rank needs another step."""
        return any(s.has_unfinished() for s in self.schedulers)

    def _decode(self) -> list[SchedulerOutputs]:
        self.decode_step += 1
        return [s.schedule_decode() for s in self.schedulers]

    def _schedule_by_vote(self) -> list[SchedulerOutputs]:
        config = self.schedulers[0].config
        any_point = (
            self.decode_step != 0 and self.decode_step % config.prefill_any_attempt_interval == 0
        )
        all_point = self.decode_step % config.prefill_attempt_interval == 0
        any_point = any_point or self._is_idle()
        if not any_point and not all_point:
            return self._decode()
        wants = [s.wants_prefill() for s in self.schedulers]
        if any_point:
            passed = self.dp_group.all_reduce_min([0 if want else 1 for want in wants]) == 0
        else:
            passed = self.dp_group.all_reduce_min([1 if want else 0 for want in wants]) == 1
        if not passed:
            return self._decode()
        outputs = [
            s.schedule_prefill() if want else None
            for s, want in zip(self.schedulers, wants, strict=True)
        ]
        # Wanting is not managing. If nobody scheduled a prompt all decode: with every slot taken
        # and prompts waiting, prefill steps would otherwise repeat for ever, each resetting
        # decode_step and so leading to the next.
        if self.dp_group.all_reduce_min([1 if out is None else 0 for out in outputs]) == 1:
            return self._decode()
        self.decode_step = 0
        return [
            s.empty_prefill() if out is None else out
            for s, out in zip(self.schedulers, outputs, strict=True)
        ]

    def _is_idle(self) -> bool:
        """No rank has anything to decode: a prompt need not wait for the interval. Between
        processes that takes a vote."""
        nothing = all(s.has_nothing_to_decode() for s in self.schedulers)
        if len(self.schedulers) == self.dp_group.size:
            return nothing
        return self.dp_group.all_reduce_min([int(nothing)] * len(self.schedulers)) == 1


def _step(out: SchedulerOutputs | None) -> SchedulerOutputs:
    """A role that cannot decode always has a prefill step, be it an empty one."""
    if out is None:
        raise AssertionError("a role without decode steps scheduled nothing")
    return out
