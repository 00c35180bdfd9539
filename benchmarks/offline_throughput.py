"""Batch generation: tokens per second of this engine, beside other engines on the same prompts,
tokens and dtype, in one run.

    python benchmarks/offline_throughput.py [--model demo] [--dtype float32] [--quantization int8] \
        [--repeats 3] [--settings default,tuned]
        [--transformers-python PY] [--vllm-python PY] [--llama-cpp-python PY --llama-cpp-gguf FILE]

The optional interpreters belong to environments of their own that hold torch + transformers, vLLM's
CPU build, or llama-cpp-python; each engine runs in a process of its own that stays up, and takes
turns with the others, so that a busy machine is busy for all. Every request is greedy and ignores
EOS. Workloads (32 prompts of 128 tokens, benchmarks/smollm2_workload.json):

    batch   each prompt + 64 new tokens
    mixed   prompts cut to 8..128 tokens, 8..256 new tokens, both log-uniform
    single  one prompt, 128 new tokens

prefill = prompt tokens / time of a run that asks for one token each; decode = the other tokens /
the rest of the time; both by the same wall clocks for all engines. Medians over the repeats, and
the slowest and fastest of them.

Settings: "tuned" takes the flags given here, and for other engines what their workers say;
"default" gives every engine nothing but the lengths and the number of sequences. No engine turns
tokens into text.

Limits are measured in the same run (benchmarks/limits.py); the memory's speed right before and
after each `single` run of this engine, whose share of it is the median of those pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from limits import Streams, load_average, measure, median

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.models.resolve import resolve_model_path
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.compile_watch import compile_watch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    def with_max_tokens(self, count: int) -> Workload:
        return Workload(self.name, self.prompts, [count] * len(self.prompts))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def new_tokens(self) -> int:
        return sum(self.max_tokens)


@dataclass
class Times:
    """Walls of an engine on a workload: with one new token each, and whole."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stream: list[float] = field(
        default_factory=list
    )  # bytes/s that memory gave around each run, where it was measured

    def rates(self, w: Workload) -> tuple[float, float, float]:
        """(prefill, decode, new tokens) per second."""
        first, whole = median(self.first), median(self.whole)
        return (
            w.prompt_tokens / first,
            (w.new_tokens - len(w.prompts)) / max(whole - first, 1e-9),
            w.new_tokens / whole,
        )


def workloads(vocab: int) -> list[Workload]:
    prompts = json.loads((HERE / "smollm2_workload.json").read_text())
    prompts = [[t % vocab for t in p] for p in prompts]
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(8), np.log(128), len(prompts))).astype(int)
    wanted = np.exp(rng.uniform(np.log(8), np.log(256), len(prompts))).astype(int)
    mixed = Workload(
        "mixed", [p[:n] for p, n in zip(prompts, lengths.tolist(), strict=True)], wanted.tolist()
    )
    return [
        Workload("batch", prompts, [64] * len(prompts)),
        mixed,
        Workload("single", prompts[:1], [128]),
    ]


