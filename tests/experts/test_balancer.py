"""When experts move: what is due at which step, and what processes must agree on. No device."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer_jax.expert_options import ExpertOptions
from deepinfer_jax.experts.balancer import STEPS_TO_HOST, ExpertBalancer
from deepinfer_jax.experts.placement_file import PlacementRecord
from deepinfer_jax.experts.policy import RankLayout, balance, imbalance
from deepinfer_jax.scheduler.group import LocalDPGroup

LAYERS, EXPERTS, PHYSICAL, RANKS = 3, 8, 12, 4
LOADS = np.random.default_rng(0).integers(0, 50, (5, LAYERS, EXPERTS)).astype(np.int32)
EVERY = 10


class FakeArrays:
    """Slots in host memory, and when which layer moved."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(
            layers=range(LAYERS), num_experts=EXPERTS, num_physical=PHYSICAL
        )
        self.slots = np.tile(np.arange(PHYSICAL) % EXPERTS, (LAYERS, 1)).astype(np.int32)
        self.step, self.reads, self.moves = 0, [], []
        self.registered = None

    def register(self, *, moves: bool) -> None:
        self.registered = moves

    def read_counts(self) -> np.ndarray:
        self.reads.append(self.step)
        return LOADS

    def move(self, layer: int, slots: np.ndarray) -> int:
        moved = int((self.slots[layer] != slots).sum())
        self.moves.append((self.step, layer))
        self.slots[layer] = slots
        return moved


class SteppingPolicy:
    """`balance`, on the planner's thread, once it is let go."""

    def __init__(self) -> None:
        self.go, self.done = threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs):
        assert self.go.wait(30)
        return balance(*args, **kwargs)


def balancer(votes=None, policy=None, **options) -> tuple[ExpertBalancer, FakeArrays]:
    arrays = FakeArrays()
    settings = ExpertOptions(**{"window": 5, "interval": EVERY, **options})
    policy = policy or balance
    made = ExpertBalancer(arrays, settings, RankLayout(RANKS), votes or LocalDPGroup(RANKS), policy)
    return made, arrays


def step(b: ExpertBalancer, arrays: FakeArrays, *, prefill: bool = False, steps: int = 1) -> None:
    """A step; the planner has all the time it wants before the next."""
    arrays.step += 1
    b.after_dispatch(prefill, steps)
    b._planner.submit(int).result()


def until_moved(b: ExpertBalancer, arrays: FakeArrays, limit: int = 100) -> int:
    """Steps until a rearrangement is complete."""
    before = b.report.rearrangements
    for count in range(1, limit):
        step(b, arrays)
        if b.report.rearrangements > before:
            return count
    raise AssertionError("no rearrangement")


def test_one_rearrangement_from_counts_to_moves():
    b, arrays = balancer(layers_per_step=2)
    loads = LOADS.swapaxes(0, 1)
    expected = balance(loads, PHYSICAL, RankLayout(RANKS), arrays.slots.copy())
    worse = imbalance(loads, arrays.slots, RANKS)
    until_moved(b, arrays)
    np.testing.assert_array_equal(arrays.slots, expected)
    assert arrays.reads == [EVERY]
    read = EVERY + STEPS_TO_HOST
    first = arrays.moves[0][0]
    assert read < first <= read + 2  # the plan may be there at once or a step later
    assert arrays.moves == [(first, 0), (first, 1), (first + 1, 2)]
    np.testing.assert_allclose(b.report.before, worse)
    np.testing.assert_allclose(b.report.now, imbalance(loads, expected, RANKS))
    assert (b.report.now < b.report.before).all()
    b.close()


