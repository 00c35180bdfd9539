"""The capacity planner: the same numbers as a real engine, floors as worked out by hand, clear
refusals, a search that holds."""

import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer_jax import EngineArgs, LLMEngine
from deepinfer_jax.cli import main
from deepinfer_jax.launch.planner import plan as plan_module
from deepinfer_jax.launch.planner.floor import ModelCosts, step_floor
from deepinfer_jax.launch.planner.gpus import GPUS, find_gpu
from deepinfer_jax.launch.planner.plan import collectives, make_plan
from deepinfer_jax.launch.planner.search import FloorCosts, Targets, candidates, search
from deepinfer_jax.models.base import KeyCost
from deepinfer_jax.runner.memory import NotEnoughMemory
from deepinfer_jax.scheduler.simulation.traces import synthetic_trace

ROOT = Path(__file__).parents[3]
GOLDEN, CONFIGS = ROOT / "tests" / "golden", ROOT / "examples" / "configs"
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "prefill_buckets": (256,),
    "decode_buckets": (8,),
    "chunked_prefill": True,
    "warm_up": False,
}


def big(name: str, **changes) -> EngineArgs:
    defaults = {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "chunked_prefill": True,
        "block_size": 64,
    }
    return EngineArgs(str(CONFIGS / name), **(defaults | changes))


@pytest.mark.parametrize("role", ["PROMPT", "COMPLETION"])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", {}), ("deepseek_v3", {"data_parallel_size": 2, "expert_parallel_size": 2})],
)
def test_a_plan_equals_what_the_engine_allocates(role, model, mesh):
    args = EngineArgs(
        str(GOLDEN / model), engine_type=role, device_memory_bytes=40_000_000, **SMALL, **mesh
    )
    plan = make_plan(args, "cpu")
    engine = LLMEngine(args)
    try:
        assert engine.runner.num_blocks == plan.memory.num_blocks
        pools = [pool for layers in engine.runner.caches.values() for pool in layers]
        on_one_device = sum(pool.nbytes for pool in pools) // engine.config.axes.dp
        assert on_one_device == plan.memory.cache_bytes
        assert plan.kv_tokens == engine.runner.num_blocks * engine.config.block_size
        weights = sum(w.addressable_shards[0].data.nbytes for w in engine.runner.params)
        assert weights == plan.memory.params_bytes
        assert not plan.estimated
    finally:
        engine.close()


def test_expert_parallel_programs_show_their_collectives():
    args = EngineArgs(
        str(GOLDEN / "deepseek_v3"),
        device_memory_bytes=40_000_000,
        **SMALL,
        data_parallel_size=2,
        expert_parallel_size=2,
    )
    moved = make_plan(args, "cpu").collectives
    assert moved["all-to-all"]["count"] >= 4  # two MoE layers, there and back
    assert moved["all-to-all"]["bytes"] > 0


def test_collective_bytes_are_read_from_the_program_text():
    text = (
        "x = (f32[4,8]{1,0}, f32[4,8]{1,0}) all-to-all-start(f32[4,8] y)\n z = bf16[16]{0}"
        " all-gather(bf16[8] w)"
    )
    assert collectives(text) == {
        "all-to-all": {"count": 1, "bytes": 128},
        "all-gather": {"count": 1, "bytes": 32},
    }


def test_completion_engines_get_more_blocks_than_prompt_engines():
    blocks = {
        r: (
            make_plan(
                big("llama-3.1-8b", engine_type=r), "h200", compile_programs=False
            ).memory.num_blocks
        )
        for r in ("PROMPT", "COMPLETION")
    }
    assert blocks["COMPLETION"] > blocks["PROMPT"]


def test_known_models_have_their_published_sizes():
    def total(name, **mesh):
        c = make_plan(big(name, **mesh), "b200", compile_programs=False).costs
        return (
            c.dense_params
            + c.head_params
            + c.local_experts * mesh.get("expert_parallel_size", 1) * c.expert_params,
            c,
        )

    llama, c = total("llama-3.1-8b")
    assert llama == pytest.approx(8.03e9 - 128256 * 4096, rel=0.01)  # without the input embedding
    assert c.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    qwen, _ = total("qwen3-30b-a3b")
    assert qwen == pytest.approx(30.5e9 - 151936 * 2048, rel=0.01)
    v3, c = total("deepseek-v3", quantization="fp8", data_parallel_size=8, expert_parallel_size=8)
    assert v3 == pytest.approx(671e9 - 129280 * 7168, rel=0.01)
    assert c.kv_bytes_per_token == 61 * 576 * 2


