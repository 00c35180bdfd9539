"""The invariants of the roles that the scheduler has to keep (section names as in
docs/architecture.md)."""

import numpy as np
import pytest
from sched_driver import make_seq, small_config

from deepinfer_jax.scheduler import EngineType, Scheduler, SchedulerConfig, StepType


def test_invariant_1_role_integers_agree_on_both_sides_of_a_wire():
    assert {role.name: role.value for role in EngineType} == {
        "NORMAL": 0,
        "PROMPT": 1,
        "COMPLETION": 2,
    }
    assert small_config(role=1).role is EngineType.PROMPT  # an integer from the wire is the role
    with pytest.raises(ValueError, match="3"):
        small_config(role=3)


def test_invariant_2_a_prompt_step_is_always_prefill():
    s = Scheduler(
        small_config(role=EngineType.PROMPT, chunked_prefill=True, max_num_batched_tokens=8)
    )
    for i in range(12):
        if i % 3 == 0:
            s.add_request(make_seq(i, 13))
        out = s.schedule()
        assert out.step_type is StepType.PREFILL
        for item in out.prefill:
            assert item.q_len > 0
        s.process_outputs(out, np.full(len(out.prefill), 9))
        for item in out.prefill:
            if item.is_last:
                s.detach(item.seq)


def test_invariant_3_completion_never_recomputes():
    with pytest.raises(ValueError, match="COMPLETION engine cannot recompute"):
        small_config(role=EngineType.COMPLETION, stop_preempted_request=False)
    s = Scheduler(small_config(role=EngineType.COMPLETION, num_blocks=2))
    seq = make_seq("a", 7, max_tokens=20)
    s.reserve(seq, 8)
    s.enqueue_prompted(seq, [9])
    s.process_outputs(s.schedule(), np.array([9]))
    out = s.schedule()
    assert (
        out.preempted == [seq]
        and seq.is_finished
        and s.num_waiting == 0
        and not s.free_seq(make_seq("b"))
    )
    assert s.free_seq(seq) and not s.has_unfinished()


def test_invariant_4_completion_refuses_context_parallelism():
    with pytest.raises(
        ValueError,
        match="COMPLETION engine cannot use context parallelism, got context_parallel_size=2",
    ):
        small_config(role=EngineType.COMPLETION, context_parallel_size=2)


def test_invariant_5_a_prompt_sequence_leaves_by_detach_and_its_blocks_stay():
    assert not EngineType.PROMPT.policy.finalizes_finished
    s = Scheduler(small_config(role=EngineType.PROMPT))
    seq = make_seq("a", 6)
    s.add_request(seq)
    s.process_outputs(s.schedule(), np.array([9]))
    s.detach(seq)
    assert s.schedule().finished == [] and s.blocks.num_used == 2
    with pytest.raises(ValueError, match="cannot free"):
        s.free_seq(seq)


def test_invariant_6_copied_state_is_ordered_before_the_step():
    """A fork's state copy is part of the very next outputs, before any step can move the source's
    state on."""
    s = Scheduler(small_config(num_state_slots=10))
    seq = make_seq("a", 6)
    s.add_request(seq)
    s.process_outputs(s.schedule(), np.array([9]))
    fork = s.fork_seq(seq, "fork")
    assert s.schedule_decode().clone_states == [(seq.state_id, fork.state_id)]


def test_invariant_7_an_idle_prompt_step_is_an_empty_prefill_output_not_none():
    out = Scheduler(small_config(role=EngineType.PROMPT)).schedule()
    assert out is not None and out.is_prefill and out.is_empty


def test_kv_counter_never_passes_the_tokens():
    s = Scheduler(small_config(zos=True, num_speculative_tokens=2))
    seq = make_seq("a", 6, max_tokens=30)
    s.add_request(seq)
    pending = s.schedule()
    for _ in range(10):
        following = s.schedule_decode()
        upper = seq.num_tokens + 1 + s.config.num_speculative_tokens
        assert following.kv_lens[0] <= upper + 1 + s.config.num_speculative_tokens
        tokens = np.full((1, 1 if pending.is_prefill else 3), 9)
        s.process_outputs(pending, tokens, np.array([1 if pending.is_prefill else 2]))
        assert seq.num_tokens - 1 == seq.num_cached
        pending = following
    s.check_integrity()


@pytest.mark.parametrize("damage", ["slot", "queue", "block", "length"])
def test_check_integrity_sees_damage(damage):
    s = Scheduler(
        SchedulerConfig(
            block_size=4, num_blocks=8, max_model_len=16, max_num_batched_tokens=16, max_num_seqs=2
        )
    )
    seq = make_seq("a", 6)
    s.add_request(seq)
    s.process_outputs(s.schedule(), np.array([9]))
    s.check_integrity()
    if damage == "slot":
        s.slots.active[seq.slot] = False
    elif damage == "queue":
        s.waiting.append(seq)
    elif damage == "block":
        s.blocks.pin(seq.block_ids)
    else:
        s.slots.max_num_tokens[seq.slot] += 3
    with pytest.raises(AssertionError):
        s.check_integrity()