class Worker:
    """Another engine, in a process that answers `benchmarks/engines/worker.py`'s protocol."""

    def __init__(self, name: str, setting: str, python: str, script: str, *args: str) -> None:
        self.name, self.setting, self.peak_bytes = f"{name} {setting}", setting, 0
        environment = {
            k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PYTHONPATH")
        }
        command = [python, str(HERE / "engines" / script), *args]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the {self.name} worker ended with exit code {self._process.wait()}"
            )
        return json.loads(line)

    def run(self, w: Workload) -> tuple[float, list[list[int]]]:
        print(
            json.dumps({"prompts": w.prompts, "max_tokens": w.max_tokens}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Ours:
    """This engine, in this process."""

    def __init__(self, args: argparse.Namespace, setting: str) -> None:
        self.name, self.setting = f"deepinfer-jax {setting}", setting
        watch = compile_watch()
        tuned: dict[str, Any] = {}
        if setting == "tuned":
            tuned = dict(
                max_num_batched_tokens=args.max_num_batched_tokens,
                num_decode_steps=args.num_decode_steps,
                prefill_buckets=args.prefill_buckets,
                decode_buckets=args.decode_buckets,
            )
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            warm_up=True,
            strict_compiles=True,
            **tuned,
        )
        self.engine = self.llm.engine
        self.compiles = (watch.compiles, watch.cache_hits)

    @property
    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def run(self, w: Workload) -> tuple[float, list[list[int]]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in w.max_tokens
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(
            prompt_token_ids=w.prompts, sampling_params=params, use_tqdm=False
        )
        return time.perf_counter() - start, [o.outputs[0].token_ids for o in outputs]

    def close(self) -> None:
        self.llm.close()

    def report(self) -> list[str]:
        s, (compiles, hits) = self.engine.stats(), self.compiles
        decode, host = s["step_seconds"]["decode"], s["host_seconds"]["decode"]
        return [
            (
                f"compiles: {compiles} before the end of warm-up ({hits} from the persistent cache,"
                f" warm-up {s['warm_up_seconds']:.1f} s), {s['xla_compiles_after_warm_up']} after"
            ),
            f"padding: prefill {s['prefill_padding']:.1%}, decode {s['decode_padding']:.1%}",
            (
                f"decode step: p50 {1e3 * decode['p50']:.1f} ms, p99 {1e3 * decode['p99']:.1f} ms;"
                f" host part p50 {1e6 * host['p50']:.0f} us; device idle before it p50"
                f" {1e6 * s['device_idle_seconds']['p50']:.0f} us"
            ),
            (
                f"blocks: {s['num_blocks']}; TTFT p50 {s['ttft_seconds']['p50']:.2f} s; "
                f"inter-token p50 {1e3 * s['inter_token_seconds']['p50']:.1f} ms"
            ),
        ]


def other_engines(args: argparse.Namespace) -> list[Worker]:
    """The engines whose interpreters are given, once per setting; transformers has but one."""
    folder, workers = str(resolve_model_path(args.model)), []
    given = (
        ("vllm", args.vllm_python, folder, args.settings),
        ("llama_cpp", args.llama_cpp_python, args.llama_cpp_gguf, args.settings),
        ("transformers", args.transformers_python, folder, args.settings[:1]),
    )
    for name, python, model, settings in given:
        for setting in settings if python else ():
            script = f"{name}_worker.py"
            workers.append(Worker(name, setting, python, script, model, args.dtype, setting))
    return workers


def measure_engines(
    engines: list[Any], loads: list[Workload], repeats: int, streams: Streams | None
) -> dict[tuple[str, str], Times]:
    """Engines take turns in every repeat; one round before that is not counted. streams: measured
    around `single` runs."""
    times = {(e.name, w.name): Times() for e in engines for w in loads}
    for repeat in range(-1, repeats):
        for w in loads:
            for e in engines:
                t = times[e.name, w.name]
                probe = streams if w.name == "single" and isinstance(e, Ours) else None
                before = probe.best() if probe else 0.0
                first, _ = e.run(w.with_max_tokens(1))
                whole, t.tokens = e.run(w if repeat >= 0 else w.with_max_tokens(4))
                if probe and repeat >= 0:
                    t.stream.append((before + probe.best()) / 2)
                print(
                    f"{w.name} {e.name}: {first:.2f} s, {whole:.2f}"
                    f" s{'' if repeat >= 0 else ' (not counted)'}",
                    file=sys.stderr,
                )
                if repeat >= 0:
                    t.first.append(first)
                    t.whole.append(whole)
    return times


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Mean share of each request's tokens up to the first difference."""
    return float(np.mean([common_prefix(x, y) / len(x) for x, y in zip(a, b, strict=True)]))


def common_prefix(x: list[int], y: list[int]) -> int:
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))


def print_table(
    engines: list[Any], loads: list[Workload], times: dict[tuple[str, str], Times]
) -> None:
    ours = {e.setting: e for e in engines if isinstance(e, Ours)}
    columns = ("engine", "prefill tok/s", "decode tok/s", "new tok/s", "of rounds")
    columns += ("ours is", "same tokens")
    print(
        "\n{:8s} {:22s} {:>13s} {:>13s} {:>10s} {:>14s} {:>8s} {:>12s}".format("workload", *columns)
    )
    for w in loads:
        for e in engines:
            mine, t = times[ours[e.setting].name, w.name], times[e.name, w.name]
            prefill, decode, new = t.rates(w)
            spread = f"{w.new_tokens / max(t.whole):.0f} to {w.new_tokens / min(t.whole):.0f}"
            factor = same = ""
            if e is not ours[e.setting]:
                factor = f"{median(t.whole) / median(mine.whole):7.2f}x"
                same = f"{agreement(mine.tokens, t.tokens):11.1%}"
            print(
                f"{w.name:8s} {e.name:22s} {prefill:13.1f} {decode:13.1f} {new:10.1f} {spread:>14s}"
                f" {factor:>8s} {same:>12s}"
            )
    for e in engines:
        first = " (its first process)" if e.name.startswith("vllm") else ""
        print(f"peak memory {e.name}: {e.peak_bytes / 2**20:.0f} MiB{first}")