def test_a_floor_is_flops_over_peak_and_bytes_over_bandwidth():
    m = ModelCosts(
        dense_params=1e9,
        dense_bytes=2e9,
        head_params=1e8,
        head_bytes=2e8,
        expert_params=0,
        expert_bytes=0,
        local_experts=0,
        num_experts=0,
        top_k=0,
        moe_layers=0,
        hidden_size=4096,
        keys=(KeyCost(1e6, 1e5),),
        kv_bytes_per_token=1e5,
        ep=1,
    )
    gpu = find_gpu("h200")
    f = step_floor(m, gpu, tokens=8, context=1000, sequences=8, decode=True)
    assert f.flops == 2 * 8 * 1e9 + 2 * 8 * 1e8 + 8 * 1000 * 1e6
    assert f.bytes == 2e9 + 2e8 + 8 * 1000 * 1e5 + 8 * 1e5
    assert f.seconds == f.memory_seconds == f.bytes / 4.8e12
    assert f.binds == "memory"
    f = step_floor(m, gpu, tokens=8192, context=500, sequences=8, decode=False)
    assert f.binds == "compute" and f.seconds == f.flops / 989.5e12
    # the rows of a prompt share one pass over its keys, of which they see half on average
    assert f.bytes == 2e9 + 2e8 + 8 * 2 * 500 * 1e5 + 8192 * 1e5
    moe = dataclasses.replace(
        m,
        expert_params=1e7,
        expert_bytes=2e7,
        local_experts=8,
        num_experts=64,
        top_k=8,
        moe_layers=10,
        ep=8,
    )
    f = step_floor(moe, gpu, tokens=1024, context=500, sequences=8, decode=False)
    assert f.exchanged_bytes == pytest.approx(
        2 * 10 * 1024 * 8 * (1 - (7 / 8) ** 8) * 7 / 8 * 4096 * 2
    )
    assert f.exchange_seconds == pytest.approx(f.exchanged_bytes / 450e9)
    assert f.flops == 2 * 1024 * (1e9 + 8 * 1e7) + 2 * 8 * 1e8 + 1024 * 500 * 1e6
    # with one token per rank each of the 64 experts is missed by all 8 tokens with (7/8)^8
    f = step_floor(moe, gpu, tokens=1, context=500, sequences=1, decode=True)
    touched = 8 * (1 - (7 / 8) ** 8)
    assert f.bytes == pytest.approx(2e9 + 2e8 + touched * 2e7 + 500 * 1e5 + 1e5)


def test_attention_flops_of_a_query_and_a_key():
    """Scores and weighted sum, a multiply-add each, of every layer and head; latent attention reads
    the latent twice and the rotated part once (arXiv:2405.04434, section 2.1)."""

    def flops(name, **mesh):
        return make_plan(big(name, **mesh), "b200", compile_programs=False).costs

    (key,) = flops("llama-3.1-8b").keys
    assert (key.flops, key.bytes) == (32 * 32 * 2 * 2 * 128, 32 * 2 * 8 * 128 * 2)
    mesh = {"quantization": "fp8", "data_parallel_size": 8, "expert_parallel_size": 8}
    (key,) = flops("deepseek-v3", **mesh).keys
    assert (key.flops, key.bytes) == (61 * 128 * 2 * (512 + 64 + 512), 61 * 576 * 2)
    # all index keys are scored (64 heads of 128), 2048 latents read
    costs = flops("deepseek-v3.2", **mesh)
    floors = [
        step_floor(costs, find_gpu("h200"), tokens=1, context=n, sequences=1, decode=True)
        for n in (4096, 131072)
    ]
    more = 131072 - 4096
    assert floors[1].bytes - floors[0].bytes == pytest.approx(more * 61 * 128 * 2)
    assert floors[1].flops - floors[0].flops == pytest.approx(more * 61 * 64 * 2 * 128)
    # 21 layers with an entry and an index key per 4 tokens, 20 with an entry per 128
    v4 = flops("deepseek-v4-flash", block_size=128, **mesh)
    assert v4.kv_bytes_per_token == 2 * (21 * (512 + 128) / 4 + 20 * 512 / 128)


