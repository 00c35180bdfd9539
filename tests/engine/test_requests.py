"""Everything a user can get wrong, and everything that can happen to a request: a defined result,
and the others go on."""

import json
import shutil

import numpy as np
import pytest
from engine_cases import GOLDEN, GREEDY, SMALL, Golden, small_llm, tokens
from safetensors.numpy import load_file, save_file

from deepinfer_jax import LLM, EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.sampling_params import RequestOutputKind

LLAMA = Golden("llama")
SHORT = LLAMA.prompts[1]


@pytest.fixture(scope="module")
def llm():
    with small_llm() as llm:
        yield llm


@pytest.fixture
def engine(llm):
    yield llm.engine
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.check_integrity()


def run(engine, ids):
    """Steps until all ids have ended; the final outputs by id."""
    done = {}
    for _ in range(1000):
        for out in engine.step():
            if out.finished:
                assert out.request_id not in done
                done[out.request_id] = out
        if set(ids) <= set(done):
            return done
    raise AssertionError(f"not finished after 1000 steps: {set(ids) - set(done)}")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([3, 512], "token id 512 at position 1 is outside the vocabulary \\[0, 512\\)"),
        ([-1], "token id -1 at position 0"),
        ([[1, 2]], "flat list of integers"),
        ([1.5], "flat list of integers"),
        ("text", "no tokenizer.json"),
        ({"prompt": None}, "either 'prompt' or 'prompt_token_ids'"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_and_the_others_go_on(engine, prompt, message):
    engine.add_request("good", SHORT, GREEDY)
    with pytest.raises(ValueError, match=message) as error:
        engine.add_request("bad", prompt, GREEDY)
    assert "'bad'" in str(error.value)
    assert run(engine, ["good"])["good"].outputs[0].token_ids == LLAMA.greedy[1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_sampling_parameters_are_refused_at_construction(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logprobs=6), "max_logprobs=5"),
        (SamplingParams(prompt_logprobs=6), "max_logprobs=5"),
        (SamplingParams(logit_bias={512: 1.0}), "logit_bias token id 512"),
        (SamplingParams(stop_token_ids=[600]), "stop_token_ids token id 600"),
        (SamplingParams(logit_bias=dict.fromkeys(range(65), 1.0)), "65 entries, the limit is 64"),
        (SamplingParams(stop="x"), "no.*|the model folder has none"),
    ],
)
def test_parameters_past_the_engines_limits_are_refused(engine, params, message):
    with pytest.raises(ValueError, match=message) as error:
        engine.add_request("r", SHORT, params)
    assert "'r'" in str(error.value)


def test_max_tokens_0_gives_one_token(llm):
    assert tokens(llm, [SHORT], GREEDY.replace(max_tokens=0)) == [LLAMA.greedy[1][:1]]


def test_a_prompt_over_the_limit_ends_at_once_and_the_others_go_on(llm):
    prompts = [SHORT, [5] * 300, LLAMA.prompts[2]]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
    assert outputs[1].finished
    assert outputs[1].outputs[0].finish_reason == "prompt_length_exceeded"
    assert outputs[1].outputs[0].token_ids == []
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [LLAMA.greedy[1], LLAMA.greedy[2]]


