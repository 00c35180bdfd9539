"""Which step a group takes: the decision table of NORMAL engines, and what PROMPT and COMPLETION do
instead."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import EngineType, LocalDPGroup, Scheduler, SchedulerGroup, StepType


class CountingGroup(LocalDPGroup):
    """Notes every vote."""

    def __init__(self, size):
        super().__init__(size)
        self.votes = []

    def all_reduce_min(self, values):
        self.votes.append(values)
        return super().all_reduce_min(values)


def normal_group(ranks: int, *, all_interval: int = 3, any_interval: int = 5, **changes):
    config = small_config(
        prefill_attempt_interval=all_interval, prefill_any_attempt_interval=any_interval, **changes
    )
    driver = Driver(config, ranks)
    votes = CountingGroup(ranks)
    driver.group = SchedulerGroup(driver.schedulers, votes)
    return driver, votes


def with_running(driver, rank: int = 0, request_id="running"):
    """Something to decode for long, so that the group is not idle; decode_step is 0 afterwards."""
    driver.schedulers[rank].add_request(make_seq(request_id, 4, max_tokens=50))
    driver.step()
    assert driver.group.decode_step == 0
    driver.group.dp_group.votes.clear()


def step_type(driver) -> StepType:
    return driver.step()[0].step_type


def test_neither_point_decodes_without_a_vote():
    driver, votes = normal_group(1)
    with_running(driver)
    driver.group.decode_step = 1
    driver.schedulers[0].add_request(make_seq("new"))
    assert step_type(driver) is StepType.DECODE and votes.votes == []


def test_all_point_with_every_rank_wanting_prefills():
    driver, votes = normal_group(2)
    with_running(driver)
    driver.group.decode_step = 3
    for rank in (0, 1):
        driver.schedulers[rank].add_request(make_seq(f"new{rank}"))
    assert step_type(driver) is StepType.PREFILL and votes.votes == [[1, 1], [0, 0]]


def test_all_point_with_one_rank_not_wanting_decodes_after_one_vote():
    driver, votes = normal_group(2)
    with_running(driver)
    driver.group.decode_step = 3
    driver.schedulers[0].add_request(make_seq("new"))
    assert step_type(driver) is StepType.DECODE and votes.votes == [[1, 0]]


def test_all_point_comes_right_after_a_prefill():
    driver, votes = normal_group(1)
    with_running(driver)
    driver.schedulers[0].add_request(make_seq("new"))
    assert step_type(driver) is StepType.PREFILL and votes.votes == [[1], [0]]


def test_decode_step_zero_is_no_any_point():
    driver, votes = normal_group(2, any_interval=1)
    with_running(driver)
    driver.schedulers[0].add_request(make_seq("new"))
    assert step_type(driver) is StepType.DECODE and votes.votes == [
        [1, 0]
    ]  # decided as an ALL point


def test_any_point_with_one_rank_wanting_prefills_and_the_other_keeps_company():
    driver, votes = normal_group(2)
    with_running(driver)
    driver.group.decode_step = 5
    driver.schedulers[1].add_request(make_seq("new"))
    outputs = driver.step()
    assert [out.step_type for out in outputs] == [StepType.PREFILL] * 2
    assert outputs[0].is_empty and [item.seq.request_id for item in outputs[1].prefill] == ["new"]
    assert votes.votes == [[1, 0], [1, 0]] and driver.group.decode_step == 0


def test_any_point_with_nobody_wanting_decodes():
    driver, votes = normal_group(2)
    with_running(driver)
    driver.group.decode_step = 5
    assert step_type(driver) is StepType.DECODE and votes.votes == [[1, 1]]


def test_any_wins_over_all_when_both_points_fall_together():
    driver, votes = normal_group(2, all_interval=5)
    with_running(driver)
    driver.group.decode_step = 5
    driver.schedulers[1].add_request(make_seq("new"))
    assert step_type(driver) is StepType.PREFILL and votes.votes[0] == [1, 0]


def test_second_vote_turns_to_decode_when_nobody_could_schedule():
    driver, votes = normal_group(1, max_num_seqs=1)
    with_running(driver)
    driver.schedulers[0].add_request(make_seq("new"))
    for step in range(4):  # the slots stay full: no endless row of empty prefill steps
        assert step_type(driver) is StepType.DECODE and driver.group.decode_step == step + 1
    assert votes.votes[:2] == [[1], [1]]


def test_rank_that_wanted_but_failed_runs_an_empty_prefill_not_a_decode():
    driver, votes = normal_group(2, max_num_seqs=1)
    with_running(driver, rank=0)
    driver.schedulers[0].add_request(make_seq("cannot"))
    driver.schedulers[1].add_request(make_seq("can"))
    outputs = driver.step()
    assert votes.votes == [[1, 1], [1, 0]]
    assert outputs[0].is_prefill and outputs[0].is_empty and not outputs[1].is_empty


def test_cache_watermark_stops_wanting_while_something_decodes():
    driver, _ = normal_group(1, num_blocks=10, max_model_len=64)
    s = driver.schedulers[0]
    with_running(driver)
    s.add_request(make_seq("new", 3))
    s.blocks.allocate(8)
    assert s.cache_usage == 0.9 and s.wants_prefill()
    s.blocks.allocate(1)
    assert s.cache_usage > 0.9 and not s.wants_prefill()
    assert (
        s.abort("running") and s.wants_prefill()
    )  # nothing left to decode: waiting would be for ever


def test_unschedulable_head_does_not_want():
    driver, _ = normal_group(1)
    seq = make_seq("image pending")
    seq.schedulable = False
    driver.schedulers[0].add_request(seq)
    driver.schedulers[0].add_request(make_seq("behind"))
    assert not driver.schedulers[0].wants_prefill()
    seq.schedulable = True
    assert driver.schedulers[0].wants_prefill()


@pytest.mark.parametrize(("all_interval", "any_interval"), [(70, 100), (3, 5), (7, 2)])
def test_isolated_ranks_prompt_waits_at_most_the_any_interval(all_interval, any_interval):
    driver, _ = normal_group(
        3,
        all_interval=all_interval,
        any_interval=any_interval,
        max_model_len=400,
        num_blocks=400,
        max_num_batched_tokens=400,
    )
    driver.schedulers[0].add_request(make_seq("running", 4, max_tokens=390, ignore_eos=True))
    driver.step()
    driver.schedulers[2].add_request(make_seq("isolated"))
    waited = 0
    while not driver.step()[2].prefill:
        waited += 1
    assert waited <= any_interval


def test_idle_group_prefills_at_once():
    driver, _ = normal_group(2, all_interval=70, any_interval=100)
    driver.group.decode_step = 17
    driver.schedulers[1].add_request(make_seq("new"))
    assert step_type(driver) is StepType.PREFILL


def test_all_ranks_take_one_step_type_always():
    rng = np.random.default_rng(3)
    driver, _ = normal_group(4, all_interval=2, any_interval=3)
    for step in range(120):
        if rng.random() < 0.3:
            driver.schedulers[rng.integers(4)].add_request(
                make_seq(step, int(rng.integers(1, 20)), max_tokens=int(rng.integers(1, 20)))
            )
        driver.step()  # asserts it
    driver.run()
    driver.assert_clean()


def test_prompt_engine_always_prefills_and_idles_with_an_empty_prefill_output():
    group = SchedulerGroup(
        [Scheduler(small_config(role=EngineType.PROMPT)) for _ in range(2)], LocalDPGroup(2)
    )
    for _ in range(3):
        outputs = group.schedule()
        assert all(out is not None and out.is_prefill and out.is_empty for out in outputs)
    group.schedulers[0].add_request(make_seq("a"))
    outputs = group.schedule()
    assert outputs[0].prefill and outputs[1].is_prefill and outputs[1].is_empty


def test_completion_engine_always_decodes():
    s = Scheduler(small_config(role=EngineType.COMPLETION))
    assert s.schedule().step_type is StepType.DECODE
    with pytest.raises(ValueError, match=r"'a'.*COMPLETION"):
        s.add_request(make_seq("a"))


def test_group_refuses_wrong_number_of_ranks_and_unequal_configs():
    a, b = Scheduler(small_config()), Scheduler(small_config(num_blocks=65))
    with pytest.raises(ValueError, match="1 schedulers for 2"):
        SchedulerGroup([a], LocalDPGroup(2))
    with pytest.raises(ValueError, match="equal configs"):
        SchedulerGroup([a, b], LocalDPGroup(2))
    with pytest.raises(ValueError, match="at least one rank"):
        LocalDPGroup(0)
