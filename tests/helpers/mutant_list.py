"""Which modules are mutated, which tests are to notice a mutant, and mutants that once lived."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = tuple(
    f"tests/scheduler/test_{name}.py"
    for name in (
        "roles",
        "block_manager",
        "prefill_selection",
        "decode_selection",
        "commit",
        "entry",
        "policies",
        "prefix_reuse",
        "votes",
        "invariants",
        "differential",
    )
)
ROUTING = ("tests/scheduler/routing",)
SIMULATION = ("tests/scheduler/simulation",)
DISAGG = ("tests/disagg/test_sides.py", "tests/disagg/test_protocol.py")
PLANNER = tuple(
    f"tests/launch/planner/test_plan.py::{name}"
    for name in (
        "test_a_floor_is_flops_over_peak_and_bytes_over_bandwidth",
        "test_attention_flops_of_a_query_and_a_key",
        "test_estimated_temporaries_by_hand",
        "test_known_models_have_their_published_sizes",
        "test_collective_bytes_are_read_from_the_program_text",
        "TestRefusals",
    )
)
STORE = ("tests/kv/test_store.py", "tests/kv/test_store_hostile.py")
SNAPSHOT = ("tests/snapshot/test_check.py", "tests/engine/test_kv_identity.py")
STOP_STRINGS = ("tests/text/test_detokenizer.py",)
SAMPLER = ("tests/runner/test_sampler.py",)
ROPE = ("tests/models/test_rope.py",)
ROUTER = ("tests/models/test_moe_router.py",)
RPC = ("tests/rpc",)
CLUSTER = ("tests/launch/test_cluster.py", "tests/launch/test_hostile_peers.py")

TARGETS: dict[str, tuple[str, ...]] = {
    "scheduler/block_manager.py": SCHEDULER,
    "scheduler/commit.py": SCHEDULER,
    "scheduler/config.py": SCHEDULER,
    "scheduler/decode.py": SCHEDULER,
    "scheduler/entry.py": SCHEDULER,
    "scheduler/group.py": SCHEDULER,
    "scheduler/lifecycle.py": SCHEDULER,
    "scheduler/policies.py": SCHEDULER,
    "scheduler/prefill.py": SCHEDULER,
    "scheduler/prefix.py": SCHEDULER,
    "scheduler/sequence.py": SCHEDULER,
    "scheduler/slots.py": SCHEDULER,
    "scheduler/state.py": SCHEDULER,
    "scheduler/routing/router.py": ROUTING,
    "scheduler/simulation/engine.py": SIMULATION,
    "scheduler/simulation/simulate.py": SIMULATION,
    "deepinfer_jax/disagg/protocol.py": DISAGG,
    "deepinfer_jax/disagg/receiver.py": DISAGG,
    "deepinfer_jax/disagg/sender.py": DISAGG,
    "deepinfer_jax/kv/store_format.py": (
        "tests/kv/test_store.py",
        "tests/kv/test_store_hostile.py",
    ),
    "deepinfer_jax/rpc/security.py": RPC,
    "deepinfer_jax/runner/random_draw.py": SAMPLER,
    "deepinfer_jax/runner/sampler.py": SAMPLER,
    "deepinfer_jax/runner/sampling_state.py": SAMPLER,
    "deepinfer_jax/snapshot/files.py": (
        "tests/snapshot/test_job.py",
        "tests/snapshot/test_restore.py",
    ),
    "deepinfer_jax/text/stop_strings.py": STOP_STRINGS,
    "launch/planner/floor.py": PLANNER,
    "launch/planner/plan.py": PLANNER,
    "models/layers/rope.py": ROPE,
    "models/layers/router.py": ROUTER,
}


@dataclass(frozen=True)
class Known:
    """A change that no test noticed once. old is a text that occurs exactly once in the file."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


