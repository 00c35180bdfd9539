"""Optional policies: priority, fairness by user, waiting time, reservation for expected output."""

import numpy as np
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import Scheduler


def admitted_order(s: Scheduler, count: int) -> list:
    order = []
    while len(order) < count:
        out = s.schedule_prefill()
        order += [item.seq.request_id for item in out.prefill]
        s.process_outputs(out, np.full(len(out.prefill), 9))
        for seq in list(s.sequences):
            if seq.request_id in order:
                s.abort(seq.request_id)
                s.free_seq(seq)
    return order


def test_first_come_first_served_by_default():
    s = Scheduler(small_config(max_num_seqs=1))
    for i, priority in enumerate((0, 5, 2)):
        s.add_request(make_seq(i, priority=priority, user_id="u"))
    assert admitted_order(s, 3) == [0, 1, 2]


def test_higher_priority_goes_first_and_is_preempted_last():
    s = Scheduler(small_config(max_num_seqs=1, priority_scheduling=True))
    for i, priority in enumerate((0, 5, 2, 5)):
        s.add_request(make_seq(i, priority=priority))
    assert admitted_order(s, 4) == [1, 3, 2, 0]
    s = Scheduler(
        small_config(num_blocks=2, priority_scheduling=True, stop_preempted_request=False)
    )
    for i, priority in enumerate((0, 5)):
        s.add_request(make_seq(i, 4, priority=priority, max_tokens=20))
    s.process_outputs(s.schedule(), np.array([9, 9]))
    assert s.schedule_decode().preempted == [s.get(0)]  # the tie alone would have cost request 1


def test_users_share_the_tokens_served():
    s = Scheduler(small_config(max_num_seqs=1, fair_users=True))
    for i in range(4):
        s.add_request(make_seq(f"a{i}", 10, user_id="a", max_tokens=1))
    s.add_request(make_seq("b0", 10, user_id="b", max_tokens=1))
    s.add_request(make_seq("b1", 10, user_id="b", max_tokens=1))
    assert admitted_order(s, 6) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_returning_user_has_no_credit():
    s = Scheduler(small_config(max_num_seqs=1, fair_users=True))
    for i in range(6):
        s.add_request(make_seq(f"a{i}", 10, user_id="a", max_tokens=1))
    assert admitted_order(s, 3) == ["a0", "a1", "a2"]
    for i in range(3):
        s.add_request(make_seq(f"b{i}", 10, user_id="b", max_tokens=1))
    assert admitted_order(s, 6)[:4] in (["a3", "b0", "a4", "b1"], ["b0", "a3", "b1", "a4"])


def test_waiting_too_long_goes_before_priority():
    now = [0.0]
    s = Scheduler(
        small_config(max_num_seqs=1, priority_scheduling=True, max_waiting_time=10.0),
        clock=lambda: now[0],
    )
    s.add_request(make_seq("old", priority=0))
    now[0] = 8.0
    s.add_request(make_seq("new", priority=9))
    assert s.schedule_prefill().prefill[0].seq.request_id == "new"
    s = Scheduler(
        small_config(max_num_seqs=1, priority_scheduling=True, max_waiting_time=10.0),
        clock=lambda: now[0],
    )
    s.add_request(make_seq("old", priority=0))
    now[0] = 19.0
    s.add_request(make_seq("new", priority=9))
    assert s.schedule_prefill().prefill[0].seq.request_id == "old"


def test_reservation_for_expected_output_prevents_preemption():
    def preemptions(fraction):
        d = Driver(
            small_config(
                num_blocks=16, stop_preempted_request=False, expected_output_fraction=fraction
            )
        )
        for i in range(12):
            d.schedulers[0].add_request(make_seq(i, 6, max_tokens=20, first=i, ignore_eos=True))
        d.run()
        d.assert_clean()
        assert all(seq.num_output_tokens == 20 for seq in d.ended)
        return sum(seq.num_preemptions for seq in d.ended)

    assert preemptions(1.0) == 0 < preemptions(0.0)


def test_reservation_never_blocks_the_only_request():
    d = Driver(small_config(num_blocks=4, expected_output_fraction=1.0))
    d.schedulers[0].add_request(make_seq("a", 6, max_tokens=50))
    d.run()
    assert (
        d.ended[0].finish_reason == "insufficient_system_resource"
    )  # it ran until the pool was full


def test_fairness_keeps_books_only_of_the_living():
    d = Driver(small_config(fair_users=True))
    s = d.schedulers[0]
    for i in range(6):
        s.add_request(make_seq(i, user_id=f"user{i % 3}"))
    handed_over = make_seq("h", user_id="user0")
    s.reserve(handed_over, 6)
    s.cancel_reservation(handed_over)
    assert {user: len(requests) for user, requests in s.order._open.items()} == {
        "user0": 2,
        "user1": 2,
        "user2": 2,
    }
    d.run()
    assert not s.order._open and not s.order._served
