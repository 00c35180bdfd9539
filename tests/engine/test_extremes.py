"""Extreme but legal parameters: the request ends, and the one beside it does not notice."""

from __future__ import annotations

import pytest
from engine_cases import GOLDEN

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams

EXTREMES = {
    "top_k": dict(top_k=2**31 - 1),
    "tokens": dict(max_tokens=2**31 - 1, min_tokens=2**31 - 1),
    "min_tokens without max": dict(max_tokens=None, min_tokens=2**31 - 1),
    "priority": dict(priority=-(2**53)),
    "temperature": dict(temperature=1e30),
    "tiny temperature": dict(temperature=1e-300),
    "small temperature": dict(temperature=1e-5),
    "penalties": dict(repetition_penalty=1e6, presence_penalty=2.0, frequency_penalty=-2.0),
    "repetition": dict(repetition_penalty=1e-6, logit_bias={3: 1e9, 4: -1e9}),
    "bias": dict(logit_bias={3: 1e9, 4: -1e9}),
    "banned": dict(logit_bias={i: -1e9 for i in range(64)}),
    "top_p": dict(top_p=1e-30),
    "min_p": dict(min_p=1.0),
    "almost all": dict(top_p=1 - 1e-17),
    "seed": dict(seed=-(2**63), n=2),
    "largest seed": dict(seed=2**64 - 1, n=3),
    "user": dict(user_id="u" * 65536, cache_salt="é" * 65536),
    "stops": dict(stop_token_ids=range(3, 103)),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    args = EngineArgs(
        str(GOLDEN / "llama"),
        max_model_len=48,
        max_num_seqs=4,
        num_blocks=64,
        max_num_batched_tokens=64,
        prefill_buckets=(64,),
        decode_buckets=(4,),
        warm_up=False,
        disable_log_stats=True,
    )
    engine = LLMEngine(args)
    yield engine
    engine.close()


def run(engine: LLMEngine, odd: dict | None) -> dict[str, tuple[str, list[int]]]:
    engine.add_request("good", [5, 6, 7, 8], GREEDY)
    engine.step()
    if odd is not None:
        engine.add_request("odd", [1, 2, 3], SamplingParams(**{"max_tokens": 4, **odd}))
    done = {}
    for _ in range(200):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].finish_reason, output.outputs[0]
        if not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    return {name: (reason, c.token_ids) for name, (reason, c) in done.items()}


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_request_ends_and_its_neighbour_does_not_notice(engine, name):
    alone = run(engine, None)["good"]
    together = run(engine, EXTREMES[name])
    assert together["good"] == alone == ("length", alone[1])
    reason, tokens = together["odd"]
    assert reason in ("length", "stop") and tokens


def test_a_bias_within_bounds_decides(engine):
    assert run(engine, dict(logit_bias={9: 1e9}))["odd"] == ("length", [9] * 4)