def test_steps_of_a_dispatch_count_and_the_period_starts_with_the_rearrangement():
    b, arrays = balancer(layers_per_step=LAYERS)
    for _ in range(3 * EVERY // 2):
        step(b, arrays, steps=2)
    assert arrays.reads == [EVERY // 2, EVERY, 3 * EVERY // 2]
    b.close()


def test_an_engine_that_decodes_moves_experts_beside_decode_steps_only():
    b, arrays = balancer(between_decodes=True, counts_prefill=False, layers_per_step=1)
    for _ in range(3 * EVERY):
        step(b, arrays, prefill=True)
    assert arrays.reads == []
    decodes = []
    for i in range(4 * EVERY):
        prefill = i % 3 == 0
        step(b, arrays, prefill=prefill)
        if not prefill:
            decodes.append(arrays.step)
    assert arrays.moves and {at for at, _ in arrays.moves} <= set(decodes)
    b.close()


def test_prefill_steps_count_where_asked_and_the_next_decode_step_rearranges():
    b, arrays = balancer(between_decodes=True, counts_prefill=True)
    for _ in range(EVERY + 5):
        step(b, arrays, prefill=True)
    assert arrays.reads == []
    step(b, arrays)
    assert arrays.reads == [EVERY + 6]
    b.close()


def test_nothing_moves_while_the_policy_is_at_work():
    policy = SteppingPolicy()
    b, arrays = balancer(policy=policy, layers_per_step=LAYERS)
    for _ in range(5 * EVERY):
        arrays.step += 1
        b.after_dispatch(False, 1)
    assert arrays.reads == [EVERY] and not arrays.moves
    policy.go.set()
    assert until_moved(b, arrays) <= 2
    b.close()


class TwoProcesses:
    """This process's votes, and another one's values that `other` makes of them."""

    local_ranks, size = (0,), 2

    def __init__(self, other) -> None:
        self.other = other

    def all_reduce_min(self, values: list[int]) -> int:
        return min(*values, self.other(values[0]))

    def agree_min(self, value: int) -> int:
        return self.all_reduce_min([value])


def test_processes_wait_for_each_other():
    late = {"ready": False}

    def other(value: int) -> int:
        return value if late["ready"] or value not in (0, 1) else 0

    b, arrays = balancer(TwoProcesses(other))
    for _ in range(3 * EVERY):
        step(b, arrays)
    assert not arrays.moves
    late["ready"] = True
    until_moved(b, arrays)
    b.close()


def test_processes_that_come_to_different_placements_use_none(caplog):
    b, arrays = balancer(TwoProcesses(lambda value: value if value in (0, 1) else value - 1))
    with caplog.at_level(logging.ERROR):
        for _ in range(2 * EVERY - 1):
            step(b, arrays)
    assert not arrays.moves and b.report.disagreements == 1 and b.report.version == 0
    assert "different placements; none is used" in caplog.text
    b.close()


def test_looks_between_rearrangements_move_nothing():
    b, arrays = balancer(interval=0, stat_interval=4)
    assert arrays.registered is False
    for _ in range(12):
        step(b, arrays)
    assert arrays.reads == [4, 8, 12] and not arrays.moves
    np.testing.assert_allclose(b.report.now, imbalance(LOADS.swapaxes(0, 1), arrays.slots, RANKS))
    b.close()


def test_the_file_is_kept_up_to_date_and_starts_the_next_engine(tmp_path):
    path = str(tmp_path / "new" / "placement")
    b, arrays = balancer(placement_file=path, layers_per_step=LAYERS)
    b.start()
    until_moved(b, arrays)
    b.close()
    record = PlacementRecord.load(path)
    np.testing.assert_array_equal(record.slots, arrays.slots)
    np.testing.assert_array_equal(record.loads, LOADS.swapaxes(0, 1))
    assert record.version == 1
    again, fresh = balancer(placement_file=path)
    again.start()
    np.testing.assert_array_equal(fresh.slots, arrays.slots)
    assert again.report.version == 1
    again.close()


def test_a_file_of_other_ranks_gives_its_loads(tmp_path):
    loads = LOADS.swapaxes(0, 1)
    slots = balance(loads, 8, RankLayout(2))
    PlacementRecord(7, 2, slots, loads).save(tmp_path / "p")
    b, arrays = balancer(placement_file=str(tmp_path / "p"))
    b.start()
    np.testing.assert_array_equal(arrays.slots, balance(loads, PHYSICAL, RankLayout(RANKS)))
    assert b.report.version == 8
    b.close()


def test_a_file_of_another_model_is_refused(tmp_path):
    loads = np.ones((2, 1, EXPERTS), np.int32)
    PlacementRecord(0, 2, balance(loads, 8, RankLayout(2)), loads).save(tmp_path / "p")
    b, _ = balancer(placement_file=str(tmp_path / "p"))
    with pytest.raises(ValueError, match=r"p: 2 layers of 8 experts, the model has 3 of 8"):
        b.start()
    b._planner.shutdown()


def test_processes_that_read_different_files_do_not_start(tmp_path):
    loads = LOADS.swapaxes(0, 1)
    PlacementRecord(0, 4, balance(loads, 12, RankLayout(4)), loads).save(tmp_path / "p")
    b, arrays = balancer(TwoProcesses(lambda v: 0), placement_file=str(tmp_path / "p"))
    with pytest.raises(ValueError, match="read different expert placements from"):
        b.start()
    assert not arrays.moves
    b._planner.shutdown()


def test_a_full_disk_does_not_end_the_engine(tmp_path, caplog):
    (tmp_path / "folder").write_text("a file where a folder should be")
    b, arrays = balancer(placement_file=str(tmp_path / "folder" / "placement"))
    until_moved(b, arrays)
    b._planner.submit(int).result()
    assert "could not be written" in caplog.text
    b.close()
