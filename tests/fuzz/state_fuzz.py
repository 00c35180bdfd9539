"""Random lives of sequences that have state of their own: snapshots at any step restored into an
engine of another mesh, forks, preemptions, shared prompt beginnings.

As a script: `python tests/fuzz/state_fuzz.py --trials 500 [--seed N]`; a failing trial is printed;
`--seed N --trials 1` repeats it, on engines that are new. Trials take turns between DeepSeek-V4
with windows in rings and with windows in blocks, and DeepSeek-V3.2.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4"

import jax
from snapshot_cases import Collector, assert_same, run, tiny_engine

from deepinfer_jax import LLMEngine, SamplingParams
from deepinfer_jax.snapshot import job as snapshot
from deepinfer_jax.snapshot import restore

SIZES = {
    "block_size": 12,
    "num_blocks": 24,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "prefill_buckets": (32,),
    "decode_buckets": (4,),
    "enable_prefix_caching": False,
}
SHARED = {"enable_prefix_caching": True, "num_blocks": 12}
MESH = {"data_parallel_size": 2, "expert_parallel_size": 2}

Work = list[tuple[str, list[int], SamplingParams]]


@dataclass
class Kind:
    """A model and the options of the engine that trials begin on."""

    model: str
    source: dict
    target: dict

    @cached_property
    def engines(self) -> tuple[LLMEngine, LLMEngine, LLMEngine]:
        """(where trials begin, where snapshots go on, one that runs a request at a time)."""
        devices = jax.devices()
        return (
            tiny_engine(self.model, **(SIZES | self.source)),
            tiny_engine(self.model, **(SIZES | MESH | self.target), devices=devices[2:4]),
            tiny_engine(self.model, **SIZES),
        )


KINDS = (
    Kind("deepseek_v4_yarn", {"num_decode_steps": 4, "zero_overhead_scheduling": True}, {}),
    Kind("deepseek_v4_yarn", SHARED, SHARED),
    Kind("deepseek_v32_yarn", SHARED, SHARED),
)


def workload(rng: random.Random, count: int) -> Work:
    """Prompts that share beginnings, sampled and greedy, some with two completions."""
    shared = [rng.randrange(3, 190) for _ in range(50)]
    out = []
    for i in range(count):
        own = [rng.randrange(3, 190) for _ in range(rng.randrange(1, 14))]
        params = SamplingParams(
            max_tokens=rng.randrange(2, 20),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            ignore_eos=True,
            n=rng.choice((1, 1, 2)),
        )
        out.append((f"r{i}", shared[: rng.choice((0, 11, 24, 37, 50))] + own, params))
    return out


def alone(engine: LLMEngine, work: Work) -> Collector:
    """Every request by itself on an engine that shares nothing and takes nothing back."""
    results = Collector()
    for request_id, prompt, params in work:
        engine.add_request(request_id, prompt, params)
        run(engine, results, {request_id: params.output_kind})
    return results


def trial(seed: int, kind: Kind) -> Counter:
    """Starts a workload, stops it anywhere and restores it into an engine of another mesh; both
    engines end with what each request alone gives. Returns what happened, by name."""
    rng = random.Random(seed)
    source, target, single = kind.engines
    work = workload(rng, rng.randrange(2, 6))
    kinds = {request_id: params.output_kind for request_id, _, params in work}
    preempted = sum(e.stats()["preemptions"] for e in (source, target))
    for request_id, prompt, params in work:
        source.add_request(request_id, prompt, params)
    before = Collector()
    run(source, before, kinds, rng.randrange(0, 20))
    captured = source.boundary.run(lambda: snapshot.capture(source))
    live = len(kinds) - len(before.final)
    after = before.copy()
    if rng.random() < 0.5:  # copied while the source goes on
        run(source, after, kinds, rng.randrange(1, 6))
    loaded = captured.to_host()
    run(source, after, kinds)
    target.boundary.run(lambda: restore.put(target, loaded))
    run(target, before, kinds)
    expected = alone(single, work)
    assert_same(after, expected)
    assert_same(before, expected)
    for engine in kind.engines:
        engine.check_integrity()
    preemptions = sum(e.stats()["preemptions"] for e in (source, target)) - preempted
    return Counter(
        trials=1,
        requests=len(work),
        restored=live,
        forked=sum(params.n > 1 for _, _, params in work),
        preemptions=preemptions,
        hits=sum(output.num_cached_tokens > 0 for output in after.final.values()),
    )


def trials(seed: int, count: int, kinds: tuple[Kind, ...] = KINDS) -> Counter:
    """`count` trials from `seed`; a failure names its own."""
    total: Counter = Counter()
    for number in range(seed, seed + count):
        try:
            total += trial(number, kinds[number % len(kinds)])
        except Exception as e:
            e.add_note(f"state_fuzz: --seed {number} --trials 1")
            raise
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = int(time.time()) % 1_000_000 if arguments.seed is None else arguments.seed
    start, total = time.time(), Counter()
    while total["trials"] < arguments.trials:
        done = total["trials"]
        total += trials(seed + done, min(50, arguments.trials - done))
        print(f"from seed {seed}: {dict(total)}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
