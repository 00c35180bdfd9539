"""DeepSeek-V4 behind the engine: with state per sequence, whatever happens to a sequence changes no
token.

The fixture has windows of 5 tokens and entries of 3 and 24, so blocks of 12 end inside all of
them.
"""

from __future__ import annotations

import pytest
import state_fuzz
from engine_cases import GREEDY, Golden
from snapshot_cases import tiny_engine

from deepinfer_jax import LLM

NAME = "deepseek_v4_yarn"
V4 = Golden(NAME)
NEW = len(V4.greedy[0])
PARAMS = GREEDY.replace(max_tokens=NEW)


def engine(**changes):
    return tiny_engine(NAME, **(state_fuzz.SIZES | changes))


def generate(target, prompts, params=PARAMS, prefix="g"):
    """(token ids of every completion, prompt tokens that were not computed) per prompt."""
    for i, prompt in enumerate(prompts):
        target.add_request(f"{prefix}{i}", prompt, params)
    done = {}
    while target.has_unfinished_requests():
        done |= {o.request_id: o for o in target.step() if o.finished}
    target.check_integrity()
    assert all(s.cache_usage == 0 for s in target.schedulers)
    outputs = [done[f"{prefix}{i}"] for i in range(len(prompts))]
    return [([c.token_ids for c in o.outputs], o.num_cached_tokens) for o in outputs]


def tokens(results):
    return [completions[0] for completions, _ in results]


@pytest.fixture(scope="module")
def rings():
    """Windows in rings; chunks of at most 32 tokens, four decode steps per dispatch at times."""
    return engine(num_decode_steps=4, zero_overhead_scheduling=True)


@pytest.fixture(scope="module")
def paged():
    return engine(enable_prefix_caching=True, num_blocks=12, stop_preempted_request=False)


def test_chunks_batches_and_several_steps_per_dispatch(rings):
    assert tokens(generate(rings, V4.prompts * 3)) == V4.greedy * 3


def test_several_completions_of_one_prompt(rings, paged):
    for target in (rings, paged):
        results = generate(target, V4.prompts[1:], PARAMS.replace(n=3))
        assert results[0][0] == [V4.greedy[1]] * 3


def test_prompt_logprobs(rings):
    rings.add_request("p", V4.prompts[1], PARAMS.replace(prompt_logprobs=1))
    outputs = []
    while rings.has_unfinished_requests():
        outputs += rings.step()
    reference = V4.log_softmax(1)
    for position, entry in enumerate(outputs[-1].prompt_logprobs[1:]):
        token = V4.prompts[1][position + 1]
        assert abs(entry[token].logprob - reference[position][token]) < 5e-4


def test_preempted_sequences_are_computed_again(paged):
    before = paged.stats()["preemptions"]
    assert tokens(generate(paged, V4.prompts[1:] * 4)) == V4.greedy[1:] * 4
    assert paged.stats()["preemptions"] > before


def test_an_aborted_sequence_leaves_nothing_to_the_next(rings):
    for i in range(3):
        rings.add_request(f"a{i}", V4.prompts[1], PARAMS)
    rings.step(), rings.step()
    rings.abort_request([f"a{i}" for i in range(3)])
    assert tokens(generate(rings, V4.prompts)) == V4.greedy


def test_shared_beginnings_are_computed_once(paged):
    """A hit ends where a block and the longest entry (24 tokens) end: never more than an entry and
    a block is computed again."""
    for s in paged.schedulers:
        s.blocks.drop_cache()
    prompt = V4.prompts[1]  # 45 tokens: blocks end at 12, 24, 36
    assert generate(paged, [prompt]) == [([V4.greedy[1]], 0)]
    again = generate(paged, [prompt])
    assert again == [([V4.greedy[1]], 24)]
    other = [*prompt[:31], 7, 8, 9]
    fresh = generate(engine(num_blocks=16), [other])
    assert generate(paged, [other]) == [(fresh[0][0], 24)]
    turn = [*prompt, *V4.greedy[1], 5]  # 58 tokens; 56 have KV: 48 are found
    assert generate(paged, [turn])[0][1] == 48


def test_a_store_serves_what_another_engine_has_computed(tmp_path):
    store = {"kv_store": str(tmp_path / "kv"), "num_blocks": 16}
    first = engine(**store)
    generate(first, V4.prompts[1:])
    first.close()
    second = engine(data_parallel_size=2, expert_parallel_size=2, **store)
    assert generate(second, V4.prompts[1:]) == [([V4.greedy[1]], 24)]
    second.close()


@pytest.mark.parametrize("shared", [False, True], ids=["rings", "pages"])
def test_prompt_and_completion_engines_on_different_meshes(shared):
    sizes = {
        k: v for k, v in state_fuzz.SIZES.items() if k not in ("prefill_buckets", "decode_buckets")
    }
    with LLM(
        V4.path,
        disaggregate="1P:1D",
        completion_mesh={"data_parallel_size": 2, "expert_parallel_size": 2},
        **(sizes | {"chunked_prefill": True, "max_num_seqs": 4, "enable_prefix_caching": shared}),
    ) as llm:
        out = llm.generate(prompt_token_ids=V4.prompts * 2, sampling_params=PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in out] == V4.greedy * 2


def test_snapshots_forks_preemptions_and_hits_at_random():
    """A sample of `make fuzz`, windows in blocks only."""
    seen = state_fuzz.trials(0, 8, (state_fuzz.KINDS[1],))
    assert min(seen[what] for what in ("restored", "forked", "preemptions", "hits")) > 0, seen