KNOWN = (
    Known("scheduler/decode.py", "need[row] <= releasing", "need[row] < releasing", SCHEDULER),
    Known(
        "scheduler/prefill.py",
        "sum_k + q_start + q_len > s.config",
        "sum_k + q_len > s.config",
        SCHEDULER,
    ),
    Known("deepinfer_jax/disagg/sender.py", ') == "acked"', ') != "acked"', DISAGG),
    Known("deepinfer_jax/disagg/sender.py", "and not taken and name", "and name", DISAGG),
    Known(
        "deepinfer_jax/disagg/sender.py",
        "case Ack() if out.handoff is not None and out.handoff.state is delivered:",
        "case Ack() if out.handoff is not None:",
        DISAGG,
    ),
    Known(
        "deepinfer_jax/disagg/receiver.py",
        "            and self.states_written == self.states\n",
        "",
        DISAGG,
    ),
    Known(
        "deepinfer_jax/disagg/receiver.py",
        "            and len(self.written) == self.pages\n",
        "",
        DISAGG,
    ),
    Known(
        "deepinfer_jax/disagg/receiver.py",
        "        handoff.deadline = now + self.config.timeout\n",
        "",
        DISAGG,
    ),
    Known(
        "deepinfer_jax/kv/store_format.py",
        'if meta.get("version") != VERSION:',
        'if meta.get("version") is None:',
        STORE,
    ),
    Known(
        "deepinfer_jax/kv/store_format.py",
        '(header.meta.get("namespace"), header.meta.get("salt")) != (namespace, salt)',
        'header.meta.get("namespace") != namespace',
        STORE,
    ),
    Known(
        "deepinfer_jax/kv/store_format.py",
        '(header.meta.get("namespace"), header.meta.get("salt")) != (namespace, salt)',
        'header.meta.get("salt") != salt',
        STORE,
    ),
    Known(
        "deepinfer_jax/snapshot/files.py",
        "if found != described[kind][name]:",
        "if False:",
        SNAPSHOT,
    ),
    Known(
        "deepinfer_jax/engine/kv_identity.py",
        "quantization=config.quantization,",
        "quantization=None,",
        SNAPSHOT,
    ),
    Known(
        "deepinfer_jax/snapshot/restore.py",
        "engine.seeds.state = record.seeds",
        "pass",
        SNAPSHOT,
    ),
    Known(
        "deepinfer_jax/text/stop_strings.py",
        "complete = complete or pattern",
        "complete = pattern",
        STOP_STRINGS,
    ),
    Known("deepinfer_jax/rpc/security.py", "return key == self.public", "return True", RPC),
    Known(
        "deepinfer_jax/rpc/hub.py",
        "len(channel.queue) > self.config.max_queued\n            or channel",
        "channel",
        RPC,
    ),
    Known(
        "deepinfer_jax/rpc/hub.py",
        "\n            or channel.queued_bytes > self.config.max_queued_bytes",
        "",
        RPC,
    ),
    Known(
        "deepinfer_jax/runner/random_draw.py",
        "weights >= ",
        "weights > ",
        SAMPLER,
    ),
    Known(
        "models/layers/rope.py",
        "low, high = max(low, 0), min(high, c.dim - 1)",
        "low, high = max(low, 0), min(high, c.dim)",
        ROPE,
    ),
    Known(
        "models/layers/rope.py",
        "low, high = max(low, 0), min(high, c.dim - 1)",
        "low, high = max(low, 1), min(high, c.dim - 1)",
        ROPE,
    ),
    Known(
        "models/layers/router.py",
        '0.0 if config.group_score == "max" else -jnp.inf',
        "-jnp.inf",
        ROUTER,
    ),
    Known(
        "models/layers/router.py",
        '0.0 if config.group_score == "max" else -jnp.inf',
        "0.0",
        ROUTER,
    ),
    Known(
        "models/layers/router.py",
        " + config.normalize_eps)",
        ")",
        ROUTER,
    ),
    Known(
        "launch/planner/floor.py",
        "(2 * mla.kv_rank + mla.rope_dim)",
        "(mla.kv_rank + mla.rope_dim)",
        PLANNER,
    ),
    Known(
        "launch/planner/floor.py",
        "return c.num_layers * c.num_heads * 2.0 * (2 * mla",
        "return c.num_layers * c.num_heads * 4.0 * (2 * mla",
        PLANNER,
    ),
    Known(
        "launch/planner/floor.py",
        "m.local_experts * (1.0 - (1.0",
        "m.local_experts * (0.0 + (1.0",
        PLANNER,
    ),
    Known("launch/planner/floor.py", "** group_tokens)", "** tokens)", PLANNER),
    Known(
        "launch/planner/floor.py",
        "else sequences * 2.0 * context",
        "else sequences * context",
        PLANNER,
    ),
    Known(
        "launch/planner/floor.py",
        "keys = tokens * context if decode",
        "keys = context if decode",
        PLANNER,
    ),
    Known("launch/planner/plan.py", "int(rows + exchanged + 4", "int(rows + 4", PLANNER),
    Known(
        "launch/planner/plan.py", "4 * sampled * model_config", "sampled * model_config", PLANNER
    ),
    Known(
        "launch/cluster/clients.py",
        "unfinished + params.n > self._max_parts",
        "unfinished > self._max_parts",
        CLUSTER,
    ),
    Known(
        "launch/cluster/clients.py",
        "unfinished + params.n > self._max_parts",
        "unfinished + params.n >= self._max_parts",
        CLUSTER,
    ),
)