def test_a_prompt_of_exactly_the_limit_still_gets_one_token(llm):
    outputs = llm.generate(prompt_token_ids=[[5] * 256], sampling_params=GREEDY, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 1
    assert outputs[0].outputs[0].finish_reason == "length"


def test_generation_stops_at_max_model_len(llm):
    out = llm.generate(prompt_token_ids=[[5] * 250], sampling_params=GREEDY, use_tqdm=False)[0]
    assert len(out.outputs[0].token_ids) == 6
    assert out.outputs[0].finish_reason == "length"


def test_a_duplicate_id_is_refused_and_the_first_one_goes_on(engine):
    engine.add_request("a", SHORT, GREEDY)
    with pytest.raises(ValueError, match="'a': a request with this id is already running"):
        engine.add_request("a", SHORT, GREEDY)
    assert run(engine, ["a"])["a"].outputs[0].token_ids == LLAMA.greedy[1]
    engine.add_request("a", SHORT, GREEDY)  # ended: the id is free again
    assert run(engine, ["a"])["a"].outputs[0].token_ids == LLAMA.greedy[1]


def test_a_list_with_a_bad_prompt_runs_nothing(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(prompt_token_ids=[SHORT, []], sampling_params=GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert tokens(llm, [SHORT]) == [LLAMA.greedy[1]]


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []
    assert list(llm.stream([])) == []


def test_parameters_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(prompt_token_ids=[SHORT], sampling_params=[GREEDY, GREEDY])


def test_ten_thousand_requests_at_once(llm):
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [LLAMA.prompts[0], SHORT] * 5000
    got = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [
        LLAMA.greedy[0][:1],
        LLAMA.greedy[1][:1],
    ] * 5000


class TestAbort:
    def test_of_an_unknown_or_finished_id_does_nothing(self, engine):
        assert engine.abort_request("nobody") == []
        engine.add_request("a", SHORT, GREEDY)
        run(engine, ["a"])
        assert engine.abort_request("a") == []

    def test_of_a_waiting_request(self, engine):
        engine.add_request("a", SHORT, GREEDY)
        engine.add_request("b", LLAMA.prompts[2], GREEDY)
        assert engine.abort_request("a") == ["a"]
        done = run(engine, ["a", "b"])
        assert done["a"].outputs[0].finish_reason == "abort"
        assert done["a"].outputs[0].token_ids == []
        assert done["b"].outputs[0].token_ids == LLAMA.greedy[2]

    def test_of_a_running_request_keeps_its_tokens(self, engine):
        engine.add_request("a", SHORT, GREEDY)
        engine.add_request("b", LLAMA.prompts[2], GREEDY)
        for _ in range(6):
            engine.step()
        assert engine.abort_request(["a", "x"]) == ["a"]
        done = run(engine, ["a", "b"])
        got = done["a"].outputs[0].token_ids
        assert done["a"].outputs[0].finish_reason == "abort"
        assert 0 < len(got) < 24
        assert got == LLAMA.greedy[1][: len(got)]
        assert done["b"].outputs[0].token_ids == LLAMA.greedy[2]


class TestStops:
    def test_eos_ends_unless_ignored(self, llm):
        # bias makes EOS (id 1) certain
        params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={1: 100.0})
        out = llm.generate(prompt_token_ids=[SHORT], sampling_params=params, use_tqdm=False)[
            0
        ].outputs[0]
        assert (out.token_ids, out.finish_reason, out.stop_reason) == ([1], "stop", None)
        out = llm.generate(
            prompt_token_ids=[SHORT],
            sampling_params=params.replace(ignore_eos=True),
            use_tqdm=False,
        )[0].outputs[0]
        assert (out.token_ids, out.finish_reason) == ([1] * 5, "length")

    def test_min_tokens_bans_eos_until_then(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=3, logit_bias={1: 100.0})
        out = llm.generate(prompt_token_ids=[SHORT], sampling_params=params, use_tqdm=False)[
            0
        ].outputs[0]
        assert len(out.token_ids) == 4
        assert out.token_ids[3] == 1
        assert 1 not in out.token_ids[:3]

    def test_a_stop_token_is_the_stop_reason(self, llm):
        stop = LLAMA.greedy[2][4]
        params = GREEDY.replace(stop_token_ids=[stop])
        out = llm.generate(
            prompt_token_ids=[LLAMA.prompts[2]], sampling_params=params, use_tqdm=False
        )[0].outputs[0]
        assert out.token_ids == LLAMA.greedy[2][: LLAMA.greedy[2].index(stop) + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)


class TestSampling:
    def test_a_sample_does_not_depend_on_its_neighbours(self, llm):
        params = [
            SamplingParams(
                temperature=1.0, top_p=0.9, top_k=50, seed=i, max_tokens=16, ignore_eos=True
            )
            for i in range(4)
        ]
        together = tokens(llm, LLAMA.prompts, params)
        alone = [tokens(llm, [p], s)[0] for p, s in zip(LLAMA.prompts, params, strict=True)]
        assert together == alone
        assert len({tuple(t) for t in together}) == 4

    def test_n_completions_differ_and_repeat_with_the_seed(self, llm):
        params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
        first, again = (
            llm.generate(prompt_token_ids=[SHORT], sampling_params=params, use_tqdm=False)[0]
            for _ in range(2)
        )
        texts = [tuple(c.token_ids) for c in first.outputs]
        assert [c.index for c in first.outputs] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert texts == [tuple(c.token_ids) for c in again.outputs]

    def test_penalties_forbid_repetition(self, llm):
        params = GREEDY.replace(
            frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0, max_tokens=24
        )
        got = tokens(llm, [SHORT], params)[0]
        plain = LLAMA.greedy[1]
        assert len(set(got)) > len(set(plain)) or len(set(plain)) == 24


def test_streaming_deltas_add_up_to_the_whole(llm):
    parts = {str(i): [] for i in range(4)}
    for out in llm.stream(prompt_token_ids=LLAMA.prompts, sampling_params=GREEDY):
        parts[out.request_id] += out.outputs[0].token_ids
    assert list(parts.values()) == LLAMA.greedy


def test_a_stream_closed_early_aborts(llm):
    stream = llm.stream(prompt_token_ids=LLAMA.prompts, sampling_params=GREEDY)
    next(stream)
    stream.close()
    assert tokens(llm, [SHORT]) == [LLAMA.greedy[1]]


def test_cumulative_outputs_grow(engine):
    engine.add_request("a", SHORT, GREEDY.replace(output_kind=RequestOutputKind.CUMULATIVE))
    lengths = []
    while engine.has_unfinished_requests():
        lengths += [len(o.outputs[0].token_ids) for o in engine.step()]
    assert lengths == list(range(1, 25))


class TestModelFolders:
    def test_unknown_folder(self):
        with pytest.raises(ValueError, match="no such model: /nowhere"):
            LLM("/nowhere")

    @pytest.fixture
    def folder(self, tmp_path):
        shutil.copytree(GOLDEN / "llama", tmp_path / "m")
        return tmp_path / "m"

    def test_missing_extra_and_misshapen_tensors_are_named_together(self, folder):
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.self_attn.o_proj.weight"]
        weights["model.norm.weight"] = np.zeros(7, np.float32)
        weights["model.layers.9.extra"] = np.zeros(3, np.float32)
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError) as error:
            LLM(str(folder), **SMALL)
        text = str(error.value)
        assert all(
            name in text
            for name in (
                "model.layers.1.self_attn.o_proj.weight",
                "model.norm.weight",
                "model.layers.9.extra",
            )
        )

    def test_wrong_dtype_is_named(self, folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = np.zeros(64, np.int64)
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            LLM(str(folder), **SMALL)

    def test_unknown_architecture(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="NobodyForCausalLM"):
            LLM(str(folder), **SMALL)

    def test_weights_with_nan_end_the_request_not_the_engine(self, folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][:] = np.nan
        save_file(weights, folder / "model.safetensors")
        with LLM(str(folder), **SMALL) as llm:
            out = llm.generate(prompt_token_ids=[SHORT], sampling_params=GREEDY, use_tqdm=False)[
                0
            ].outputs[0]
            assert (out.finish_reason, out.stop_reason, out.token_ids) == (
                "error",
                "non-finite logits",
                [],
            )
            llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 4096}, r"max_model_len must be in \[2, 512\]"),
        ({"block_size": 0}, "block_size must be >= 1, got 0"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"quantization": "int3"}, "unknown quantization 'int3'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"engine_type": "PREFILL"}, "unknown engine_type 'PREFILL'"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens=64"),
        ({"data_parallel_size": 3, "expert_parallel_size": 2}, "ep must divide dp"),
        ({"data_parallel_size": 16}, "needs 16 devices, only 8"),
        (
            {"engine_type": "COMPLETION", "stop_preempted_request": False},
            "cannot recompute preempted requests",
        ),
        ({"engine_type": "COMPLETION", "context_parallel_size": 2}, "refuses context parallelism"),
        ({"num_blocks": None, "device_memory_bytes": 1_000_000}, "bytes short of one sequence"),
    ],
)
def test_impossible_configurations_are_refused_at_construction(changes, message):
    args = {"warm_up": False, "prefill_buckets": None} | changes
    with pytest.raises(ValueError, match=message):
        LLMEngine(EngineArgs(str(GOLDEN / "llama"), **(SMALL | args)))
