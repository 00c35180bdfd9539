"""The promise: prefill and decode apart give exactly the tokens (and text, and log-probabilities)
of one engine that does both."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from engine_cases import GOLDEN, GREEDY, Golden
from tokenizers import decoders, models

from deepinfer_jax import LLM, RequestOutputKind, SamplingParams
from deepinfer_jax.disagg.layout import LayoutMismatch
from deepinfer_jax.disagg.protocol import HandoffConfig
from deepinfer_jax.models.resolve import resolve_model_path

ARGS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 120,
    "chunked_prefill": True,
    "max_num_batched_tokens": 32,
    "prefill_buckets": (32,),
    "decode_buckets": (4,),
    "max_logprobs": 3,
    "enable_prefix_caching": True,
}
LLAMA = Golden("llama")


def folder_with_tokenizer(path: Path, name: str = "llama") -> Path:
    """A fixture's checkpoint with a tokenizer whose token i reads "ti "."""
    shutil.copytree(GOLDEN / name, path)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={f"▁t{i}": i for i in range(512)}, merges=[], unk_token="▁t0")
    )
    backend.decoder = decoders.Metaspace()
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_tokenizer(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def normal(folder):
    with LLM(str(folder), **ARGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def apart(folder):
    with LLM(str(folder), disaggregate="1P:1D", **ARGS) as llm:
        yield llm
        llm.engine.wait_idle()
        llm.engine.check_integrity()


@pytest.fixture(scope="module")
def both_llama(normal, apart):
    return normal, apart, LLAMA


@pytest.fixture(scope="module")
def both_deepseek_v3(tmp_path_factory):
    """Latent attention, experts, and blocks of another shape."""
    folder = str(folder_with_tokenizer(tmp_path_factory.mktemp("deepseek") / "v3", "deepseek_v3"))
    with LLM(folder, **ARGS) as one, LLM(folder, disaggregate="1P:1D", **ARGS) as two:
        yield one, two, Golden("deepseek_v3")


@pytest.fixture(params=["llama", "deepseek_v3"])
def both(request):
    """(NORMAL, PROMPT+COMPLETION, the reference) of a model."""
    return request.getfixturevalue(f"both_{request.param}")


def strip(output):
    """What must agree: everything but times and ids."""
    completions = [
        (
            c.index,
            c.token_ids,
            c.text,
            c.finish_reason,
            c.stop_reason,
            c.cumulative_logprob,
            c.logprobs,
        )
        for c in output.outputs
    ]
    return (
        output.prompt_token_ids,
        output.prompt,
        output.prompt_logprobs,
        completions,
        output.finished,
    )


def assert_same(normal, apart, prompts, params) -> list:
    expected = normal.generate(prompts, params, use_tqdm=False)
    got = apart.generate(prompts, params, use_tqdm=False)
    for a, b in zip(expected, got, strict=True):
        assert strip(a) == strip(b)
        assert a.metrics.num_generation_tokens == b.metrics.num_generation_tokens
    apart.engine.wait_idle()
    apart.engine.check_integrity()
    return got


def several(golden: Golden) -> list[list[int]]:
    """Longer than a step: chunked; twice the same: prefix hits."""
    return [golden.prompts[i] for i in (0, 1, 2, 3, 3, 1)]


SEVERAL = several(LLAMA)

CASES = {
    "greedy": GREEDY,
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=20, ignore_eos=True
    ),
    "engine's own seeds": SamplingParams(temperature=1.1, max_tokens=12, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.4,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        max_tokens=20,
        ignore_eos=True,
    ),
    "log-probabilities": GREEDY.replace(logprobs=3, max_tokens=9),
    "prompt log-probabilities": GREEDY.replace(logprobs=0, prompt_logprobs=2, max_tokens=4),
    "min_tokens, bias and stop ids": SamplingParams(
        temperature=0.0,
        max_tokens=20,
        min_tokens=5,
        stop_token_ids=[7, 50, 99],
        logit_bias={50: 3.0, 7: 2.0},
    ),
    "one token": GREEDY.replace(max_tokens=1),
    "two tokens": GREEDY.replace(max_tokens=2),
    "up to max_model_len": GREEDY.replace(max_tokens=None),
    "n": SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=1),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_those_of_one_engine(both, name):
    normal, apart, golden = both
    prompts = several(golden)
    assert max(map(len, prompts)) > ARGS["max_num_batched_tokens"]
    got = assert_same(normal, apart, prompts, CASES[name])
    for prompt, output in zip(prompts, got, strict=True):
        want = CASES[name].max_tokens if CASES[name].max_tokens is not None else 128 - len(prompt)
        if CASES[name].ignore_eos:
            assert all(len(c.token_ids) == want for c in output.outputs), "max_tokens is exact"


def test_greedy_equals_the_reference(both):
    _, apart, golden = both
    outputs = apart.generate(golden.prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == golden.greedy


def test_stop_strings_wherever_they_end(both):
    normal, apart, golden = both
    greedy = golden.greedy[2]
    text = lambda a, b: " ".join(f"t{t}" for t in greedy[a:b])  # noqa: E731
    first = f"t{greedy[0]}"
    for stop in ([first], [text(0, 2)], [text(1, 3)], [text(4, 6), "nowhere"], ["nowhere"]):
        for include in (False, True):
            params = GREEDY.replace(stop=stop, include_stop_str_in_output=include)
            got = assert_same(normal, apart, [golden.prompts[2]], params)[0].outputs[0]
            assert got.finish_reason == ("length" if stop == ["nowhere"] else "stop")


def test_prefix_hits_are_reported(both):
    _, apart, _ = both
    prompt = [9] * 40
    apart.generate([prompt], GREEDY, use_tqdm=False)
    again = apart.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == 36 and again.metrics.num_cached_tokens == 36


def test_chunks_move_before_the_last_one_is_computed(apart, monkeypatch):
    source, sent = apart.engine.prompt_engines[0], []
    send_payloads = source.send_payloads

    def spy(link, kind, ranges):
        for r in ranges:
            key = r.handoff.attempt
            seq = source._by_attempt[key].seq
            out = source.sender.outgoing[key]
            sent.append((r.first, r.count, seq.num_scheduled, out.state is None))
        send_payloads(link, kind, ranges)

    def once_there_is_room(scheduled, finished):
        # steps of this model may be faster than the answer
        source.sender.pump()
        while any(out.handoff is None for out in source.sender.outgoing.values()):
            time.sleep(0.001)
            source.sender.pump()

    monkeypatch.setattr(source, "send_payloads", spy)
    monkeypatch.setattr(source, "pe_prepare_save_kvcache", once_there_is_room)
    prompt = list(range(400, 500))
    apart.generate([prompt], GREEDY, use_tqdm=False)
    assert [first for first, *_ in sent] == [0, *np.cumsum([count for _, count, *_ in sent])[:-1]]
    assert sum(count for _, count, *_ in sent) == 25, "pages of the prompt, each once"
    assert [computed for *_, computed, _ in sent] == [32, 64, 96, 100]
    assert all(before_first_token for *_, before_first_token in sent), sent


def test_what_a_step_admits_is_admitted_before_the_next_of_its_dispatch(folder, monkeypatch):
    """Which may preempt it: then it has no slot and no blocks any more."""
    calls: list[str] = []
    with LLM(str(folder), disaggregate="1P:1D", num_decode_steps=3, **ARGS) as llm:
        target = llm.engine.completion_engines[0]
        schedule, admit = target.group.schedule, target.runner.admit

        def noting(name, function):
            return lambda *args: [calls.append(name), function(*args)][1]

        monkeypatch.setattr(target.group, "schedule", noting("schedule", schedule))
        monkeypatch.setattr(target.runner, "admit", noting("admit", admit))
        llm.generate([LLAMA.prompts[0]], GREEDY, use_tqdm=False)
    at = calls.index("admit")
    assert calls[at : at + 3] == ["admit", "schedule", "schedule"]
    assert calls[at + 3 : at + 6] == ["schedule"] * 3 and "admit" not in calls[at + 1 :]
    assert at % 3 == 1, "after the first of three"


def test_streams_are_the_same_text_in_pieces(normal, apart):
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=10, ignore_eos=True, logprobs=1, n=2
    )
    whole = normal.generate(SEVERAL[:3], params, use_tqdm=False)
    pieces: dict = {}
    for out in apart.stream(SEVERAL[:3], params):
        for c in out.outputs:
            ids, text, logprobs, reasons = pieces.setdefault(
                (int(out.request_id), c.index), ([], [], [], [])
            )
            ids += c.token_ids
            text.append(c.text)
            logprobs += c.logprobs or []
            reasons.append(c.finish_reason)
    for i, expected in enumerate(whole):
        for c in expected.outputs:
            ids, text, logprobs, reasons = pieces[i, c.index]
            assert (ids, "".join(text), logprobs, reasons[-1]) == (
                c.token_ids,
                c.text,
                c.logprobs,
                c.finish_reason,
            )


def test_a_stream_closed_early_frees_both_sides(apart):
    stream = apart.stream(SEVERAL, GREEDY.replace(max_tokens=60))
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    apart.engine.wait_idle()
    apart.engine.check_integrity()
    assert not apart.engine.has_unfinished_requests() or apart.engine.step() is not None


def test_an_id_may_be_used_again(apart):
    for _ in range(3):
        apart.engine.add_request(
            "a/b", LLAMA.prompts[1], GREEDY.replace(output_kind=RequestOutputKind.FINAL_ONLY)
        )
        outputs = []
        while apart.engine.has_unfinished_requests():
            outputs += apart.engine.step()
        assert [(o.request_id, o.outputs[0].token_ids) for o in outputs] == [
            ("a/b", LLAMA.greedy[1])
        ]


def test_random_aborts_leak_nothing(apart):
    rng = np.random.default_rng(0)
    final = {}
    for i in range(40):
        params = GREEDY.replace(
            max_tokens=int(rng.integers(1, 30)),
            output_kind=RequestOutputKind.FINAL_ONLY,
            n=int(rng.integers(1, 3)),
        )
        apart.engine.add_request(f"r{i}", LLAMA.prompts[i % 4], params)
        if rng.random() < 0.5:
            apart.engine.abort_request(f"r{rng.integers(0, i + 1)}")
        for o in apart.engine.step() if rng.random() < 0.5 else ():
            assert final.setdefault(o.request_id, o) is o
    while apart.engine.has_unfinished_requests():
        for o in apart.engine.step():
            assert final.setdefault(o.request_id, o) is o
    assert len(final) == 40
    for i in range(40):
        for c in final[f"r{i}"].outputs:
            assert (
                c.token_ids == LLAMA.greedy[i % 4][: len(c.token_ids)][:24] or len(c.token_ids) > 24
            )
            assert c.finish_reason in ("length", "abort")
    apart.engine.wait_idle()
    apart.engine.check_integrity()
    assert all(
        not list(s.sequences) for w in apart.engine.workers.values() for s in w.engine.schedulers
    )


def test_bad_requests_are_refused_by_name_and_long_prompts_end_at_once(apart):
    with pytest.raises(ValueError, match="token id 512 at position 0 is outside the vocabulary"):
        apart.generate([[512]], GREEDY, use_tqdm=False)
    long = apart.generate([[5] * 129, [5, 6]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in long] == ["prompt_length_exceeded", "length"]


def test_chat_and_stats_work_apart(apart):
    apart.generate([[5, 6]], GREEDY, use_tqdm=False)
    stats = apart.stats()
    assert (
        set(stats["engines"]) == {"PROMPT_0", "COMPLETION_0"}
        and stats["handoff"]["PROMPT_0"]["acked"] > 0
    )
    with pytest.raises(ValueError, match="chat template"):
        apart.chat([{"role": "user", "content": "t1"}])


def test_the_demo_model_apart():
    try:
        folder = resolve_model_path("demo")
    except ValueError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    small = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "num_blocks": 40,
        "max_num_batched_tokens": 32,
        "max_logprobs": 2,
    }
    small |= {
        "prefill_buckets": (32,),
        "decode_buckets": (4,),
        "chunked_prefill": True,
        "enable_prefix_caching": True,
        "warm_up": False,
    }
    long = (
        "Water boils at one hundred degrees, ice melts at zero, and gold melts at more than a"
        " thousand. " * 2
    )
    prompts = [
        "The capital of France is",
        long + "Iron melts at",
        long + "Lead melts at",
        "Once upon a time there was",
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, stop=["xyzzy"], logprobs=2)
    params = [
        greedy,
        greedy.replace(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(
            temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=12, ignore_eos=True
        ),
        greedy.replace(temperature=1.0, n=2),
    ]
    with LLM(str(folder), **small) as one, LLM(str(folder), disaggregate="1P:1D", **small) as two:
        first = assert_same(one, two, prompts, params)
        again = assert_same(one, two, prompts, params[:1] * 4)  # prefix hits
        assert [o.num_cached_tokens >= 32 for o in again] == [False, True, True, False]
        words = first[3].outputs[0].text.split()
        assert_same(one, two, prompts[3:], params[3].replace(stop=[" ".join(words[1:3])]))
    assert "Paris" in first[0].outputs[0].text


# ---- meshes --------------------------------------------------------------------------------------

PAIRS = [(1, 1), (2, 2), (2, 4), (4, 2), (4, 4)]
SMALL_MESH = ARGS | {"max_num_seqs": 2, "decode_buckets": (2,), "enable_prefix_caching": False}


def parallel(name: str, size: int) -> dict:
    return (
        {"expert_parallel_size": size}
        if name.startswith("deepseek")
        else {"data_parallel_size": size}
    )


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_any_pair_of_meshes_gives_the_reference_tokens(name, pair):
    golden = Golden(name)
    meshes = {"prompt_mesh": parallel(name, pair[0]), "completion_mesh": parallel(name, pair[1])}
    with LLM(golden.path, **SMALL_MESH, **meshes) as llm:
        outputs = llm.generate(golden.prompts * 2, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == golden.greedy * 2
        llm.engine.wait_idle()
        llm.engine.check_integrity()


@pytest.mark.parametrize(("prompt", "completion"), [(2, 1), (1, 2)])
def test_tensor_parallel_sizes_may_differ(prompt, completion):
    meshes = {
        "prompt_mesh": {"tensor_parallel_size": prompt},
        "completion_mesh": {"tensor_parallel_size": completion},
    }
    with LLM(LLAMA.path, **SMALL_MESH, **meshes) as llm:
        outputs = llm.generate(LLAMA.prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy


def test_several_engines_of_each_role_share_the_work(folder):
    with LLM(str(folder), disaggregate="2P:2D", **ARGS) as llm:
        outputs = llm.generate(LLAMA.prompts * 6, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 6
        llm.engine.wait_idle()
        llm.engine.check_integrity()
        acked = {name: counters["acked"] for name, counters in llm.stats()["handoff"].items()}
    assert min(acked.values()) > 0 and sum(acked.values()) == 48, acked


def test_nothing_compiles_after_warm_up():
    with LLM(
        LLAMA.path, disaggregate="1P:1D", **(ARGS | {"warm_up": True, "strict_compiles": True})
    ) as llm:
        outputs = llm.generate(LLAMA.prompts * 2, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 2
        engines = llm.stats()["engines"]
    assert all(e["compiles_after_warm_up"] == 0 for e in engines.values())


# ---- faults, with real engines -------------------------------------------------------------------


def test_a_layout_mismatch_is_refused_at_connect_with_both_values():
    with pytest.raises(
        LayoutMismatch, match="block_size: 4 on the prompt side, 8 on the completion side"
    ):
        LLM(LLAMA.path, completion_mesh={"block_size": 8}, **ARGS)
    with pytest.raises(
        LayoutMismatch,
        match="cache 'k' dtype: 'float32' on the prompt side, 'bfloat16' on the completion side",
    ):
        LLM(LLAMA.path, completion_mesh={"kv_cache_dtype": "bfloat16"}, **ARGS)
    with pytest.raises(
        LayoutMismatch,
        match="model: '[0-9a-f]+' on the prompt side, '[0-9a-f]+' on the completion side",
    ):
        LLM(
            LLAMA.path,
            completion_mesh={"model": str(GOLDEN / "llama_bias")},
            **(ARGS | {"load_format": "auto"}),
        )


def test_a_crash_of_one_prompt_engine_moves_its_work_to_the_other(folder):
    with LLM(str(folder), disaggregate="2P:1D", **ARGS) as llm:
        engine = llm.engine.prompt_engines[0]
        real, calls = engine.runner.dispatch_prefill, []

        def broken(*args, **kwargs):
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("device lost")
            return real(*args, **kwargs)

        engine.runner.dispatch_prefill = broken
        outputs = llm.generate(LLAMA.prompts * 4, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 4
        assert llm.stats()["failed"] == {"PROMPT_0": "PROMPT_0 crashed: RuntimeError: device lost"}
        llm.engine.wait_idle()
        alive = [llm.engine.workers[n].engine for n in ("PROMPT_1", "COMPLETION_0")]
        for e in alive:
            e.check_integrity()
            assert all(not list(s.sequences) for s in e.schedulers)


def test_a_crash_of_the_only_completion_engine_is_told_with_its_reason():
    with LLM(LLAMA.path, disaggregate="1P:1D", **ARGS) as llm:
        engine = llm.engine.completion_engines[0]
        engine.runner.dispatch_decode = lambda *a, **k: (_ for _ in ()).throw(
            RuntimeError("out of memory")
        )
        outputs = llm.generate(LLAMA.prompts, GREEDY, use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert (
                "COMPLETION_0 crashed: RuntimeError: out of memory" in output.outputs[0].stop_reason
            )
        with pytest.raises(
            RuntimeError, match="no completion engine is left: COMPLETION_0 crashed"
        ):
            llm.generate(LLAMA.prompts, GREEDY, use_tqdm=False)
        llm.engine.wait_idle()
        llm.engine.prompt_engines[0].check_integrity()


def test_a_stalled_engine_is_given_up_and_its_work_done_elsewhere(folder):
    settings = {"stall_timeout": 15.0, "handoff": HandoffConfig(timeout=20.0)}
    with LLM(str(folder), disaggregate="1P:2D", disaggregation=settings, **ARGS) as llm:
        llm.generate(LLAMA.prompts * 2, GREEDY, use_tqdm=False)  # compiled
        llm.engine.pd = type(llm.engine.pd)(**{**vars(llm.engine.pd), "stall_timeout": 0.5})
        hold, entered = threading.Event(), threading.Event()
        engine = llm.engine.completion_engines[0]
        real = engine.runner.dispatch_decode

        def stuck(*args, **kwargs):
            entered.set()
            hold.wait(60)
            return real(*args, **kwargs)

        engine.runner.dispatch_decode = stuck
        outputs = llm.generate(LLAMA.prompts * 3, GREEDY, use_tqdm=False)
        assert entered.is_set()
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 3
        assert llm.stats()["failed"] == {"COMPLETION_0": "COMPLETION_0: no progress for 0.5 s"}
        hold.set()


def test_a_full_completion_engine_holds_prompts_back():
    small = {
        "num_blocks": 34,
        "max_num_seqs": 2,
        "decode_buckets": (2,),
    }  # one long request at a time
    with LLM(LLAMA.path, completion_mesh=small, **ARGS) as llm:
        outputs = llm.generate(LLAMA.prompts * 3, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == LLAMA.greedy * 3
        llm.engine.wait_idle()
        llm.engine.check_integrity()


def test_impossible_deployments_are_refused():
    with pytest.raises(
        ValueError, match='disaggregate must look like "2P:1D", got "two"'.replace('"two"', "'two'")
    ):
        LLM(LLAMA.path, disaggregate="two", **ARGS)
    with pytest.raises(ValueError, match="need at least one engine of each role, got 0P:1D"):
        LLM(LLAMA.path, disaggregate="0P:1D", **ARGS)
    with pytest.raises(
        ValueError,
        match=r"2 x 4 \+ 1 x 4 devices needed for 2 prompt and 1 completion engines, 8 available",
    ):
        LLM(LLAMA.path, disaggregate="2P:1D", data_parallel_size=4, **ARGS)
    with (
        LLM(LLAMA.path, completion_mesh={"num_blocks": 10}, **ARGS) as llm,
        pytest.raises(ValueError, match="needs KV for 74 tokens"),
    ):
        llm.generate([[5] * 50], GREEDY, use_tqdm=False)
