"""Expert balance: the policy against simpler ones and the optimum, and an engine that rearranges.

    python benchmarks/eplb.py                 # everything, about 3 minutes
    python benchmarks/eplb.py policy engine   # parts: policy, optimum, text, engine

policy   synthetic loads by Zipf's law that drift from step to step, at the sizes of large models:
         max / mean of ranks over all steps, and host seconds for all layers
optimum  small cases, where all placements can be tried
text     loads of small golden checkpoints on English text, prefill tokens counted by the engine
engine   8 CPU devices, expert parallel, routing that follows Zipf's law: balance before and after
         and the ideal, tokens with and without rearrangements, what a step waits for one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from expert_policies import by_total, in_turn, optimum, skewed_loads  # noqa: E402

from deepinfer_jax import SamplingParams  # noqa: E402
from deepinfer_jax.config import EngineArgs  # noqa: E402
from deepinfer_jax.engine.llm_engine import LLMEngine  # noqa: E402
from deepinfer_jax.experts.policy import RankLayout, balance, imbalance  # noqa: E402
from deepinfer_jax.models.layers.placement import initial_physical_to_logical  # noqa: E402
from deepinfer_jax.models.loading import abstract_model  # noqa: E402

SIZES = (  # experts, physical, ranks, nodes, groups, top_k, Zipf's exponent
    (256, 256, 64, 1, 1, 8, 0.5),
    (256, 320, 64, 1, 1, 8, 0.5),
    (256, 320, 64, 8, 8, 8, 0.5),
    (256, 288, 32, 1, 1, 8, 0.7),
    (128, 144, 16, 1, 1, 8, 0.7),
    (64, 72, 8, 1, 1, 6, 1.0),
)
LAYERS, STEPS, TOKENS = 61, 100, 4096
SMALL = ((4, 6, 3), (5, 8, 4), (6, 8, 4), (6, 9, 3), (5, 8, 2))
ENGINE_EXPERTS, ENGINE_EXTRA, ENGINE_LAYERS, TOP_K = 64, 8, 4, 4


def median(call, count: int = 5) -> float:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def initial_slots(layers: int, experts: int, physical: int) -> np.ndarray:
    return np.tile(initial_physical_to_logical(experts, physical), (layers, 1))


def policy() -> None:
    print(f"policy: {LAYERS} layers, {STEPS} steps of {TOKENS} tokens; means over layers")
    print("experts slots ranks nodes | initial in turn by total   ours | seconds (median of 5)")
    for experts, physical, ranks, nodes, groups, top_k, exponent in SIZES:
        rng = np.random.default_rng(0)
        loads = skewed_loads(rng, LAYERS, STEPS, experts, TOKENS, top_k, exponent)
        layout = RankLayout(ranks, nodes, groups)
        first = initial_slots(LAYERS, experts, physical)
        placed = [
            first,
            in_turn(loads, physical, ranks),
            by_total(loads, physical, ranks),
            balance(loads, physical, layout, first),
        ]
        seconds = median(lambda: balance(loads, physical, layout, first))  # noqa: B023
        ratios = "  ".join(f"{imbalance(loads, s, ranks).mean():7.3f}" for s in placed)
        print(f"{experts:7} {physical:5} {ranks:5} {nodes:5} | {ratios} | {seconds:.3f}")


def small_optimum() -> None:
    cases = 15
    print(f"optimum: one layer, 6 steps of 64 tokens, {cases} cases each; mean over cases")
    print("experts slots ranks | optimum   ours by total in turn | ours / optimum: mean, worst")
    for experts, physical, ranks in SMALL:
        rng, rows = np.random.default_rng(1), []
        for _ in range(cases):
            loads = skewed_loads(rng, 1, 6, experts, 64, 2)
            ours = balance(loads, physical, RankLayout(ranks))
            others = (by_total(loads, physical, ranks), in_turn(loads, physical, ranks))
            ratios = [imbalance(loads, s, ranks)[0] for s in (ours, *others)]
            rows.append([optimum(loads[0], physical, ranks), *ratios])
        best, ours, *_ = np.array(rows).T
        means = "  ".join(f"{x:7.3f}" for x in np.mean(rows, 0))
        ratio = ours / best
        print(
            f"{experts:7} {physical:5} {ranks:5} | {means} | {ratio.mean():.3f}, {ratio.max():.3f}"
        )


def text() -> None:
    """The golden checkpoints have 8 experts and random weights: their routing on text is real, but
    little skewed."""
    passage = (ROOT / "README.md").read_text()
    print("text: golden checkpoints, README.md as bytes in prompts of 128; placement for 4 ranks")
    print("model        steps | initial in turn by total   ours (12 slots)")
    for name in ("deepseek_v3", "qwen3_moe"):
        engine = LLMEngine(
            EngineArgs(
                str(ROOT / "tests" / "golden" / name),
                expert_parallel_size=2,
                engine_type="PROMPT",
                chunked_prefill=True,
                max_model_len=256,
                max_num_batched_tokens=256,
                max_num_seqs=8,
                num_blocks=256,
                prefill_buckets=(256,),
            )
        )
        ids = list(passage.encode())[: 128 * 200]
        for i in range(0, len(ids), 128):
            engine.add_request(str(i), ids[i : i + 128], SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        loads = np.asarray(engine.experts.arrays.read_counts()).swapaxes(0, 1)
        loads = np.ascontiguousarray(loads[:, loads.sum((0, 2)) > 0])
        layers, steps, experts = loads.shape
        physical = experts + 4
        placed = (
            initial_slots(layers, experts, physical),
            in_turn(loads, physical, 4),
            by_total(loads, physical, 4),
            balance(loads, physical, RankLayout(4)),
        )
        ratios = "  ".join(f"{imbalance(loads, s, 4).mean():7.3f}" for s in placed)
        print(f"{name:12} {steps:5} | {ratios}")
        engine.close()


# ---- an engine -----------------------------------------------------------------------------------


def write_model(folder: Path) -> None:
    """config.json of a small DeepSeek-V3 with many experts; its weights are drawn at random."""
    config = json.loads((ROOT / "tests" / "golden" / "deepseek_v3" / "config.json").read_text())
    config |= {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
        "n_routed_experts": ENGINE_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 1 + ENGINE_LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config))


def zipf_bias(rng: np.random.Generator, exponent: float = 1.0) -> np.ndarray:
    """A correction bias under which random sigmoid scores choose experts by Zipf's law, as far as a
    token may choose each only once."""
    target = np.arange(1, ENGINE_EXPERTS + 1) ** -exponent
    target = np.minimum(TOP_K * target / target.sum(), 0.9)
    scores = 1 / (1 + np.exp(-rng.standard_normal((2048, ENGINE_EXPERTS))))
    bias = np.zeros(ENGINE_EXPERTS)
    for _ in range(300):
        chosen = np.argsort(-(scores + bias), axis=1)[:, :TOP_K]
        share = np.bincount(chosen.ravel(), minlength=ENGINE_EXPERTS) / len(scores)
        bias += 0.02 * (np.log(target) - np.log(share + 1e-4))
    return rng.permutation(bias).astype(np.float32)


def skew(engine: LLMEngine) -> None:
    rng, params = np.random.default_rng(0), engine.runner.params
    config = engine.config
    tree = abstract_model(engine.model_config, engine.model_class, config.axes, config.dtype)[1]
    paths = [path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    biases = [i for i, name in enumerate(paths) if name == "gate_bias"]
    engine.runner.replace_params(
        {i: jax.device_put(zipf_bias(rng), params[i].sharding) for i in biases}
    )


def make_engine(folder: Path, interval: int) -> LLMEngine:
    engine = LLMEngine(
        EngineArgs(
            str(folder),
            load_format="dummy",
            expert_parallel_size=8,
            num_redundant_experts=ENGINE_EXTRA,
            expert_rearrangement_interval=interval,
            zero_overhead_scheduling=False,  # a step's time is then its own
            max_model_len=512,
            max_num_batched_tokens=512,
            max_num_seqs=16,
            num_blocks=600,
            prefill_buckets=(512,),
            decode_buckets=(16,),
            strict_compiles=True,
        )
    )
    skew(engine)
    return engine


def run(engine: LLMEngine) -> tuple[dict[str, list[int]], list[tuple[float, int]]]:
    """Tokens per request; (seconds, layers that moved before it) of each decode step."""
    rng = np.random.default_rng(1)
    for i in range(128):
        prompt = rng.integers(3, 500, 16).tolist()
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=240, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    arrays, moved, done, steps = engine.experts.arrays, [0], {}, []
    move = arrays.move

    def counted(layer: int, slots: np.ndarray) -> int:
        moved[0] += 1
        return move(layer, slots)

    arrays.move = counted
    while engine.has_unfinished_requests():
        before, moved[0] = moved[0], 0  # experts move behind a step's program: the next one waits
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        record = engine.stats_log.records[-1]
        if record.step_type == "decode":
            steps.append((record.duration, before))
    arrays.move = move
    return done, steps


def same(expected: dict[str, list[int]], found: dict[str, list[int]]) -> str:
    """Requests that agree, and how many tokens of the others do before they part: a sum over ranks
    in another order differs in its last bits, and a draw or a router's choice may hang on one."""
    lengths = [
        next((i for i, (x, y) in enumerate(zip(a, found[r], strict=True)) if x != y), len(a))
        for r, a in expected.items()
    ]
    whole = sum(n == len(a) for n, a in zip(lengths, expected.values(), strict=True))
    parted = [n for n, a in zip(lengths, expected.values(), strict=True) if n < len(a)]
    after = f", others part after {statistics.median(parted):.0f} tokens" if parted else ""
    return f"{whole} of {len(lengths)} requests equal{after}"


