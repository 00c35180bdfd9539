"""Prefill selection, one test per rule, in the order of the rules."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import (
    EngineType,
    ImageSpan,
    Scheduler,
    Sequence,
    SequenceStatus,
    StepType,
)


def scheduler(**changes) -> Scheduler:
    return Scheduler(small_config(**changes))


def add(s: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        s.add_request(seq)


def items(out) -> list[tuple]:
    return [(item.seq.request_id, item.q_start, item.q_len, item.is_last) for item in out.prefill]


def commit(s: Scheduler, out, token: int = 9):
    rows = len(out.prefill) if out.is_prefill else out.slots.size
    return s.process_outputs(out, np.full((rows, 1), token, np.int32))


def test_rule_1_finished_head_goes_to_ignored_with_its_reason():
    s = scheduler()
    add(s, make_seq("aborted"), make_seq("failed"), make_seq("grammar"), make_seq("alive"))
    assert s.abort("aborted")
    s.finish(s.get("failed"), SequenceStatus.FINISHED_ERROR, "ve_error")
    s.finish(s.get("grammar"), SequenceStatus.FINISHED_ERROR, "grammar compilation failed")
    out = s.schedule()
    assert [(seq.request_id, seq.finish_reason) for seq in out.ignored] == [
        ("aborted", "abort"),
        ("failed", "ve_error"),
        ("grammar", "grammar compilation failed"),
    ]
    assert items(out) == [("alive", 0, 5, True)]
    s.check_integrity()


def test_rule_2_unschedulable_head_stops_the_selection():
    s = scheduler()
    add(s, make_seq("first"), make_seq("pending"), make_seq("behind"))
    s.get("pending").schedulable = False
    assert items(s.schedule()) == [("first", 0, 5, True)] and s.num_waiting == 2


def test_rule_3_prompt_over_the_limit_is_ignored():
    s = scheduler()
    add(s, make_seq("long", 65), make_seq("fits", 64))
    out = s.schedule()
    assert [(seq.request_id, seq.finish_reason, seq.status) for seq in out.ignored] == [
        ("long", "prompt_length_exceeded", SequenceStatus.FINISHED_IGNORED)
    ]
    assert items(out) == [("fits", 0, 64, True)] and s.get("long") is None


def test_rule_3_prompt_larger_than_the_pool_is_ignored():
    s = scheduler(num_blocks=4)
    add(s, make_seq("large", 17), make_seq("fits", 16))
    out = s.schedule()
    assert [seq.request_id for seq in out.ignored] == ["large"] and items(out) == [
        ("fits", 0, 16, True)
    ]


def test_rule_3_not_enough_free_blocks_stops_the_selection():
    s = scheduler(num_blocks=4)
    add(s, make_seq("a", 9), make_seq("b", 5), make_seq("c", 2))
    assert (
        items(s.schedule()) == [("a", 0, 9, True)] and s.num_waiting == 2
    )  # c would fit, but may not overtake b


def test_rule_4_fork_re_entering_clones_its_partial_block_and_state():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8, num_state_slots=12)
    add(s, make_seq("source", 14))
    s.get("source").chunk_checkpoints = (6,)
    commit(s, s.schedule())
    source = s.get("source")
    fork = s.fork_seq(source, "fork")
    assert (
        s.waiting[0] is fork
        and fork.num_cached == 6
        and fork.block_ids.tolist() == source.block_ids[:2].tolist()
    )
    out = s.schedule()
    assert items(out)[0] == ("fork", 6, 8, True)
    assert out.clone_blocks == [(source.block_ids[1], fork.block_ids[1])] and out.clone_states == [
        (source.state_id, fork.state_id)
    ]
    assert fork.block_ids[0] == source.block_ids[0] and fork.block_ids[1] != source.block_ids[1]
    assert out.zero_states == []
    s.check_integrity()


def test_rule_4_fork_waits_for_a_block_to_clone_into():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8, num_blocks=4)
    add(s, make_seq("source", 14))
    s.get("source").chunk_checkpoints = (6,)
    commit(s, s.schedule())
    s.fork_seq(s.get("source"), "fork")
    assert s.schedule_prefill() is None and s.waiting[0].request_id == "fork"
    s.check_integrity()


def test_rule_5_running_slots_are_the_limit():
    s = scheduler(max_num_seqs=2)
    add(s, *(make_seq(i) for i in range(3)))
    assert [i[0] for i in items(s.schedule())] == [0, 1]
    assert s.num_running == 2 and s.num_waiting == 1


def test_rule_6_sum_of_key_lengths():
    s = scheduler(prefill_max_sum_seqlen_k=64, max_num_batched_tokens=200)
    add(s, make_seq("a", 40), make_seq("b", 25), make_seq("c", 24))
    assert [i[0] for i in items(s.schedule())] == ["a"]
    assert [i[0] for i in items(s.schedule())] == ["b", "c"]


def test_rule_6_counts_keys_not_queries():
    s = scheduler(
        role=EngineType.PROMPT,
        prefill_max_sum_seqlen_k=64,
        chunked_prefill=True,
        max_num_batched_tokens=50,
    )
    add(s, make_seq("a", 60), make_seq("b", 5))
    commit(s, s.schedule())
    assert items(s.schedule()) == [("a", 50, 10, True)]  # 60 keys; with b's 5 it would be 65


def test_rule_6_counts_the_keys_of_a_reused_prefix():
    s = scheduler(
        prefill_max_sum_seqlen_k=64, max_num_batched_tokens=200, enable_prefix_caching=True
    )
    add(s, make_seq("first", 40))
    commit(s, s.schedule())
    add(s, make_seq("a", 30, first=9), make_seq("b", 40))
    assert [i[0] for i in items(s.schedule_prefill())] == ["a"]
    (b,) = items(s.schedule_prefill())
    assert b == ("b", 36, 4, True)  # 4 queries, but 40 keys: with a's 30 too many


def test_rule_7_budget_is_shared_in_order():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=12)
    add(s, make_seq("a", 5), make_seq("b", 5), make_seq("c", 5))
    assert items(s.schedule()) == [("a", 0, 5, True), ("b", 0, 5, True), ("c", 0, 2, False)]


def test_rule_7_chunks_align_to_twice_the_context_parallel_size():
    s = scheduler(
        role=EngineType.PROMPT,
        chunked_prefill=True,
        max_num_batched_tokens=31,
        context_parallel_size=3,
    )
    add(s, make_seq("a", 7), make_seq("b", 40))
    out = s.schedule()
    assert items(out) == [("a", 0, 7, True), ("b", 0, 18, False)]  # 30 usable - 7 = 23, down to 18
    commit(s, out)
    assert items(s.schedule()) == [("b", 18, 22, True)]  # the end of a prompt need not be aligned


def test_rule_7_checkpoints_end_a_chunk_earlier():
    s = scheduler(chunked_prefill=True)
    add(s, make_seq("a", 30, chunk_checkpoints=(8, 20, 30)))
    chunks = []
    for _ in range(3):
        out = s.schedule()
        commit(s, out)
        chunks += items(out)
    assert chunks == [("a", 0, 8, False), ("a", 8, 12, False), ("a", 20, 10, True)]


@pytest.mark.parametrize(
    ("span", "budget", "checkpoint", "expected"),
    [
        (
            (6, 12),
            10,
            None,
            [(0, 6, False), (6, 10, False), (16, 4, True)],
        ),  # budget would split it, and it does not fit: shrink
        (
            (6, 12),
            16,
            8,
            [(0, 12, False), (12, 8, True)],
        ),  # a checkpoint would split it and it fits: grow
        ((0, 10), 10, None, [(0, 10, False), (10, 10, True)]),  # ends exactly with the chunk
        ((10, 20), 12, None, [(0, 10, False), (10, 10, True)]),
    ],
)
def test_rule_7_a_chunk_never_splits_an_image(span, budget, checkpoint, expected):
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=budget)
    add(
        s,
        make_seq(
            "a",
            20,
            image_spans=[span],
            chunk_checkpoints=() if checkpoint is None else (checkpoint,),
        ),
    )
    chunks = []
    while not chunks or not chunks[-1][-1]:
        out = s.schedule()
        commit(s, out)
        chunks += [item[1:] for item in items(out)]
    assert chunks == expected


def test_rule_7_an_image_behind_another_sequence_waits_for_its_own_step():
    s = scheduler(role=EngineType.PROMPT, chunked_prefill=True, max_num_batched_tokens=12)
    add(s, make_seq("a", 5), make_seq("b", 12, image_spans=[ImageSpan(0, 10)]))
    out = s.schedule()
    assert items(out) == [("a", 0, 5, True)]
    commit(s, out)
    assert items(s.schedule()) == [("b", 0, 12, True)]


def test_rule_8_without_chunking_a_prompt_that_does_not_fit_waits():
    s = scheduler()
    add(s, make_seq("a", 40), make_seq("b", 40), make_seq("c", 2))
    assert items(s.schedule()) == [("a", 0, 40, True)] and s.num_waiting == 2


def test_all_blocks_of_a_prompt_are_allocated_with_its_first_chunk():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8)
    add(s, make_seq("a", 30))
    s.schedule()
    assert s.get("a").num_blocks == 8 and s.get("a").slot == -1


def test_last_chunk_takes_a_slot_which_is_also_the_draft_slot():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8, num_speculative_tokens=2)
    add(s, make_seq("a", 12))
    out = s.schedule()
    assert out.admitted == [] and s.num_running == 0
    commit(s, out)
    out = s.schedule()
    seq = s.get("a")
    assert (
        out.admitted == [seq]
        and seq.status is SequenceStatus.RUNNING
        and s.slots.num_drafts[seq.slot] == 2
    )


def test_block_updates_are_growth_and_leave_out_slots_admitted_now():
    s = scheduler(block_size=4)
    add(s, make_seq("a", 8), make_seq("b", 6))
    admitting = s.schedule()
    assert [part.size for part in admitting.block_updates] == [0, 0, 0]
    a, b = admitting.admitted
    s.process_outputs(admitting, np.array([3, 3]))
    grown = s.schedule()
    s.process_outputs(grown, np.array([3, 3]))
    slots, pages, blocks = (part.tolist() for part in grown.block_updates)
    assert (slots, pages, blocks) == ([a.slot], [2], [a.block_ids[2]])
    assert s.schedule().block_updates[0].size == 0  # b writes token 7 into its second block
    assert b.num_blocks == 2


def test_normal_stops_after_one_chunked_sequence():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=32)
    add(s, make_seq("a", 20, chunk_checkpoints=(4,)), make_seq("b", 5))
    assert items(s.schedule()) == [("a", 0, 4, False)]


def test_prompt_goes_on_filling_after_a_chunked_sequence():
    s = scheduler(role=EngineType.PROMPT, chunked_prefill=True, max_num_batched_tokens=32)
    add(
        s,
        make_seq("a", 20, chunk_checkpoints=(4,)),
        make_seq("b", 20, chunk_checkpoints=(6,)),
        make_seq("c", 5),
    )
    assert items(s.schedule()) == [("a", 0, 4, False), ("b", 0, 6, False), ("c", 0, 5, True)]
    assert [seq.request_id for seq in s.waiting] == ["a", "b"]


def test_unfinished_chunk_stands_at_the_front_of_waiting():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8)
    add(s, make_seq("a", 20), make_seq("b", 5))
    commit(s, s.schedule())
    assert [seq.request_id for seq in s.waiting] == ["a", "b"] and s.get("a").num_cached == 8
    s.check_integrity()


def test_empty_result_is_none_on_normal_and_an_empty_output_on_prompt():
    assert scheduler().schedule_prefill() is None
    out = scheduler(role=EngineType.PROMPT).schedule_prefill()
    assert out.step_type is StepType.PREFILL and out.is_empty


def test_ignored_alone_make_a_prefill_output():
    s = scheduler()
    add(s, make_seq("long", 65))
    out = s.schedule_prefill()
    assert out is not None and out.is_empty and len(out.ignored) == 1


def test_waiting_prefixes_give_way_when_nobody_else_holds_blocks():
    d = Driver(
        small_config(
            chunked_prefill=True,
            max_num_batched_tokens=8,
            num_blocks=4,
            stop_preempted_request=False,
        )
    )
    s = d.schedulers[0]
    s.add_request(make_seq("source", 16, max_tokens=1))
    d.step()
    forks = [s.fork_seq(s.get("source"), f"fork{i}", max_tokens=1) for i in range(2)]
    s.abort("source")
    d.run()
    d.assert_clean()
    assert [fork.finish_reason for fork in forks] == ["length", "length"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(prompt_token_ids=[]), ("at least one token",)),
        (dict(max_tokens=-1), ("max_tokens", "-1")),
        (dict(min_tokens=9), ("min_tokens", "9", "8")),
        (dict(image_spans=[(2, 6)]), ("[2, 6)", "5 tokens")),
        (dict(image_spans=[(0, 3), (2, 4)]), ("[2, 4)",)),
    ],
)
def test_bad_requests_name_request_value_and_limit(arguments, words):
    with pytest.raises(ValueError) as error:
        Sequence("bad one", **(dict(prompt_token_ids=[1] * 5, max_tokens=8) | arguments))
    assert all(word in str(error.value) for word in ("'bad one'", *words))


def test_requests_that_could_never_run_are_refused_when_added():
    s = scheduler(chunked_prefill=True, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match=r"'a'.*\[1, 11\).*10 tokens.*8"):
        s.add_request(make_seq("a", 12, image_spans=[(1, 11)]))
    with pytest.raises(ValueError, match=r"'b'.*chunk_checkpoints.*chunked_prefill"):
        scheduler().add_request(make_seq("b", chunk_checkpoints=(2,)))
    s.add_request(make_seq(0))
    with pytest.raises(ValueError, match=r"request 0: .*already in use"):
        s.add_request(make_seq(0))
    assert s.num_waiting == 1


def test_max_tokens_zero_becomes_one():
    d = Driver(small_config())
    d.schedulers[0].add_request(make_seq("a", max_tokens=0))
    d.run()
    assert d.ended[0].num_output_tokens == 1 and d.ended[0].finish_reason == "length"