def print_limits(ours: Ours, loads: list[Workload], times: dict[tuple[str, str], Times]) -> None:
    """What binds: weights (and the live KV) streamed once per decode step of one sequence;
    multiply-adds for a batch."""
    engine = ours.engine
    params = jax.tree.leaves(engine.runner.params)
    stored = sum(p.size * p.dtype.itemsize for p in params)
    config = engine.model_config
    table = config.vocab_size * config.hidden_size
    packed = sum(
        p.size * (2 if p.dtype.itemsize == 1 and engine.config.quantization == "int4" else 1)
        for p in params
    )
    body = packed - table * (1 if config.tie_word_embeddings else 2)
    if not config.tie_word_embeddings:
        stored -= table * np.dtype(engine.config.dtype).itemsize  # only the head is read whole
    limits = measure()
    print("\nlimits of this machine, measured now:", *limits.lines(), sep="\n  ")
    for w in loads:
        t = times[ours.name, w.name]
        if w.name == "single":
            kv = kv_pools.bytes_per_block(engine.runner.cache_specs, engine.config.axes, 1) * (
                w.prompt_tokens + w.new_tokens / 2
            )
            rates = [
                (w.new_tokens - 1) / (whole - first)
                for first, whole in zip(t.first, t.whole, strict=True)
            ]
            shares = [rate * stored / stream for rate, stream in zip(rates, t.stream, strict=True)]
            share, bound = median(shares), median(t.stream) / stored
            print(
                f"single: {stored / 1e6:.0f} MB of weights per token at"
                f" {median(t.stream) / 1e9:.1f} GB/s -> at most {bound:.1f} tok/s; reached"
                f" {median(rates):.1f}, {share:.0%} of what memory gave at the time"
                f" ({min(shares):.0%} to {max(shares):.0%}); with {kv / 1e6:.1f} MB of live KV"
                f" {share * (stored + kv) / stored:.0%}"
            )
        else:
            rows = w.prompt_tokens + w.new_tokens - len(w.prompts)
            bound = w.new_tokens / ((2 * body * rows + 2 * table * w.new_tokens) / limits.flops)
            new = t.rates(w)[2]
            print(
                f"{w.name}: float32 multiply-adds of its matmuls allow {bound:.0f} new tok/s;"
                f" reached {new:.1f} = {new / bound:.0%}"
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default="batch,mixed,single")
    parser.add_argument(
        "--settings", default="tuned", help="of default, tuned, with commas; see above"
    )
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument(
        "--max-num-batched-tokens", type=int, help="tokens of one prefill step at most"
    )
    parser.add_argument("--num-decode-steps", type=int, default=1)
    for kind in ("prefill", "decode"):
        parser.add_argument(
            f"--{kind}-buckets",
            type=int,
            nargs="+",
            help="fewer than the default, for a shorter warm-up",
        )
    for name in ("transformers", "vllm", "llama-cpp"):
        parser.add_argument(
            f"--{name}-python", metavar="PY", help=f"interpreter of an environment with {name}"
        )
    parser.add_argument("--llama-cpp-gguf", metavar="FILE", help="the same weights as a GGUF file")
    args = parser.parse_args()
    args.settings = args.settings.split(",")
    if not args.settings or set(args.settings) - {"default", "tuned"}:
        parser.error(f"--settings is of default, tuned, got {','.join(args.settings)}")
    if args.llama_cpp_python and not args.llama_cpp_gguf:
        parser.error("--llama-cpp-python needs --llama-cpp-gguf")
    return args


def main() -> None:
    args = parse_args()
    device = jax.devices()[0].device_kind
    print(
        f"{args.model}, {args.dtype}, quantization {args.quantization}; jax {jax.__version__},"
        f" {device}; {load_average()}"
    )
    streams = None
    if jax.default_backend() == "cpu" and "single" in args.workloads.split(","):
        streams = Streams()
        streams.best()  # its programs are compiled before compiles are counted
    ours = [Ours(args, setting) for setting in args.settings]
    loads = [
        w
        for w in workloads(ours[0].engine.model_config.vocab_size)
        if w.name in args.workloads.split(",")
    ]
    engines = [*ours, *other_engines(args)]
    times = measure_engines(engines, loads, args.repeats, streams)
    print_table(engines, loads, times)
    for e in ours:
        print(f"\n{e.name}", *e.report(), sep="\n")
        if jax.default_backend() == "cpu":
            print_limits(e, loads, times)
    for e in engines:
        e.close()
    print(load_average())


if __name__ == "__main__":
    sys.exit(main())