def test_estimated_temporaries_by_hand():
    """Activations of a layer, rows exchanged between expert ranks, logits in float32."""

    def temp(name, role, **changes):
        args = big(name, engine_type=role, **changes)
        return make_plan(args, "b200", compile_programs=False).memory.temp_bytes

    llama = dict(hidden=4096, inner=14336, vocab=128256)
    for role, tokens, sampled in (("PROMPT", 8192, 16), ("COMPLETION", 256, 256)):
        rows = tokens * (6 * llama["hidden"] + 3 * llama["inner"]) * 2
        logits = 4 * sampled * llama["vocab"] * 4
        assert temp("llama-3.1-8b", role, max_num_seqs=256) == rows + logits
    mesh = dict(quantization="fp8", data_parallel_size=8, expert_parallel_size=8)
    for role, tokens, sampled in (("PROMPT", 8192, 16), ("COMPLETION", 256, 256)):
        rows = tokens * (6 * 7168 + 3 * max(18432, 2 * 128 * (128 + 64))) * 2
        exchanged = 3 * 8 * tokens * 7168 * 2
        logits = 4 * sampled * 129280 * 4
        found = temp("deepseek-v3", role, max_num_seqs=256, **mesh)
        assert found == rows + exchanged + logits


class TestRefusals:
    def test_unknown_gpu(self):
        with pytest.raises(
            ValueError, match="unknown GPU 'h300'; known: a100, b200, gb200, gh200, h100, h20, h200"
        ):
            make_plan(big("llama-3.1-8b"), "h300")

    def test_missing_plugin(self, monkeypatch):
        monkeypatch.setattr(plan_module, "plugin_problem", lambda: "no CUDA plugin is installed")
        with pytest.raises(
            ValueError, match="no CUDA plugin is installed; install jax-cuda13-plugin"
        ):
            make_plan(big("llama-3.1-8b"), "h200", compile_programs=True)

    def test_a_671b_model_on_one_gpu_names_the_number_that_fits(self):
        with pytest.raises(
            NotEnoughMemory, match=r"exceed NVIDIA H200 .* It fits from 8 of them \(--dp 8 --ep 8\)"
        ):
            make_plan(big("deepseek-v3", quantization="fp8"), "h200", compile_programs=False)

    def test_devices_must_match_the_mesh(self, capsys):
        code = main(
            [
                "plan",
                "--model",
                str(CONFIGS / "llama-3.1-8b"),
                "--gpu",
                "h200",
                "--devices",
                "3",
                "--estimate",
            ]
        )
        assert code == 2
        assert "--devices 3 must equal dp x tp = 1 x 1" in capsys.readouterr().err

    def test_targets_nothing_can_meet(self):
        trace = synthetic_trace(50, rate=1, input_mean=500, output_mean=50, max_length=4000)
        with pytest.raises(ValueError, match="relax a target"):
            search(big("llama-3.1-8b"), "h200", trace, Targets(ttft=1.0, itl=1e-4), sizes=(1,))


class TestSearch:
    TRACE = synthetic_trace(300, rate=20, input_mean=800, output_mean=100, max_length=4000)

    def test_the_best_split_meets_the_targets_with_the_fewest_gpus(self):
        trials = search(
            big("llama-3.1-8b"),
            "h200",
            self.TRACE,
            Targets(ttft=1.0, itl=0.03),
            sizes=(1, 2),
            tries=4,
        )
        best = trials[0]
        assert best.passed
        assert best.share >= 0.9
        assert all(t.candidate.devices >= best.candidate.devices for t in trials if t.passed)

    def test_more_load_needs_more_gpus(self):
        args, targets = big("llama-3.1-8b"), Targets(ttft=1.0, itl=0.03)
        low = candidates(args, "h200", self.TRACE, targets, 0.6, (1,))[0].devices
        high = candidates(args, "h200", self.TRACE.faster(20), targets, 0.6, (1,))[0].devices
        assert high > low

    def test_costs_are_floors_over_efficiency(self):
        plan = make_plan(big("llama-3.1-8b"), "h200", compile_programs=False)
        full, half = (FloorCosts(plan.costs, GPUS["h200"], e) for e in (1.0, 0.5))
        assert half.decode_seconds(16, 1000) == pytest.approx(2 * full.decode_seconds(16, 1000))


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    out = tmp_path / "plan.json"
    args = [
        "plan",
        "--model",
        str(CONFIGS / "qwen3-30b-a3b"),
        "--gpu",
        "b200",
        "--role",
        "completion",
        "--estimate",
        "--json",
        str(out),
    ]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "qwen3-30b-a3b as COMPLETION on 1 x b200" in text
    assert "ESTIMATED, nothing was compiled" in text
    plan = json.loads(out.read_text())
    assert plan["estimated"] is True
    assert plan["kv_tokens"] == plan["num_blocks"] * 64
    assert plan["steps"][0]["binds"] == "memory"
