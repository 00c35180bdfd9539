"""When experts move: counts are read, a placement is drawn up, and layers move between steps.

Everything happens at the same step in every process of a job: what is due is counted in steps, the
counts that a decision starts from are sums over all ranks, and where processes may differ, how long
the policy takes and what it comes to, they vote. A rearrangement is a generator that goes on by one
piece per step.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Int

from deepinfer_jax.expert_options import ExpertOptions
from deepinfer_jax.experts.arrays import ExpertArrays
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.experts.policy import Policy, RankLayout, balance
from deepinfer_jax.experts.report import BalanceReport
from deepinfer_jax.models.layers.expert_layers import OWN_EXPERTS
from deepinfer_jax.runner.model_runner import ModelRunner
from deepinfer_jax.scheduler.group import DPGroup

logger = logging.getLogger(__name__)

STEPS_TO_HOST = 2
"""Steps between asking for the counts and looking at them: by then a step that was dispatched after
them has been waited for, so they are there and nobody waits."""

_DONE = object()


def make_balancer(runner: ModelRunner, votes: DPGroup) -> ExpertBalancer | None:
    """Before warm-up. None where nothing is counted: a model without experts, one rank, or turned
    off."""
    options, programs = runner.config.experts, runner.programs
    if programs.counted_shape is None:
        return None
    group = next(g for g in programs.expert_groups if g.name == OWN_EXPERTS)
    groups = runner.model_config.router.num_groups if options.nodes > 1 else 1
    layout = RankLayout(runner.config.axes.ep, options.nodes, groups)
    return ExpertBalancer(ExpertArrays(runner, group), options, layout, votes)


class ExpertBalancer:
    """One engine's. `after_dispatch` is called once per step, after the step's program."""

    def __init__(
        self,
        arrays: ExpertArrays,
        options: ExpertOptions,
        layout: RankLayout,
        votes: DPGroup,
        policy: Policy = balance,
    ) -> None:
        layout.check(arrays.group.num_experts, arrays.group.num_physical)
        self.arrays, self.options, self.layout = arrays, options, layout
        self.report = BalanceReport(len(arrays.group.layers))
        self._votes, self._policy = votes, policy
        self._loads = np.zeros((len(arrays.group.layers), 0, arrays.group.num_experts), np.int32)
        self._going_on: Iterator[None] | None = None
        self._steps = self._looked = self._rearranged = 0
        self._planner = ThreadPoolExecutor(1, "expert-policy")
        arrays.register(moves=options.moves)

    # ---- at start and end ------------------------------------------------------------------------

    def start(self) -> None:
        """After warm-up: takes over the placement of the file, if there is one."""
        path = self.options.placement_file
        if path is None:
            return
        record = PlacementRecord.load_if_there(path)
        number = 0 if record is None else 1 + zlib.crc32(record.slots.tobytes())
        if self._votes.agree_min(number) != -self._votes.agree_min(-number):
            raise ValueError(
                f"the processes of the job read different expert placements from {path}, or not all"
                " of them found one"
            )
        if record is None:
            logger.info("experts: %s does not exist yet and will be written", path)
        else:
            self.take_over(record, path)

    def take_over(self, record: PlacementRecord, source: str | None = None) -> None:
        """Places experts as a record says, or, where that was for other slots or ranks, as the
        policy makes of its loads. ValueError naming `source` for another model's record."""
        group = self.arrays.group
        record.check(len(group.layers), group.num_experts, source)
        self._loads = record.loads
        slots = record.slots_for(group.num_physical, self.layout, self._policy)
        self.rearrange(slots)
        self.report.version = record.version + (slots is not record.slots)

    def record(self) -> PlacementRecord:
        """The placement as it is, with the loads last read."""
        return PlacementRecord(
            self.report.version, self.layout.ranks, self.arrays.slots.copy(), self._loads
        )

    def rearrange(self, slots: Int[np.ndarray, "layers physical"]) -> None:
        """Moves every layer at once, between two steps. ValueError when an expert would be lost."""
        moved = sum(self.arrays.move(layer, new) for layer, new in enumerate(slots))
        self.report.moved(moved)

    def close(self) -> None:
        """Writes the file and ends the thread."""
        self._going_on = None
        self._write_in_background()
        self._planner.shutdown(wait=True)

    # ---- step by step ----------------------------------------------------------------------------

    def after_dispatch(self, is_prefill: bool, steps: int) -> None:
        """A program of `steps` steps has been dispatched; begins what is due, or goes on with
        it."""
        if not is_prefill or self.options.counts_prefill:
            self._steps += steps
        if is_prefill and self.options.between_decodes:
            return
        if self._going_on is None:
            self._going_on = self._due()
        if self._going_on is not None and next(self._going_on, _DONE) is _DONE:
            self._going_on = None

    def _due(self) -> Iterator[None] | None:
        def due(interval: int, last: int) -> bool:
            return interval > 0 and self._steps - last >= interval

        if due(self.options.interval, self._rearranged):
            self._rearranged = self._looked = self._steps
            return self._rearrangement()
        if due(self.options.stat_interval, self._looked):
            self._looked = self._steps
            return self._look()
        return None

    def _look(self) -> Iterator[None]:
        """Reads the counts and how the present placement fares with them."""
        counts = self.arrays.read_counts()
        for _ in range(STEPS_TO_HOST):
            yield
        self._loads = np.ascontiguousarray(np.asarray(counts).swapaxes(0, 1))
        self.report.look(self._loads, self.arrays.slots, self.layout.ranks)

    def _rearrangement(self) -> Iterator[None]:
        yield from self._look()
        plan = self._planner.submit(
            self._policy,
            self._loads,
            self.arrays.group.num_physical,
            self.layout,
            self.arrays.slots.copy(),
        )
        while not self._all_have(plan):
            yield
        slots = plan.result()
        if not self._all_agree(slots):
            logger.error(
                "experts: the processes of the job came to different placements; none is used"
            )
            self.report.disagreements += 1
            return
        moved = 0
        for layer, new in enumerate(slots):
            if layer and layer % self.options.layers_per_step == 0:
                yield
            moved += self.arrays.move(layer, new)
        self.report.rearranged(self._loads, slots, self.layout.ranks, moved)
        logger.info("experts: %s", self.report.line())
        if self.options.show_detail:
            logger.info("experts, by layer:\n%s", self.report.table())
        self._write_in_background()

    def _write_in_background(self) -> None:
        if self.options.placement_file is not None and jax.process_index() == 0:
            self._planner.submit(_save_or_log, self.record(), self.options.placement_file)

    def _all_have(self, plan: Future) -> bool:
        return self._min(int(plan.done())) == 1

    def _all_agree(self, slots: Int[np.ndarray, "layers physical"]) -> bool:
        number = zlib.crc32(np.ascontiguousarray(slots, np.int32).tobytes())
        return self._min(number) == -self._min(-number)

    def _min(self, value: int) -> int:
        return self._votes.all_reduce_min([value] * len(self._votes.local_ranks))


def _save_or_log(record: PlacementRecord, path: str) -> None:
    """A disk that is full must not end an engine; the next rearrangement writes again."""
    try:
        record.save(path)
    except OSError as error:
        logger.error("experts: the placement could not be written to %s: %s", path, error)
