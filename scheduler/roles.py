"""Engine roles: the one table that says what NORMAL, PROMPT and COMPLETION engines do differently.

Code never compares roles; it asks the policy a question:
`ROLE_POLICIES[role].allows_context_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class EngineType(IntEnum):
    """Role of an engine. The integers travel between processes and are compared at connect: never
    renumber."""

    NORMAL = 0
    PROMPT = 1
    COMPLETION = 2

    @property
    def policy(self) -> RolePolicy:
        return ROLE_POLICIES[self]


@dataclass(frozen=True, kw_only=True)
class RolePolicy:
    """Everything that depends on the role, as answers to questions.

    Fields whose feature is still missing are listed in docs/architecture.md.
    """

    role: EngineType
    # ---- scheduling
    does_prefill: bool
    does_decode: bool
    votes_on_step_type: bool
    """All DP ranks agree on the step type: attention DP and MoE EP share collectives."""
    one_chunk_per_prefill: bool
    """Stop after one chunked prompt: decodes are waiting for the step to end."""
    empty_prefill_is_a_step: bool
    """Nothing to prefill gives an empty prefill step instead of a decode step."""
    allows_recompute: bool
    """False: a preempted request can only be stopped, there is no prefill to recompute it."""
    finalizes_finished: bool
    """Finished sequences go through finalize_seq; False: handed over, then dropped."""
    reserves_output_storage: bool
    """Token storage for all of max_tokens is reserved when the request is queued."""
    allows_context_parallel: bool
    # ---- engine construction
    default_zero_overhead_scheduling: bool
    default_multimodal_pool: bool
    builds_multimodal_processor: bool
    splits_prefill_decode: bool
    """init_pd_split() runs, between cache allocation and warm-up."""
    # ---- programs and memory
    profiles_prefill_shape: bool
    """False: memory is profiled with max_num_seqs x (1 + num_speculative_tokens) decode rows."""
    has_draft_pool: bool
    loads_all_draft_parameters: bool
    """False: only the ones that write the draft's KV context."""
    fuses_norm_rope_unless_batch_invariant: bool
    """False: fused attention path only where the layer needs it."""
    # ---- experts
    eplb_counts_prefill_steps: bool
    expert_rearrangement_interval: int
    """Counted steps between two rearrangements, where expert balance is on."""
    moe_cap_is_prefill: bool
    """False: MoE buffers hold max_num_seqs x (1 + num_speculative_tokens) tokens per rank."""
    # ---- reports
    logging_interval_divisor: int
    """The log line's interval in steps is divided by it: prefill steps are long."""

    def engine_name(self, device_id: int) -> str:
        """`<ROLE>_<device id>`."""
        return f"{self.role.name}_{device_id}"

    def moe_tokens_per_rank(
        self, max_prefill_tokens: int, max_num_seqs: int, num_speculative_tokens: int
    ) -> int:
        """Cap of the MoE exchange buffers, in tokens per rank."""
        return (
            max_prefill_tokens
            if self.moe_cap_is_prefill
            else max_num_seqs * (1 + num_speculative_tokens)
        )


ROLE_POLICIES: dict[EngineType, RolePolicy] = {
    EngineType.NORMAL: RolePolicy(
        role=EngineType.NORMAL,
        does_prefill=True,
        does_decode=True,
        votes_on_step_type=True,
        one_chunk_per_prefill=True,
        empty_prefill_is_a_step=False,
        allows_recompute=True,
        finalizes_finished=True,
        reserves_output_storage=True,
        allows_context_parallel=True,
        default_zero_overhead_scheduling=True,
        default_multimodal_pool=True,
        builds_multimodal_processor=True,
        splits_prefill_decode=False,
        profiles_prefill_shape=True,
        has_draft_pool=True,
        loads_all_draft_parameters=True,
        fuses_norm_rope_unless_batch_invariant=False,
        eplb_counts_prefill_steps=False,
        expert_rearrangement_interval=10_000,
        moe_cap_is_prefill=True,
        logging_interval_divisor=1,
    ),
    EngineType.PROMPT: RolePolicy(
        role=EngineType.PROMPT,
        does_prefill=True,
        does_decode=False,
        votes_on_step_type=False,
        one_chunk_per_prefill=False,
        empty_prefill_is_a_step=True,
        allows_recompute=True,
        finalizes_finished=False,
        reserves_output_storage=False,
        allows_context_parallel=True,
        default_zero_overhead_scheduling=False,
        default_multimodal_pool=True,
        builds_multimodal_processor=True,
        splits_prefill_decode=True,
        profiles_prefill_shape=True,
        has_draft_pool=False,
        loads_all_draft_parameters=False,
        fuses_norm_rope_unless_batch_invariant=True,
        eplb_counts_prefill_steps=True,
        expert_rearrangement_interval=1_000,
        moe_cap_is_prefill=True,
        logging_interval_divisor=5,
    ),
    EngineType.COMPLETION: RolePolicy(
        role=EngineType.COMPLETION,
        does_prefill=False,
        does_decode=True,
        votes_on_step_type=False,
        one_chunk_per_prefill=False,
        empty_prefill_is_a_step=False,
        allows_recompute=False,
        finalizes_finished=True,
        reserves_output_storage=False,
        allows_context_parallel=False,
        default_zero_overhead_scheduling=True,
        default_multimodal_pool=False,
        builds_multimodal_processor=False,
        splits_prefill_decode=True,
        profiles_prefill_shape=False,
        has_draft_pool=True,
        loads_all_draft_parameters=True,
        fuses_norm_rope_unless_batch_invariant=False,
        eplb_counts_prefill_steps=True,
        expert_rearrangement_interval=10_000,
        moe_cap_is_prefill=False,
        logging_interval_divisor=1,
    ),
}
