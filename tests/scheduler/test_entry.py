"""Hand-over entry and exit, forks."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import EngineType, Scheduler, SequenceStatus


def completion(**changes) -> Scheduler:
    return Scheduler(small_config(role=EngineType.COMPLETION, **changes))


def prompt_engine(**changes) -> Scheduler:
    return Scheduler(small_config(role=EngineType.PROMPT, **changes))


def prefilled(s: Scheduler, name="a", prompt_len: int = 6, token: int = 9, **arguments):
    seq = make_seq(name, prompt_len, **arguments)
    s.add_request(seq)
    s.process_outputs(s.schedule(), np.array([token]))
    return seq


# ---- receiving


def test_reserve_holds_slot_and_blocks_and_queues_nothing():
    s = completion()
    seq = make_seq("a", 6)
    assert s.reserve(seq, 7)
    assert (
        seq.status is SequenceStatus.RESERVED
        and seq.slot >= 0
        and seq.num_blocks == 2
        and s.blocks.num_used == 2
    )
    assert not s.has_unfinished() and s.schedule().is_empty
    s.check_integrity()


def test_arrived_kv_is_pure_decode():
    s = completion()
    seq = make_seq("a", 6, max_tokens=3)
    s.reserve(seq, 7)
    s.enqueue_prompted(seq, [9])
    assert seq.num_cached == 6 and seq.output_token_ids.tolist() == [9]
    out = s.schedule()
    assert (
        out.admitted == [seq]
        and out.kv_lens.tolist() == [7]
        and out.block_updates[2].size == 0  # its whole table is written when it is admitted
    )
    s.process_outputs(out, np.array([4]))
    s.process_outputs(s.schedule(), np.array([5]))
    assert (
        seq.output_token_ids.tolist() == [9, 4, 5] and seq.finish_reason == "length"
    )  # max_tokens counts the handed-over token


def test_reserve_is_refused_when_there_is_no_slot_or_no_block():
    s = completion(max_num_seqs=2, num_blocks=5)
    assert s.reserve(make_seq("a", 6), 7)
    assert not s.reserve(make_seq("b", 15), 16) and s.get("b") is None
    assert s.reserve(make_seq("c", 6), 7)
    assert not s.reserve(make_seq("d", 1), 2)
    s.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "words"), [(5, "6 tokens"), (66, "65"), (24, "6 blocks, the pool has 5")]
)
def test_reservation_that_could_never_work_is_an_error(num_tokens, words):
    s = completion(num_blocks=5)
    with pytest.raises(ValueError, match=f"'a'.*{words}"):
        s.reserve(make_seq("a", 6), num_tokens)


def test_reserve_refuses_duplicates_and_roles_without_decode():
    s = completion()
    seq = make_seq("a")
    s.add_request(seq, enqueue=False)
    assert s.num_waiting == 0 and s.reserve(seq, 6)
    with pytest.raises(ValueError, match=r"'a'.*RESERVED"):
        s.reserve(seq, 6)
    with pytest.raises(ValueError, match=r"'a'.*already in use"):
        s.reserve(make_seq("a"), 6)
    with pytest.raises(ValueError, match="PROMPT"):
        prompt_engine().reserve(make_seq("b"), 6)


def test_partial_kv_is_never_accepted():
    s = completion()
    seq = make_seq("a", 6)
    s.reserve(seq, 7)
    with pytest.raises(ValueError, match="partial KV: 4 of 6"):
        s.enqueue_prompted(seq, [9], num_cached=4)
    other = make_seq("b", 6)
    s.reserve(other, 7)
    with pytest.raises(ValueError, match="partial KV"):
        s.enqueue_prompted(other)
    with pytest.raises(ValueError, match="no reservation"):
        s.enqueue_prompted(make_seq("c"))
    third = make_seq("d", 8)
    s.reserve(third, 8)
    with pytest.raises(ValueError, match="do not fit the 2"):
        s.enqueue_prompted(third, [9, 9])


def test_cancelled_reservation_gives_everything_back_once():
    s = completion()
    seq = make_seq("a", 6)
    s.reserve(seq, 7)
    assert s.cancel_reservation(seq) and not s.cancel_reservation(seq)
    assert seq.finish_reason == "abort" and s.blocks.num_used == 0 and s.slots.num_free == 8
    s.check_integrity()


def test_abort_while_kv_is_on_its_way_waits_for_the_hand_over():
    s = completion()
    seq = make_seq("a", 6)
    s.reserve(seq, 7)
    assert s.abort("a") and not s.abort("a")
    assert s.blocks.num_used == 2  # bytes may still arrive
    with pytest.raises(ValueError, match="hand-over owns"):
        s.free_seq(seq)
    assert s.enqueue_prompted(seq, [9]) is False
    assert s.cancel_reservation(seq) and s.blocks.num_used == 0
    s.check_integrity()


def test_handed_over_sequence_that_is_already_complete_ends_at_once():
    s = completion()
    seq = make_seq("a", 6, max_tokens=1)
    s.reserve(seq, 7)
    s.enqueue_prompted(seq, [9])
    out = s.schedule()
    assert out.is_empty and out.finished == [seq] and seq.finish_reason == "length"
    s.free_seq(seq)
    s.check_integrity()


def test_normal_engine_may_receive_too():
    s = Scheduler(small_config())
    seq = make_seq("a", 6)
    assert s.reserve(seq, 7) and s.enqueue_prompted(seq, [9])
    assert s.schedule_decode().seqs == [seq]


# ---- sending


def test_detached_blocks_stay_pinned_until_released():
    s = prompt_engine()
    seq = prefilled(s)
    blocks = seq.block_ids.tolist()
    s.detach(seq)
    assert (
        seq.status is SequenceStatus.DETACHED
        and seq.slot == -1
        and seq.block_ids.tolist() == blocks
    )
    assert not s.has_unfinished() and s.slots.num_free == 8 and s.blocks.num_used == 2
    s.check_integrity()
    assert s.release_detached(seq) and not s.release_detached(seq)
    assert s.blocks.num_used == 0 and s.get("a") is None
    s.check_integrity()


def test_a_prompt_that_ends_with_its_first_token_can_be_dropped():
    s = prompt_engine()
    seq = prefilled(s, eos_token_ids=(9,))
    assert seq.finish_reason == "stop"
    s.detach(seq)
    assert s.schedule().finished == [] and s.release_detached(seq)
    s.check_integrity()


def test_detach_needs_a_processed_prefill():
    s = prompt_engine()
    seq = make_seq("a")
    s.add_request(seq)
    with pytest.raises(ValueError, match=r"'a'.*WAITING"):
        s.detach(seq)
    out = s.schedule()
    with pytest.raises(ValueError, match=r"'a'.*1 steps in flight"):
        s.detach(seq)
    s.process_outputs(out, np.array([9]))
    s.detach(seq)
    with pytest.raises(ValueError, match="detached already"):
        s.detach(seq)


def test_abort_of_a_detached_sequence_waits_for_the_hand_over():
    s = prompt_engine()
    seq = prefilled(s)
    s.detach(seq)
    assert s.abort("a") and s.blocks.num_used == 2
    with pytest.raises(ValueError, match="hand-over owns"):
        s.free_seq(seq)
    assert s.release_detached(seq) and s.blocks.num_used == 0
    s.check_integrity()


def test_slots_of_detached_sequences_take_new_prompts():
    s = prompt_engine(max_num_seqs=1)
    for name in "abc":
        s.detach(prefilled(s, name))
    assert s.blocks.num_used == 6


# ---- forks


def test_complete_fork_goes_to_prompted_and_shares_full_blocks():
    s = Scheduler(small_config())
    source = prefilled(s, prompt_len=8)
    fork = s.fork_seq(source, "fork")
    assert fork.status is SequenceStatus.PROMPTED and fork.num_cached == fork.num_tokens - 1 == 8
    assert fork.block_ids.tolist() == source.block_ids[:2].tolist() and s.blocks.ref_counts[
        fork.block_ids
    ].tolist() == [2, 2]
    s.check_integrity()


def test_incomplete_fork_goes_to_the_front_of_waiting():
    s = Scheduler(small_config(chunked_prefill=True, max_num_batched_tokens=8))
    source = make_seq("a", 20)
    s.add_request(source)
    s.add_request(make_seq("b"))
    s.process_outputs(s.schedule(), np.array([9]))
    fork = s.fork_seq(source, "fork")
    assert (
        s.waiting[0] is fork
        and fork.status is SequenceStatus.WAITING
        and fork.num_cached == 8
        and fork.num_blocks == 2
    )


def test_fork_with_explicit_blocks():
    s = Scheduler(small_config())
    source = prefilled(s, prompt_len=8)
    fork = s.fork_seq(source, "fork", blocks=source.block_ids.tolist())
    assert fork.block_ids.tolist() == source.block_ids.tolist()
    with pytest.raises(ValueError, match=r"'f2'.*has 1"):
        s.fork_seq(source, "f2", blocks=source.block_ids[:1])
    with pytest.raises(ValueError, match="held by nobody"):
        s.fork_seq(source, "f3", blocks=[40, 41])
    with pytest.raises(ValueError, match="distinct"):
        s.fork_seq(source, "f4", blocks=[source.block_ids[0]] * 2)
    s.check_integrity()


def test_fork_may_replace_the_last_token_and_shorten():
    s = Scheduler(small_config())
    source = prefilled(s, prompt_len=6)
    assert s.fork_seq(source, "f1", replace_last_token_id=3).token_ids.tolist()[-1] == 3
    again = s.fork_seq(source, "f2", num_tokens=6)
    assert (
        again.num_output_tokens == 0
        and again.num_cached == 5
        and again.status is SequenceStatus.PROMPTED
    )
    with pytest.raises(ValueError, match=r"'f3'.*\[1, 7\], got 8"):
        s.fork_seq(source, "f3", num_tokens=8)


def test_fork_refusals_name_the_request():
    s = Scheduler(small_config())
    waiting = make_seq("w")
    s.add_request(waiting)
    with pytest.raises(ValueError, match=r"'f'.*no computed prefix \(num_cached=0\)"):
        s.fork_seq(waiting, "f")
    s.process_outputs(s.schedule(), np.array([9]))
    with pytest.raises(ValueError, match=r"'f'.*prompt log-prob"):
        s.fork_seq(waiting, "f", prompt_logprobs=True)
    with pytest.raises(ValueError, match=r"'w'.*already in use"):
        s.fork_seq(waiting, "w")
    pe = prompt_engine()
    with pytest.raises(ValueError, match=r"'f'.*PROMPT.*complete fork"):
        pe.fork_seq(prefilled(pe), "f")
    s.check_integrity()


def test_fork_of_a_stateful_model_needs_the_state_where_it_is():
    s = Scheduler(small_config(num_state_slots=10))
    source = prefilled(s)
    with pytest.raises(ValueError, match=r"'f'.*stands at token 6.*token 4"):
        s.fork_seq(source, "f", num_tokens=5)
    s.schedule_decode()
    with pytest.raises(ValueError, match=r"'f'.*1 steps in flight"):
        s.fork_seq(source, "f")


def test_aborted_fork_does_not_leave_its_state_copy_behind():
    s = Scheduler(small_config(num_state_slots=10))
    source = prefilled(s)
    fork = s.fork_seq(source, "f")
    s.abort("f")
    s.free_seq(fork)
    assert s.schedule_decode().clone_states == []
    s.check_integrity()


@pytest.mark.parametrize("zos", [False, True])
def test_forks_write_the_models_text(zos):
    d = Driver(small_config(zos=zos))
    s = d.schedulers[0]
    s.add_request(make_seq("a", 6, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        d.step()
    for i in range(4):
        fork = s.fork_seq(s.get("a"), i, max_tokens=20, replace_last_token_id=i + 3)
        d.start_of[id(fork)] = fork.num_tokens
    d.run()
    d.assert_clean()
    assert len({tuple(seq.token_ids.tolist()) for seq in d.ended}) == 5
