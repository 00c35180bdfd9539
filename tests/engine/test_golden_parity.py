"""The engine against a reference implementation's tokens and logits: whole or chunked, alone or
batched, any block size."""

import numpy as np
import pytest
from engine_cases import GREEDY, SMALL, Golden, small_llm, tokens

from deepinfer_jax import LLM, SamplingParams

LLAMA = Golden("llama")


@pytest.fixture(scope="module")
def llama():
    with small_llm() as llm:
        yield llm


def test_a_batch_equals_the_reference(llama):
    assert tokens(llama, LLAMA.prompts) == LLAMA.greedy


@pytest.mark.parametrize("i", range(4))
def test_a_prompt_alone_equals_the_reference(llama, i):
    assert tokens(llama, [LLAMA.prompts[i]]) == [LLAMA.greedy[i]]


def test_logprobs_of_prompt_and_output_equal_the_reference(llama):
    params = GREEDY.replace(prompt_logprobs=5, logprobs=5)
    outputs = llama.generate(prompt_token_ids=LLAMA.prompts, sampling_params=params, use_tqdm=False)
    for i, out in enumerate(outputs):
        reference = LLAMA.log_softmax(i)
        assert out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(LLAMA.prompts[i])
        for position, entry in enumerate(out.prompt_logprobs[1:]):
            row = reference[position]
            token = LLAMA.prompts[i][position + 1]
            assert entry[token].rank == 1 + int((row > row[token]).sum())
            assert {t for t, e in entry.items() if e.rank <= 5} == set(
                np.argsort(-row)[:5].tolist()
            )
            np.testing.assert_allclose(
                [e.logprob for e in entry.values()], row[list(entry)], atol=2e-4
            )
        first = out.outputs[0].logprobs[0]
        np.testing.assert_allclose(
            [e.logprob for e in first.values()], reference[-1][list(first)], atol=2e-4
        )
        assert out.outputs[0].cumulative_logprob == pytest.approx(
            sum(
                e[t].logprob
                for e, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True)
            )
        )


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("chunk", [32, 37])
def test_chunked_prefill_with_any_block_size_equals_the_reference(block_size, chunk):
    with small_llm(
        block_size=block_size,
        chunked_prefill=True,
        max_num_batched_tokens=chunk,
        prefill_buckets=(37,),
    ) as llm:
        assert tokens(llm, LLAMA.prompts) == LLAMA.greedy


def test_tiny_chunks_equal_the_reference():
    with small_llm(
        block_size=4, chunked_prefill=True, max_num_batched_tokens=5, prefill_buckets=(5,)
    ) as llm:
        assert tokens(llm, LLAMA.prompts) == LLAMA.greedy


@pytest.mark.parametrize("zos", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_zero_overhead_scheduling_and_several_steps_per_dispatch_change_nothing(zos, steps):
    params = [
        SamplingParams(temperature=t, seed=7 + i, max_tokens=n, ignore_eos=True)
        for i, (t, n) in enumerate(((0.0, 24), (0.8, 7), (1.3, 13), (0.0, 24)))
    ]
    with small_llm(zero_overhead_scheduling=zos, num_decode_steps=steps) as llm:
        got = tokens(llm, LLAMA.prompts, params)
    assert got[0] == LLAMA.greedy[0] and got[3] == LLAMA.greedy[3]
    assert [len(g) for g in got] == [24, 7, 13, 24]
    expected = EXPECTED.setdefault("tokens", got)
    assert got == expected


def test_a_decode_step_wider_than_the_sampling_tile_changes_nothing():
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=6, ignore_eos=True, logprobs=2)
        for i in range(4)
    ] * 19
    prompts = LLAMA.prompts * 19
    with small_llm(max_num_seqs=80, num_blocks=700, decode_buckets=(8, 80)) as llm:
        wide = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        narrow = llm.generate(
            prompt_token_ids=prompts[:4], sampling_params=params[:4], use_tqdm=False
        )
    for out, other in zip(wide, narrow * 19, strict=True):
        assert out.outputs[0].token_ids == other.outputs[0].token_ids
        assert out.outputs[0].cumulative_logprob == pytest.approx(
            other.outputs[0].cumulative_logprob, abs=1e-4
        )


EXPECTED: dict[str, list[list[int]]] = {}


@pytest.mark.parametrize("prefix", [False, True])
def test_preemption_with_recompute_changes_no_token(prefix):
    # 4 sequences of up to 70 + 24 tokens need 25 blocks of 4 each; 30 blocks force preemptions
    with small_llm(
        block_size=4, num_blocks=30, enable_prefix_caching=prefix, max_model_len=110
    ) as llm:
        assert tokens(llm, LLAMA.prompts * 2) == LLAMA.greedy * 2
        assert llm.stats()["preemptions"] > 0


def test_prompt_logprobs_of_a_recomputed_prompt_are_whole():
    # recomputation cuts the prompt at other places than the first life did
    params = GREEDY.replace(prompt_logprobs=0)
    with small_llm(
        block_size=4,
        num_blocks=30,
        chunked_prefill=True,
        max_num_batched_tokens=40,
        max_model_len=110,
    ) as llm:
        outputs = llm.generate(
            prompt_token_ids=LLAMA.prompts * 2, sampling_params=params, use_tqdm=False
        )
        assert llm.stats()["preemptions"] > 0
    for i, out in enumerate(outputs):
        prompt, reference = LLAMA.prompts[i % 4], LLAMA.log_softmax(i % 4)
        got = [
            entry[t].logprob for entry, t in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        np.testing.assert_allclose(
            got, reference[np.arange(len(prompt) - 1), prompt[1:]], atol=2e-4
        )


def test_prefix_cache_hits_change_no_token_and_are_reported():
    with small_llm(block_size=4, enable_prefix_caching=True) as llm:
        assert tokens(llm, LLAMA.prompts) == LLAMA.greedy
        outputs = llm.generate(
            prompt_token_ids=LLAMA.prompts, sampling_params=GREEDY, use_tqdm=False
        )
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy
        assert [o.num_cached_tokens for o in outputs] == [0, 4, 36, 68]


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "qwen3_moe"])
def test_moe_models_equal_the_reference_through_the_engine(name):
    golden = Golden(name)
    with small_llm(name) as llm:
        assert tokens(llm, golden.prompts) == golden.greedy


@pytest.mark.parametrize(
    "axes",
    [
        {"data_parallel_size": 8, "expert_parallel_size": 4},
        {"data_parallel_size": 2, "expert_parallel_size": 2, "tensor_parallel_size": 2},
    ],
)
def test_every_mesh_gives_the_same_tokens(axes):
    golden = Golden("deepseek_v3")
    with LLM(golden.path, **(SMALL | {"max_num_seqs": 2, "decode_buckets": (2,)}), **axes) as llm:
        assert (
            tokens(llm, golden.prompts) == golden.greedy
        )  # fewer prompts than ranks: some ranks have no token
        assert tokens(llm, golden.prompts * 3) == golden.greedy * 3
