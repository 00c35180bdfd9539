"""Engines, random workloads and the comparison of outputs that the snapshot tests share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.engine.kv_identity import KVIdentity
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.outputs import RequestMetrics, RequestOutput
from deepinfer_jax.sampling_params import RequestOutputKind
from deepinfer_jax.snapshot.records import CompletionRecord, Place, RequestRecord, SnapshotRecord

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "chunked_prefill": True,
    "block_size": 8,
    "num_blocks": 28,
    "prefill_buckets": (32,),
    "decode_buckets": (4,),
    "max_logprobs": 2,
    "stop_preempted_request": False,
    "enable_prefix_caching": True,
    "zero_overhead_scheduling": False,
    "warm_up": False,
    "disable_log_stats": True,
}

PROMPTS = [[3 + (7 * i + 11 * k) % 490 for i in range(20 + 9 * k)] for k in range(5)]
SAMPLED = SamplingParams(
    max_tokens=24, temperature=1.0, seed=7, presence_penalty=0.5, ignore_eos=True
)


def tiny_engine(
    name: str = "llama", cls: type = LLMEngine, devices: Any = None, **changes: Any
) -> LLMEngine:
    return cls(EngineArgs(str(GOLDEN / name), **(TINY | changes)), devices=devices)


def empty_record(**fields: Any) -> SnapshotRecord:
    """A snapshot's record of an engine without requests; `fields` replace parts of it."""
    identity = KVIdentity(
        model="m", dtype="float32", quantization=None, load_format="auto", block_size=8, caches={}
    )
    empty = {"requests": [], "outputs": [], "prefix": [], "seeds": {}, "ranks": 2}
    return SnapshotRecord(
        **{"identity": identity, "role": "NORMAL", "created": 0.0, **empty, **fields}
    )


def request_record(request_id: str, place: Place | None, arrival: float = 0.0) -> RequestRecord:
    """A request of one completion without tokens."""
    state = RequestState(
        request_id=request_id,
        prompt_token_ids=[1],
        params={},
        seed=0,
        metrics=RequestMetrics(arrival),
    )
    return RequestRecord(
        request_id=request_id,
        prompt=None,
        params={},
        completions=[CompletionRecord(index=0, state=state, place=place)],
    )


def random_requests(rng: random.Random, count: int) -> list[tuple[str, list[int], SamplingParams]]:
    """Prompts that share beginnings, long ones that come in chunks, and every kind of sampling."""
    shared = [rng.randrange(3, 500) for _ in range(40)]
    out = []
    for i in range(count):
        prompt = shared[: rng.choice((0, 8, 17, 40))] + [
            rng.randrange(3, 500) for _ in range(rng.randrange(1, 20))
        ]
        options: dict[str, Any] = {
            "temperature": rng.choice((0.0, 1.0)),
            "seed": rng.choice((None, rng.randrange(1000))),
        }
        options |= rng.choice(
            (
                {},
                {"presence_penalty": 1.5},
                {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
                {"top_k": 5},
            )
        )
        options |= rng.choice(
            ({}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}, {"min_tokens": 4})
        )
        kind = rng.choice(list(RequestOutputKind))
        params = SamplingParams(
            max_tokens=rng.randrange(4, 24),
            ignore_eos=rng.random() < 0.5,
            output_kind=kind,
            **options,
        )
        out.append((f"r{i}", prompt, params))
    return out


class Collector:
    """What a caller has of each request: increments joined, the final values of everything."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[list[int]]] = {}
        self.logprobs: dict[str, list[list[Any]]] = {}
        self.final: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput], kinds: dict[str, RequestOutputKind]) -> None:
        for output in outputs:
            if kinds[output.request_id] is RequestOutputKind.DELTA:
                known = self.tokens.setdefault(output.request_id, [[] for _ in output.outputs])
                logprobs = self.logprobs.setdefault(output.request_id, [[] for _ in output.outputs])
                for completion in output.outputs:
                    known[completion.index] += completion.token_ids
                    logprobs[completion.index] += completion.logprobs or []
            else:
                self.tokens[output.request_id] = [o.token_ids for o in output.outputs]
                self.logprobs[output.request_id] = [o.logprobs or [] for o in output.outputs]
            if output.finished:
                self.final[output.request_id] = output

    def copy(self) -> Collector:
        other = Collector()
        other.tokens = {k: [list(t) for t in v] for k, v in self.tokens.items()}
        other.logprobs = {k: [list(t) for t in v] for k, v in self.logprobs.items()}
        other.final = dict(self.final)
        return other


def run(
    engine: LLMEngine,
    collector: Collector,
    kinds: dict[str, RequestOutputKind],
    steps: int | None = None,
) -> None:
    """Steps until everything has ended, or `steps` times."""
    left = 100_000 if steps is None else steps
    while left > 0 and engine.has_unfinished_requests():
        collector.take(engine.step(), kinds)
        left -= 1
    if steps is None:
        engine.check_integrity()
        assert all(s.cache_usage == 0 for s in engine.schedulers)


def assert_same(got: Collector, expected: Collector) -> None:
    assert got.tokens == expected.tokens
    assert got.final.keys() == expected.final.keys()
    for request_id, output in expected.final.items():
        other = got.final[request_id]
        for a, b in zip(other.outputs, output.outputs, strict=True):
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), request_id
        for x, y in zip(got.logprobs[request_id], expected.logprobs[request_id], strict=True):
            for a, b in zip(x, y, strict=True):
                assert a.keys() == b.keys(), (request_id, x, y)
                assert all(abs(a[k].logprob - b[k].logprob) < 1e-3 for k in a)
        assert (other.prompt_logprobs is None) == (output.prompt_logprobs is None)
        for x, y in zip(other.prompt_logprobs or (), output.prompt_logprobs or (), strict=True):
            assert (x is None and y is None) or all(
                abs(x[k].logprob - y[k].logprob) < 1e-3 for k in y
            )


def complete(
    engine, prompts: dict[str, list[int]] | None = None, params: SamplingParams = SAMPLED
) -> dict[str, list[int]]:
    """{request id: token ids} of everything the engine has to do, `prompts` included."""
    for request_id, prompt in (prompts or {}).items():
        engine.add_request(request_id, prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    engine.check_integrity()
    return done
