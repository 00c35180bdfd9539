"""Decode selection, one test per rule."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import EngineType, Scheduler, SequenceStatus, StepType, lifecycle


def commit(s, out, token: int = 9):
    rows = len(out.prefill) if out.is_prefill else out.slots.size
    return s.process_outputs(out, np.full((rows, 1), token, np.int32))


def running(lengths, **changes) -> Scheduler:
    """A scheduler with sequences 0, 1, ... running, whose outputs have the given lengths (all > 0),
    the same prompt length."""
    s = Scheduler(small_config(prefill_attempt_interval=1, **changes))
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        s.add_request(make_seq(i, 3, max_tokens=60))
    longest = max(lengths)
    held = sorted(s.waiting, key=lambda seq: -lengths[seq.request_id])
    s.waiting.clear()
    for left in range(longest, 0, -1):
        for seq in [seq for seq in held if lengths[seq.request_id] == left]:
            s.waiting.append(seq)
        if s.waiting:
            commit(s, s.schedule_prefill())
        if left > 1:
            commit(s, s.schedule_decode())
    assert [s.get(i).num_output_tokens for i in range(len(lengths))] == list(lengths)
    return s


def ids(out) -> list:
    return [seq.request_id for seq in out.seqs]


def test_rule_1_finished_are_collected_from_running():
    s = running([3, 2])
    s.abort(0)
    out = s.schedule_decode()
    assert out.finished == [s.get(0)] and ids(out) == [1]
    assert s.get(0).num_blocks > 0  # held until free_seq
    assert s.free_seq(out.finished[0]) and s.get(0) is None
    s.check_integrity()


def test_rule_1_finished_are_swept_out_of_waiting_wherever_they_stand():
    s = running([2])
    for name in "abc":
        s.add_request(make_seq(name))
    s.abort("b")
    out = s.schedule_decode()
    assert [seq.request_id for seq in out.finished] == ["b"] and [
        seq.request_id for seq in s.waiting
    ] == ["a", "c"]
    assert s.free_seq(out.finished[0])
    s.check_integrity()


def test_rule_2_prompted_go_first_while_there_are_slots():
    s = running([2, 2], max_num_seqs=3)
    source = s.get(0)
    forks = [s.fork_seq(source, f"fork{i}") for i in range(2)]
    out = s.schedule_decode()
    assert forks[0].status is SequenceStatus.RUNNING and out.admitted == [forks[0]]
    assert forks[1].status is SequenceStatus.PROMPTED and s.num_prompted == 1
    s.check_integrity()


def test_rule_2_fork_clones_its_last_block_unless_it_is_full():
    s = running([3])  # 3 + 3 tokens, 5 with KV: the second block is half written
    source = s.get(0)
    half, full = (
        s.fork_seq(source, "half"),
        s.fork_seq(source, "full", num_tokens=5),
    )  # 4 with KV: the first block only
    out = s.schedule_decode()
    assert out.clone_blocks == [(source.block_ids[1], half.block_ids[1])]
    assert full.block_ids[0] == source.block_ids[0] == half.block_ids[0] and full.num_blocks == 2
    s.check_integrity()


def test_rule_2_fork_stops_when_no_block_is_free():
    s = running([3], num_blocks=2)
    s.fork_seq(s.get(0), "fork")
    out = s.schedule_decode()
    assert ids(out) == [0] and s.num_prompted == 1 and out.clone_blocks == []
    s.check_integrity()


def test_rule_2_fork_takes_the_last_block_over_when_its_source_is_gone():
    s = running([3])
    fork = s.fork_seq(s.get(0), "fork")
    s.abort(0)
    s.free_seq(s.get(0))
    out = s.schedule_decode()
    assert ids(out) == ["fork"] and out.clone_blocks == [] and fork.num_blocks == 2
    s.check_integrity()


def test_rule_2_forks_that_block_each_other_are_preempted_from_the_back():
    s = running([3], num_blocks=2, stop_preempted_request=False)
    forks = [s.fork_seq(s.get(0), i) for i in ("a", "b")]
    s.abort(0)
    s.free_seq(s.get(0))
    out = s.schedule_decode()
    assert ids(out) == ["a"] and out.preempted == [forks[1]] and s.waiting[0] is forks[1]
    s.check_integrity()


def test_rule_3_longest_output_is_the_one_that_goes_without():
    s = running(
        [6, 2, 4], num_blocks=6, stop_preempted_request=False
    )  # KV 8, 4, 6 in 2 + 1 + 2 blocks
    assert s.blocks.num_free == 1
    out = s.schedule_decode()  # 1 and 0 need another block, 1 is served first
    assert [seq.request_id for seq in out.preempted] == [0] and ids(out) == [2, 1]
    assert (
        s.waiting[0].request_id == 0
        and s.get(0).num_output_tokens == 6
        and s.get(0).num_cached == 0
    )
    s.check_integrity()


def test_rule_3_the_shortest_is_served_by_preempting_the_longest():
    s = running([6, 2], num_blocks=3, stop_preempted_request=False)  # KV 8 and 4 in 2 + 1 blocks
    out = s.schedule_decode()
    assert [seq.request_id for seq in out.preempted] == [0] and ids(out) == [1]
    assert s.get(1).num_blocks == 2 and s.blocks.num_free == 1


def test_rule_3_a_sequence_that_needs_no_block_may_be_the_one_preempted():
    s = running(
        [5, 2], num_blocks=3, stop_preempted_request=False
    )  # KV 7 and 4: only the shorter one needs a block
    out = s.schedule_decode()
    assert [seq.request_id for seq in out.preempted] == [0] and ids(out) == [1]


def test_rule_3_ties_preempt_the_later_admitted():
    s = running(
        [2, 2, 2], num_blocks=4, stop_preempted_request=False
    )  # 5 tokens each: KV 4 in one block each, all need a second
    out = s.schedule_decode()
    assert [seq.request_id for seq in out.preempted] == [2] and sorted(ids(out)) == [0, 1]


def test_rule_3_none_left_to_preempt_preempts_itself():
    s = running([2], num_blocks=1, stop_preempted_request=False)
    out = s.schedule_decode()
    assert out.is_empty and [seq.request_id for seq in out.preempted] == [0] and s.num_running == 0
    s.check_integrity()


def test_rule_3_stop_preempted_request_finishes_it():
    s = running([6, 2, 4], num_blocks=6)
    out = s.schedule_decode()
    seq = s.get(0)
    assert (
        seq.status is SequenceStatus.FINISHED_PREEMPTED
        and seq.finish_reason == "insufficient_system_resource"
    )
    assert (
        out.preempted == [seq]
        and out.finished == [seq]
        and seq.num_blocks == 0
        and s.num_waiting == 0
    )
    assert s.free_seq(seq)
    s.check_integrity()


def test_rule_3_an_active_grammar_cannot_be_recomputed():
    s = running([6, 2, 4], num_blocks=6, stop_preempted_request=False)
    s.get(0).grammar_active = True
    assert s.schedule_decode().preempted[0].finish_reason == "insufficient_system_resource"


def test_rule_3_preempted_ones_go_in_front_of_waiting_but_behind_unfinished_chunks():
    s = running(
        [6, 2, 4],
        num_blocks=8,
        stop_preempted_request=False,
        chunked_prefill=True,
        max_num_batched_tokens=8,
    )
    s.add_request(make_seq("chunk", 8, chunk_checkpoints=(4,)))
    s.add_request(make_seq("later", 3))
    commit(s, s.schedule_prefill())
    s.schedule_decode()
    assert [seq.request_id for seq in s.waiting] == ["chunk", 0, "later"]


def test_nobody_is_preempted_while_an_ended_sequence_is_about_to_release_enough():
    s = running([6, 2, 4], num_blocks=6)
    s.abort(2)
    out = s.schedule_decode()
    assert out.preempted == [] and ids(out) == [1]  # 0 misses one step
    s.free_seq(out.finished[0])
    commit(s, out)
    assert sorted(ids(s.schedule_decode())) == [0, 1]


def test_exactly_enough_about_to_be_released_is_enough():
    s = running([6, 2, 2], num_blocks=5)  # KV in 2 + 1 + 1 blocks; 0 and 1 need one more each
    s.abort(2)  # is about to release its one block, which is what 0 needs
    out = s.schedule_decode()
    assert out.preempted == [] and ids(out) == [1]


def test_rule_4_scheduled_are_sorted_by_length_descending():
    s = running([2, 7, 4, 1])
    out = s.schedule_decode()
    assert (
        ids(out) == [1, 2, 0, 3]
        and out.kv_lens.tolist() == [10, 7, 5, 4]
        and out.q_lens.tolist() == [1] * 4
    )


def test_rule_4_q_lens_follow_the_drafts_to_verify():
    s = running([3, 2, 1], num_speculative_tokens=3)
    s.set_num_drafts(np.array([s.get(0).slot, s.get(1).slot]), np.array([0, 2]))
    out = s.schedule_decode()
    assert (
        ids(out) == [0, 1, 2]
        and out.q_lens.tolist() == [1, 3, 4]
        and out.kv_lens.tolist() == [6, 7, 7]
    )
    with pytest.raises(ValueError, match=r"num_speculative_tokens=3"):
        s.set_num_drafts(np.array([0]), np.array([4]))


def test_drafts_never_reach_past_the_length_limit():
    s = Scheduler(small_config(num_speculative_tokens=3))
    s.add_request(make_seq("a", 4, max_tokens=3))
    commit(s, s.schedule())
    assert s.schedule_decode().q_lens.tolist() == [2]  # one token may follow, and the one after it


def test_preempted_sequence_is_recomputed_to_the_same_text():
    d = Driver(small_config(num_blocks=7, stop_preempted_request=False))
    s = d.schedulers[0]
    for i in range(3):
        s.add_request(make_seq(i, 6, max_tokens=12, first=i, ignore_eos=True))
    d.run()  # the driver compares every token
    d.assert_clean()
    assert sum(seq.num_preemptions for seq in d.ended) > 0 and all(
        seq.num_output_tokens == 12 for seq in d.ended
    )


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_what_it_has():
    d = Driver(small_config(num_blocks=3, stop_preempted_request=False))
    d.schedulers[0].add_request(make_seq("a", 6, max_tokens=30))
    d.run()
    assert (
        d.ended[0].finish_reason == "insufficient_system_resource" and d.ended[0].num_tokens == 13
    )


def test_empty_decode_is_a_legal_step():
    out = Scheduler(small_config(role=EngineType.COMPLETION)).schedule()
    assert (
        out.step_type is StepType.DECODE and out.is_empty and out.seqs == [] and out.num_tokens == 0
    )


# ---- zero-overhead scheduling


def test_zos_schedules_ahead_and_drops_surplus():
    s = Scheduler(small_config(zos=True))
    s.add_request(make_seq("a", 4, max_tokens=10, eos_token_ids=(9,)))
    first = s.schedule()
    second = s.schedule_decode()  # before the first token is known
    assert second.kv_lens.tolist() == [5] and s.get("a").num_in_flight == 2
    assert commit(s, first, token=9).finished == [s.get("a")]
    third = s.schedule_decode()
    assert third.is_empty and third.finished == [s.get("a")]
    processed = commit(s, second, token=9)
    assert (
        processed.finished == []
        and processed.num_accepted.tolist() == [0]
        and s.get("a").output_token_ids.tolist() == [9]
    )
    assert s.get("a").num_in_flight == 0


def test_zos_sequence_certain_to_end_by_length_is_not_scheduled_again():
    s = Scheduler(small_config(zos=True))
    s.add_request(make_seq("a", 4, max_tokens=2))
    first, second, third = s.schedule(), s.schedule_decode(), s.schedule_decode()
    assert second.slots.size == 1 and third.is_empty
    commit(s, first)
    assert commit(s, second).finished == [s.get("a")]


def test_zos_result_for_a_slot_that_changed_hands_is_dropped():
    s = Scheduler(small_config(zos=True, max_num_seqs=1))
    s.add_request(make_seq("a", 4))
    commit(s, s.schedule())
    in_flight = s.schedule_decode()
    s.abort("a")
    s.free_seq(s.get("a"))
    s.add_request(make_seq("b", 4))
    prefill = s.schedule_prefill()
    assert s.get("b").slot == in_flight.slots[0]
    assert commit(s, in_flight).num_accepted.tolist() == [0]
    assert s.get("b").num_output_tokens == 0 and s.get("b").num_in_flight == 1
    assert commit(s, prefill).num_accepted.tolist() == [1]
    s.check_integrity()


def test_zos_sequence_preempted_in_flight_skips_that_result():
    s = running([6, 2, 4], num_blocks=7, stop_preempted_request=False, zos=True)
    step = s.schedule_decode()  # takes the last free block; lengths 9, 5, 7 -> KV 9, 5, 7
    following = s.schedule_decode()
    third = s.schedule_decode()
    lost = [seq.request_id for out in (following, third) for seq in out.preempted]
    assert lost and lost[0] == 0 and s.get(0).status is SequenceStatus.WAITING
    processed = commit(s, step)
    assert processed.num_accepted.tolist() == [
        0 if seq.request_id in lost else 1 for seq in step.seqs
    ]
    assert s.get(0).num_output_tokens == 6
    s.check_integrity()


def test_zos_prefill_preempted_in_flight_is_dropped_as_a_whole():
    s = running([6, 2], num_blocks=5, stop_preempted_request=False, zos=True)
    lifecycle.preempt(s.state, s.get(0), s.empty_prefill())
    recomputed = s.schedule_prefill()  # 9 tokens again, in 3 blocks
    assert [item.seq.request_id for item in recomputed.prefill] == [0] and s.blocks.num_free == 1
    s.blocks.allocate(1)
    out = s.schedule_decode()  # 1 needs a block, 0 has the longer output
    assert out.preempted == [s.get(0)]
    assert commit(s, recomputed).num_accepted.tolist() == [0]
    assert (
        s.get(0).num_output_tokens == 6 and s.get(0).num_cached == 0 and s.get(0).num_in_flight == 0
    )


def test_zos_never_preempts_itself_while_its_token_is_in_flight():
    s = running([1], num_blocks=1, stop_preempted_request=False, zos=True)  # 4 tokens, KV 3
    first = s.schedule_decode()
    second = s.schedule_decode()
    assert second.is_empty and second.preempted == []
    commit(s, first)
    assert s.schedule_decode().preempted == [s.get(0)] and s.get(0).num_output_tokens == 2


def test_outputs_name_their_sequences_even_after_the_slot_changed_hands():
    s = running([2, 3])
    out = s.schedule_decode()
    s.abort(1)
    s.free_seq(s.get(1))
    assert ids(out) == [1, 0]
