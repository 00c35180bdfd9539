"""The seven invariants of the roles, each by its name."""

from __future__ import annotations

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from engine_cases import GREEDY, SMALL, Golden

from deepinfer_jax import LLM, EngineArgs, EngineType, LLMEngine
from deepinfer_jax.disagg import mesh_link
from deepinfer_jax.disagg.layout import LayoutMismatch
from deepinfer_jax.scheduler.outputs import SchedulerOutputs, StepType

LLAMA = Golden("llama")


def engine_of(role: EngineType, cls: type = LLMEngine, **args) -> LLMEngine:
    return cls(EngineArgs(LLAMA.path, engine_type=role, **(SMALL | {"warm_up": False} | args)))


@pytest.fixture(scope="module")
def apart():
    with LLM(LLAMA.path, disaggregate="1P:1D", **SMALL) as llm:
        yield llm


def test_1_role_integers_agree_on_both_sides_of_every_wire(apart, monkeypatch):
    assert {r.name: int(r) for r in EngineType} == {"NORMAL": 0, "PROMPT": 1, "COMPLETION": 2}
    source, target = apart.engine.prompt_engines[0], apart.engine.completion_engines[0]
    assert source.layout().role == 1 and target.layout().role == 2
    renumbered = msgspec.structs.replace(
        target.layout(), roles={"NORMAL": 0, "PROMPT": 2, "COMPLETION": 1}
    )
    monkeypatch.setattr(target, "layout", lambda: renumbered)
    with pytest.raises(
        LayoutMismatch,
        match="roles: .*'PROMPT': 1.* on the prompt side, .*'PROMPT': 2.* on the completion side",
    ):
        mesh_link.connect(source, target)


def test_2_a_prompt_step_is_always_prefill(apart):
    outputs = apart.generate(LLAMA.prompts * 2, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 2
    prompt, completion = apart.engine.prompt_engines[0], apart.engine.completion_engines[0]
    assert {r.step_type for r in prompt.stats_log.records} <= {"prefill", "idle"}
    assert {r.step_type for r in completion.stats_log.records} <= {"decode", "idle"}
    decode = SchedulerOutputs(
        StepType.DECODE, slots=np.zeros(1, np.int32), q_lens=np.ones(1, np.int32)
    )
    with pytest.raises(RuntimeError, match="a PROMPT engine was given a decode step"):
        prompt._dispatch([[decode]])


def test_3_completion_never_recomputes_a_preempted_request():
    with pytest.raises(ValueError, match="a COMPLETION engine cannot recompute preempted requests"):
        engine_of(EngineType.COMPLETION, stop_preempted_request=False)
    # Admitted on the estimate that nobody needs more than a token: the pool runs out, and requests
    # are stopped, not recomputed.
    small = {"num_blocks": 12, "block_size": 16}
    with LLM(
        LLAMA.path,
        completion_mesh=small,
        disaggregation={"reserve_fraction": 0.0},
        **(SMALL | {"max_model_len": 128}),
    ) as llm:
        outputs = llm.generate(
            [LLAMA.prompts[2]] * 4, GREEDY.replace(max_tokens=80), use_tqdm=False
        )
        reasons = [o.outputs[0].finish_reason for o in outputs]
        assert set(reasons) == {"length", "insufficient_system_resource"}, reasons
        for output in outputs:
            assert (
                output.outputs[0].token_ids[:24]
                == LLAMA.greedy[2][: len(output.outputs[0].token_ids)]
            )
        assert llm.stats()["engines"]["COMPLETION_0"]["prefill_steps"] == 0
        llm.engine.wait_idle()
        llm.engine.check_integrity()


def test_4_completion_refuses_context_parallelism():
    with pytest.raises(
        ValueError,
        match="a COMPLETION engine refuses context parallelism, got context_parallel_size=2",
    ):
        engine_of(EngineType.COMPLETION, context_parallel_size=2)


def test_5_prompt_never_calls_finalize_seq(apart, monkeypatch):
    calls = []
    for engine in (*apart.engine.prompt_engines, *apart.engine.completion_engines):
        real = engine.finalize_seq
        monkeypatch.setattr(
            engine, "finalize_seq", lambda seq, e=engine, f=real: (calls.append(e.name), f(seq))
        )
    params = [
        GREEDY,
        GREEDY.replace(max_tokens=1),
        GREEDY.replace(stop_token_ids=[LLAMA.greedy[2][0]]),
        GREEDY,
    ]
    apart.generate(LLAMA.prompts, params, use_tqdm=False)
    apart.engine.wait_idle()
    assert (
        set(calls) == {"COMPLETION_0"} and len(calls) == 2
    )  # the other two ended with their first token, at the prompt engine


def test_6_copied_decode_state_is_synchronised_before_do_save_kvcache_reads_it():
    class Engine(LLMEngine):
        copies_state = True
        copies: list = []  # noqa: RUF012

        def should_copy_state(self, seq):
            return seq.num_tokens % 4 == 0

        def do_copy_state(self, seqs):
            self.wanted = [(seq.slot, seq.num_tokens) for seq in seqs]
            self.copy = jnp.copy(
                self.runner.state.num_tokens
            )  # enqueued: the step that follows donates and changes the state

        def do_save_kvcache(self, scheduled, finished):
            if getattr(self, "copy", None) is not None:
                values = np.asarray(self.copy)
                self.copies += [(n, int(values[slot])) for slot, n in self.wanted]
                self.copy = None

    engine = engine_of(EngineType.NORMAL, Engine, zero_overhead_scheduling=False)
    engine.add_request("a", LLAMA.prompts[1], GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.copies and all(expected == copied for expected, copied in engine.copies), (
        engine.copies
    )


def test_7_an_idle_prompt_step_is_an_empty_prefill_not_none():
    engine = engine_of(EngineType.PROMPT)
    (outputs,) = engine.group.schedule()
    assert outputs is not None and outputs.step_type is StepType.PREFILL and outputs.is_empty
    assert engine.step() == [] and not engine.did_work
