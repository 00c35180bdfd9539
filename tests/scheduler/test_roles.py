"""The role table, one test per row."""

import json

import pytest

from deepinfer_jax.scheduler import ROLE_POLICIES, EngineType, Scheduler, SchedulerConfig, Sequence

ROLES = (EngineType.NORMAL, EngineType.PROMPT, EngineType.COMPLETION)
ROWS = {
    "runs_prefill": ("does_prefill", (True, True, False)),
    "runs_decode": ("does_decode", (True, False, True)),
    "zero_overhead_scheduling_default": ("default_zero_overhead_scheduling", (True, False, True)),
    "multimodal_pool_default": ("default_multimodal_pool", (True, True, False)),
    "multimodal_processor_never_built_on_completion": (
        "builds_multimodal_processor",
        (True, True, False),
    ),
    "memory_profile_shape": ("profiles_prefill_shape", (True, True, False)),
    "draft_token_slots": ("has_draft_pool", (True, False, True)),
    "draft_head_parameters": ("loads_all_draft_parameters", (True, False, True)),
    "context_parallelism": ("allows_context_parallel", (True, True, False)),
    "preempted_may_be_recomputed": ("allows_recompute", (True, True, False)),
    "finished_freed_by_finalize_seq": ("finalizes_finished", (True, False, True)),
    "output_storage_reserved_at_enqueue": ("reserves_output_storage", (True, False, False)),
    "eplb_counts_prefill_steps": ("eplb_counts_prefill_steps", (False, True, True)),
    "eplb_period": ("expert_rearrangement_interval", (10_000, 1_000, 10_000)),
    "log_line_interval": ("logging_interval_divisor", (1, 5, 1)),
    "moe_buffer_cap": ("moe_cap_is_prefill", (True, True, False)),
    "fused_norm_rope": ("fuses_norm_rope_unless_batch_invariant", (False, True, False)),
    "votes_on_step_type": ("votes_on_step_type", (True, False, False)),
    "pd_split_hook": ("splits_prefill_decode", (False, True, True)),
}


@pytest.mark.parametrize("row", ROWS)
def test_role_table_row(row):
    question, answers = ROWS[row]
    assert tuple(getattr(ROLE_POLICIES[role], question) for role in ROLES) == answers


def test_every_answer_of_a_policy_is_covered_by_a_row():
    asked = {question for question, _ in ROWS.values()} | {
        "role",
        "one_chunk_per_prefill",
        "empty_prefill_is_a_step",
    }
    assert {name for name in vars(ROLE_POLICIES[EngineType.NORMAL])} == asked


def test_role_integers_are_a_wire_contract():
    assert [(role.name, int(role)) for role in EngineType] == [
        ("NORMAL", 0),
        ("PROMPT", 1),
        ("COMPLETION", 2),
    ]
    assert json.loads(json.dumps(EngineType.COMPLETION)) == 2 and EngineType(1) is EngineType.PROMPT


@pytest.mark.parametrize("role", ROLES)
def test_engine_name_is_role_and_device(role):
    assert role.policy.engine_name(3) == f"{role.name}_3" and role.policy.role is role


@pytest.mark.parametrize(
    ("role", "tokens"),
    [(EngineType.NORMAL, 4096), (EngineType.PROMPT, 4096), (EngineType.COMPLETION, 256 * 6)],
)
def test_moe_buffer_tokens(role, tokens):
    assert (
        role.policy.moe_tokens_per_rank(
            max_prefill_tokens=4096, max_num_seqs=256, num_speculative_tokens=5
        )
        == tokens
    )


def config(**changes):
    values = dict(
        block_size=4, num_blocks=16, max_model_len=32, max_num_batched_tokens=32, max_num_seqs=4
    )
    return SchedulerConfig(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(role=EngineType.COMPLETION, context_parallel_size=2),
            ("COMPLETION", "context_parallel_size=2"),
        ),
        (
            dict(role=EngineType.COMPLETION, stop_preempted_request=False),
            ("COMPLETION", "stop_preempted_request"),
        ),
        (dict(max_num_batched_tokens=31), ("max_num_batched_tokens=31", "max_model_len=32")),
        (
            dict(max_num_batched_tokens=3, chunked_prefill=True),
            ("max_num_batched_tokens=3", "block_size=4"),
        ),
        (
            dict(max_num_batched_tokens=33, context_parallel_size=9),
            ("max_num_batched_tokens=33", "18", "max_model_len=32"),
        ),
        (dict(prefill_attempt_interval=0), ("prefill_attempt_interval", "0")),
        (dict(prefill_any_attempt_interval=0), ("prefill_any_attempt_interval", "0")),
        (dict(prefill_max_sum_seqlen_k=31), ("prefill_max_sum_seqlen_k=31", "32")),
        (dict(num_blocks=0), ("num_blocks", "0")),
        (dict(max_num_seqs=0), ("max_num_seqs", "0")),
        (dict(num_speculative_tokens=-1), ("num_speculative_tokens", "-1")),
        (dict(role=7), ("7",)),
        (
            dict(num_state_slots=8, enable_prefix_caching=True),
            ("num_state_slots=8", "enable_prefix_caching"),
        ),
        (dict(num_state_slots=4), ("num_state_slots=4", "5")),
        (dict(expected_output_fraction=1.5), ("expected_output_fraction", "1.5")),
        (dict(max_waiting_time=-1.0), ("max_waiting_time", "-1.0")),
    ],
)
def test_impossible_configuration_is_refused_naming_values(changes, words):
    with pytest.raises(ValueError) as error:
        config(**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_prompt_limit_depends_on_chunking():
    assert config(max_num_batched_tokens=40).prompt_limit == 32
    assert config(chunked_prefill=True, max_num_batched_tokens=8).prompt_limit == 32


@pytest.mark.parametrize(
    ("num_speculative_tokens", "zos", "bound"),
    [(0, False, 32), (0, True, 33), (2, False, 36), (2, True, 39)],
)
def test_runtime_length_bound(num_speculative_tokens, zos, bound):
    assert (
        config(num_speculative_tokens=num_speculative_tokens, zos=zos).runtime_max_model_len
        == bound
    )


def test_only_normal_reserves_output_storage_when_queued():
    for role, reserved in ((EngineType.NORMAL, True), (EngineType.PROMPT, False)):
        seq = Sequence("a", [1, 2, 3], max_tokens=20)
        Scheduler(config(role=role)).add_request(seq)
        assert (seq._buffer.size >= 23) is reserved