def engine_part() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        plain = make_engine(folder, 10**9)
        expected, quiet = run(plain)
        engine = make_engine(folder, 50)
        tokens, steps = run(engine)
        stats = engine.stats()
        record = engine.experts.record()
        shape = (len(record.slots), *record.slots.shape[1:])
        first = initial_slots(shape[0], ENGINE_EXPERTS, shape[1])
        before, after = (imbalance(record.loads, s, 8) for s in (first, record.slots))
        print(
            f"engine: 8 CPU devices, ep 8, {ENGINE_EXPERTS} + {ENGINE_EXTRA} experts,"
            f" {ENGINE_LAYERS} layers, top {TOP_K}, 128 sequences; Zipf's law;"
            f" a rearrangement every 50 decode steps, a layer per step"
        )
        print(f"  max / mean before {before.mean():.3f}, after {after.mean():.3f}, ideal 1.000")
        plain.experts.rearrange(record.slots)
        fixed, _ = run(plain)
        print(f"  tokens: {same(expected, tokens)} as without rearrangements;")
        print(f"    {same(expected, fixed)} with the last placement from the start (no moves)")
        print(
            f"  rearrangements {stats['experts']['rearrangements']}, slots moved"
            f" {stats['experts']['slots_moved']}, compiles {stats['xla_compiles_after_warm_up']}"
        )
        still = statistics.median(s for s, _ in quiet)
        between = statistics.median(s for s, n in steps if not n)
        waited = [s for s, n in steps if n]
        size = sum(
            engine.runner.params[i].nbytes for i in engine.experts.arrays.group.layers[0].weights
        )
        print(
            f"  decode step: {1e3 * still:.2f} ms without, {1e3 * between:.2f} ms between"
            f" rearrangements, {1e3 * statistics.median(waited):.2f} ms (worst"
            f" {1e3 * max(waited):.2f}) behind one layer's move of {size / 1e6:.1f} MB in all ranks"
        )
        engine.close()


PARTS = {"policy": policy, "optimum": small_optimum, "text": text, "engine": engine_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; known: {', '.join(PARTS)}")
    for name in args.parts:
        PARTS[name]()
        print()


if __name__ == "__main__":
    main()
