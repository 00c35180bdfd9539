"""Mixed traffic for minutes: nothing may compile after warm-up, and neither host nor device memory
may grow.

    python benchmarks/soak.py [--minutes 10] [--model demo] [--chunked-prefill] [--csv FILE]

Requests arrive at random, in bursts now and then; prompts and outputs of all lengths; greedy,
sampled, with penalties, stop strings, logit bias, log-probabilities (output and prompt), n > 1,
streamed; some are too long, some invalid, some aborted while waiting or running. Memory is sampled
every few seconds while the engine is at work; the first fifth (at least two samples) is not
counted, as allocators and caches fill. Exit code 1 if anything compiled, memory grew, a request was
lost, or the engine's books do not balance.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import psutil

from deepinfer_jax import LLM, LLMEngine, SamplingParams
from deepinfer_jax.sampling_params import RequestOutputKind

HOST_GROWTH = 0.02
"""Share of the resident memory, between the first and the last third of the samples, that counts as
noise."""


@dataclass(frozen=True)
class Sample:
    seconds: float
    host_bytes: int
    device_bytes: int
    arrays: int
    tokens: int


@dataclass
class Traffic:
    """Draws requests and keeps track of what became of them."""

    engine: LLMEngine
    rng: np.random.Generator
    longest_prompt: int
    longest_output: int
    live: dict[str, bool] = field(default_factory=dict)
    results: Counter = field(default_factory=Counter)
    serial: itertools.count = field(default_factory=itertools.count)

    def params(self) -> SamplingParams:
        rng, kind = self.rng, int(self.rng.integers(9))
        common = {
            "max_tokens": int(np.exp(rng.uniform(0, np.log(self.longest_output)))) or 1,
            "ignore_eos": bool(rng.random() < 0.5),
            "output_kind": (
                RequestOutputKind.DELTA if rng.random() < 0.3 else RequestOutputKind.FINAL_ONLY
            ),
        }
        extra = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.2, "top_k": 20, "seed": int(rng.integers(2**31))},
            {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2},
            {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
            {"temperature": 0.0, "logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 1},
            {"temperature": 1.0, "n": 3},
            (
                {"temperature": 1.0, "stop": ["the", "a"]}
                if self.engine.tokenizer
                else {"stop_token_ids": [5, 9]}
            ),
        ][kind]
        return SamplingParams(**common, **extra)

    def add(self) -> None:
        rng, vocab = self.rng, self.engine.model_config.vocab_size
        length = int(np.exp(rng.uniform(0, np.log(self.longest_prompt)))) or 1
        if rng.random() < 0.02:
            length = self.engine.config.max_model_len + 5
        prompt = rng.integers(3, vocab, length).tolist()
        if rng.random() < 0.01:
            prompt[-1] = vocab
        request_id = f"soak-{next(self.serial)}"
        try:
            self.engine.add_request(request_id, prompt, self.params())
        except ValueError:
            self.results["refused"] += 1
            return
        self.live[request_id] = True

    def abort_one(self) -> None:
        if self.live:
            victim = list(self.live)[int(self.rng.integers(len(self.live)))]
            self.engine.abort_request(victim)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                del self.live[output.request_id]
                self.results[output.outputs[0].finish_reason] += 1


def sample(engine: LLMEngine, start: float) -> Sample:
    gc.collect()
    arrays = [a for a in jax.live_arrays() if not a.is_deleted()]
    device = sum(a.nbytes for a in arrays)
    host = psutil.Process().memory_info().rss
    return Sample(
        time.perf_counter() - start,
        host,
        device,
        len(arrays),
        engine.stats_log.totals["generated_tokens"],
    )


def soak(
    engine: LLMEngine, seconds: float, every: float, seed: int = 0
) -> tuple[list[Sample], Counter]:
    """Traffic for so long, then until the last request has ended; the samples taken at work, and
    the requests by how they ended."""
    limit = engine.config.max_model_len
    traffic = Traffic(engine, np.random.default_rng(seed), max(2, limit // 2), max(2, limit // 4))
    samples: list[Sample] = []
    start = time.perf_counter()
    goal = 2 * engine.config.max_num_seqs  # enough to queue at times
    while (now := time.perf_counter() - start) < seconds:
        wanted = goal if int(now / every) % 3 else goal // 8  # a lull every third interval
        if len(traffic.live) < wanted and traffic.rng.random() < 0.4:
            for _ in range(int(traffic.rng.integers(1, 8))):
                traffic.add()
        if traffic.rng.random() < 0.02:
            traffic.abort_one()
        traffic.step()
        if now > every * (len(samples) + 1):
            samples.append(sample(engine, start))
    while engine.has_unfinished_requests():
        traffic.step()
    if traffic.live:
        raise RuntimeError(f"requests that never ended: {list(traffic.live)}")
    return samples, traffic.results


def problems(engine: LLMEngine, samples: list[Sample]) -> list[str]:
    """What must not have happened, in words; empty if all is well."""
    engine.check_integrity()
    stats, found = engine.stats(), []
    for name in ("compiles_after_warm_up", "xla_compiles_after_warm_up"):
        if stats[name]:
            found.append(f"{name} = {stats[name]}")
    if stats["cache_usage"]:
        found.append(f"cache usage is {stats['cache_usage']} with nothing running")
    kept = samples[max(2, len(samples) // 5) :] if len(samples) > 4 else samples[1:]
    third = max(1, len(kept) // 3)
    for name, noise in (("host_bytes", HOST_GROWTH), ("device_bytes", 1e-3)):
        first, last = (
            np.median([getattr(s, name) for s in part]) for part in (kept[:third], kept[-third:])
        )
        if last > first * (1 + noise):
            found.append(f"{name} grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=5, help="seconds between samples")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument(
        "--num-blocks", type=int, default=40, help="few, so that sequences are preempted"
    )
    parser.add_argument("--chunked-prefill", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", help="write the samples to this file")
    args = parser.parse_args()
    with LLM(
        args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        num_blocks=args.num_blocks,
        max_num_batched_tokens=256,
        chunked_prefill=args.chunked_prefill,
        enable_prefix_caching=True,
        warm_up=True,
        prefill_buckets=(16, 64, 256),
        decode_buckets=(1, 4, args.max_num_seqs),
    ) as llm:
        samples, results = soak(llm.engine, 60 * args.minutes, args.every, args.seed)
        if args.csv:
            rows = [
                f"{s.seconds:.1f},{s.host_bytes},{s.device_bytes},{s.arrays},{s.tokens}"
                for s in samples
            ]
            with open(args.csv, "w") as file:
                file.write(
                    "\n".join(["seconds,host_bytes,device_bytes,arrays,tokens", *rows]) + "\n"
                )
        found, stats = problems(llm.engine, samples), llm.stats()
    print(f"{sum(results.values())} requests in {60 * args.minutes:.0f} s: {dict(results)}")
    print(
        f"{stats['steps']} steps, {stats['generated_tokens']} tokens, {stats['preemptions']}"
        " preemptions"
    )
    for name in ("host_bytes", "device_bytes"):
        values = [getattr(s, name) / 2**20 for s in samples]
        fifth = values[len(values) // 5]
        print(
            f"{name}: first {values[0]:.1f}, after a fifth {fifth:.1f}, last {values[-1]:.1f}, most"
            f" {max(values):.1f} MiB"
        )
    print(
        f"compiles after warm-up: {stats['compiles_after_warm_up']} programs,"
        f" {stats['xla_compiles_after_warm_up']} in all"
    )
    print("\n".join(found) or "ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
