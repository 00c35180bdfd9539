"""The hooks of prefill/decode disaggregation: their exact order for every role, with and without
zero-overhead scheduling."""

from __future__ import annotations

import pytest
from engine_cases import GREEDY, SMALL, Golden

from deepinfer_jax import EngineArgs, EngineType, LLMEngine, RequestOutputKind

LLAMA = Golden("llama")
GREEDY = GREEDY.replace(output_kind=RequestOutputKind.FINAL_ONLY)
HOOKS = (
    "init_pd_split",
    "post_schedule",
    "should_copy_state",
    "do_copy_state",
    "pe_prepare_save_kvcache",
    "do_save_kvcache",
    "pe_do_save_kvcache",
    "finalize_seq",
    "send_processed_prompts",
    "process_output",
)


def logging_hook(name):
    def hook(self, *args):
        type(self).trace.append(name)
        result = getattr(LLMEngine, name)(self, *args)
        return True if name == "should_copy_state" else result

    return hook


def traced_engine(role: EngineType, **args) -> LLMEngine:
    """An LLMEngine whose class has a list `trace` of hooks and, in between, "dispatch" and "wait"
    (for sampled tokens)."""
    cls = type(
        "Traced",
        (LLMEngine,),
        {name: logging_hook(name) for name in HOOKS} | {"trace": [], "copies_state": True},
    )
    engine = cls(EngineArgs(LLAMA.path, engine_type=role, **(SMALL | {"warm_up": False} | args)))
    for name in ("dispatch_prefill", "dispatch_decode"):
        setattr(engine.runner, name, tracing_dispatch(cls.trace, getattr(engine.runner, name)))
    return engine


def tracing_dispatch(trace, dispatch):
    def traced(*args):
        trace.append("dispatch")
        in_flight = dispatch(*args)
        wait = in_flight.wait
        in_flight.wait = lambda: (trace.append("wait"), wait())[1]
        return in_flight

    return traced


def steps(engine, limit=20) -> list[list[str]]:
    """The trace of each step until nothing is left."""
    out = []
    while engine.has_unfinished_requests():
        engine.trace.clear()
        engine.step()
        out.append(list(engine.trace))
        assert len(out) < limit
    engine.check_integrity()
    assert all(s.cache_usage == 0 for s in engine.schedulers)
    return out


PREFILL = ["post_schedule", "dispatch", "pe_prepare_save_kvcache"]
DECODE = ["post_schedule", "should_copy_state", "do_copy_state", "dispatch", "do_save_kvcache"]
IDLE = ["post_schedule", "do_save_kvcache"]


def test_normal():
    engine = traced_engine(EngineType.NORMAL, zero_overhead_scheduling=False)
    engine.add_request("a", LLAMA.prompts[1], GREEDY.replace(max_tokens=3))
    assert steps(engine) == [
        [*PREFILL, "wait", "pe_do_save_kvcache"],
        [*DECODE, "wait"],
        [*DECODE, "wait", "process_output"],
        [*IDLE, "finalize_seq"],
    ]


def test_normal_with_zero_overhead_scheduling():
    engine = traced_engine(EngineType.NORMAL, zero_overhead_scheduling=True)
    engine.add_request("a", LLAMA.prompts[1], GREEDY.replace(max_tokens=3))
    assert steps(engine) == [
        PREFILL,
        [*DECODE, "wait", "pe_do_save_kvcache"],
        [*DECODE, "wait"],
        [*IDLE, "wait", "process_output"],
        [*IDLE, "finalize_seq"],
    ]


@pytest.mark.parametrize("zos", [False, True])
def test_prompt(zos):
    engine = traced_engine(
        EngineType.PROMPT,
        zero_overhead_scheduling=zos,
        chunked_prefill=True,
        max_num_batched_tokens=16,
    )
    assert engine.trace == ["init_pd_split"]
    engine.add_request("a", LLAMA.prompts[2][:20], GREEDY)  # two chunks
    step = [*PREFILL, "wait", "pe_do_save_kvcache", "send_processed_prompts"]
    idle = ["post_schedule", "pe_prepare_save_kvcache"]
    if zos:
        expected = [
            [*PREFILL, "send_processed_prompts"],
            step,
            [*idle, "wait", *step[-2:], "process_output"],
            [*idle, step[-1]],
        ]
    else:
        # nobody takes the request here, so it ends with its first token: an output made outside the
        # step's results
        expected = [step, [*step, "process_output"], [*idle, "send_processed_prompts"]]
    assert steps(engine) == expected
    assert not any("finalize_seq" in step for step in expected)


@pytest.mark.parametrize("zos", [False, True])
def test_completion(zos):
    engine = traced_engine(EngineType.COMPLETION, zero_overhead_scheduling=zos)
    assert engine.trace == ["init_pd_split"]
    request = engine.add_request("a", LLAMA.prompts[1], GREEDY.replace(max_tokens=3), enqueue=False)
    seq = request.completions[0].seq
    assert engine.schedulers[0].reserve(seq, 10) and engine.schedulers[0].enqueue_prompted(
        seq, [LLAMA.greedy[1][0]]
    )
    if zos:
        expected = [
            DECODE,
            [*DECODE, "wait"],
            [*IDLE, "wait", "process_output"],
            [*IDLE, "finalize_seq"],
        ]
    else:
        expected = [[*DECODE, "wait"], [*DECODE, "wait", "process_output"], [*IDLE, "finalize_seq"]]
    assert steps(engine) == expected


def test_init_pd_split_comes_after_the_pools_and_before_warm_up():
    seen = []

    class Engine(LLMEngine):
        def init_pd_split(self):
            seen.append(
                (set(self.runner.caches), self.runner.programs.warm, self.runner.programs.names())
            )

    for role in EngineType:
        engine = Engine(EngineArgs(LLAMA.path, engine_type=role, **SMALL))
        assert engine.runner.programs.warm
    assert seen == [({"k", "v"}, False, [])] * 2, "PROMPT and COMPLETION, not NORMAL"
