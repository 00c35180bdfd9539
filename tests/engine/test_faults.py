"""An error of one request ends that request; the others get the tokens they would have got."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import GOLDEN
from jax.errors import JaxRuntimeError

from deepinfer_jax import EngineArgs, EngineType, LLMEngine, SamplingParams
from deepinfer_jax.engine import llm_engine
from deepinfer_jax.engine.faults import EngineStopped
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.sampling_params import RequestOutputKind
from deepinfer_jax.scheduler import Scheduler

STREAMED = SamplingParams(
    temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
)
BAD = STREAMED.replace(logprobs=2, prompt_logprobs=1, frequency_penalty=0.5)


def make(**changes) -> LLMEngine:
    args = EngineArgs(
        str(GOLDEN / "llama"),
        **{
            "max_model_len": 48,
            "max_num_seqs": 4,
            "num_blocks": 64,
            "max_num_batched_tokens": 64,
            "prefill_buckets": (64,),
            "decode_buckets": (4,),
            "warm_up": False,
            "disable_log_stats": True,
            "max_logprobs": 2,
        }
        | changes,
    )
    return LLMEngine(args)


@pytest.fixture(params=[True, False], ids=["zos", "plain"], scope="module")
def engine(request):
    engine = make(zero_overhead_scheduling=request.param)
    yield engine
    engine.close()


def run(engine: LLMEngine, bad: SamplingParams | None) -> dict[str, object]:
    """The last completion of every request."""
    done = {}
    engine.add_request("good", [5, 6, 7, 8], STREAMED)
    outputs = engine.step()
    if bad is not None:
        engine.add_request("bad", [1, 2, 3], bad)
    for _ in range(60):
        for output in outputs:
            if output.finished:
                done[output.request_id] = output.outputs
        if not engine.has_unfinished_requests():
            break
        outputs = engine.step()
    assert not engine.has_unfinished_requests() and engine.failure is None
    engine.check_integrity()
    assert all(s.cache_usage == 0 for s in engine.schedulers)
    return done


def once_bad(function, error: Exception, after: int = 0):
    """`function`, but for the request "bad", whose calls fail from the after-th on."""
    calls = []

    def wrapped(*args, **kwargs):
        c = args[0]
        request = c if isinstance(c, Request) else c.request
        if request.request_id == "bad" and request.params.logprobs is not None:
            calls.append(0)
            if len(calls) > after:
                raise error
        return function(*args, **kwargs)

    return wrapped


PLACES = {
    "filled": (llm_engine, "fill_sampling_row"),
    "stepped": (Completion, "add_logprobs"),
    "read": (Completion, "consume"),
    "watched": (Completion, "needs_every_step"),
    "prompt": (Request, "add_prompt_logprobs"),
    "delivered": (Request, "output"),
}


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_one_request_is_its_own(engine, monkeypatch, place, after):
    alone = run(engine, None)["good"][0]
    owner, name = PLACES[place]
    error = OverflowError("4294967296 does not fit")
    if after and place in ("filled", "prompt"):
        pytest.skip("happens once per request")
    failing = once_bad(getattr(owner, name), error, after)
    if place == "delivered":  # the error output itself must still be made
        original = getattr(owner, name)

        def failing(r: Request):
            if r.request_id == "bad" and r.completions[0].finish_reason != "error":
                raise error
            return original(r)

    monkeypatch.setattr(owner, name, failing)
    done = run(engine, BAD)
    assert done["good"][0].token_ids == alone.token_ids
    assert done["good"][0].finish_reason == "length"
    (bad,) = done["bad"]
    assert bad.finish_reason == "error" and "4294967296 does not fit" in bad.stop_reason


def test_a_completion_of_several_fails_alone(engine, monkeypatch):
    def consume(c: Completion, original=Completion.consume) -> bool:
        if c.request.request_id == "bad" and c.index == 1:
            raise ValueError("one of three")
        return original(c)

    monkeypatch.setattr(Completion, "consume", consume)
    done = run(engine, BAD.replace(n=3))["bad"]
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert done[0].token_ids == done[2].token_ids and len(done[0].token_ids) == 8


def test_a_request_that_cannot_be_queued_whole_leaves_nothing(engine, monkeypatch):
    added = []

    def add(scheduler, seq, original=Scheduler.add_request):
        added.append(seq)
        if len(added) == 2:
            raise ValueError("no more")
        original(scheduler, seq)

    monkeypatch.setattr(Scheduler, "add_request", add)
    with pytest.raises(ValueError, match="no more"):
        engine.add_request("half", [1, 2, 3], STREAMED.replace(n=3))
    monkeypatch.undo()
    assert not engine.is_active("half")
    assert run(engine, None)["good"][0].finish_reason == "length"


def test_n_has_a_limit(engine):
    with pytest.raises(ValueError, match=r"'many': n=1025 exceeds .*max_completions=1024"):
        engine.add_request("many", [1], STREAMED.replace(n=1025))


@pytest.mark.parametrize("error", [JaxRuntimeError("INTERNAL: device"), MemoryError()])
def test_what_is_nobodys_own_stops_the_engine_and_says_so(monkeypatch, error):
    engine = make()
    engine.add_request("one", [1, 2, 3], STREAMED)
    monkeypatch.setattr(engine.runner, "dispatch_prefill", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        engine.step()
    for call in (engine.step, lambda: engine.add_request("two", [1], STREAMED)):
        with pytest.raises(EngineStopped, match=type(error).__name__):
            call()
    assert engine.abort_request("one") == ["one"]
    engine.close()


def test_a_device_error_while_a_request_is_read_is_not_that_requests(monkeypatch):
    engine = make(engine_type=EngineType.NORMAL)
    engine.add_request("bad", [1, 2, 3], BAD)
    error = JaxRuntimeError("INTERNAL: device")
    monkeypatch.setattr(Completion, "consume", once_bad(Completion.consume, error))
    with pytest.raises(JaxRuntimeError):
        for _ in range(4):
            engine.step()
    engine.close()


def test_rows_of_a_failed_fill_are_neutral():
    from deepinfer_jax.engine.faults import neutral_row
    from deepinfer_jax.runner.decode_state import admit_layout

    layout = admit_layout(2, 4)
    row = np.full(layout.size, 7, np.int32)
    view = {name: layout.view(row, name) for name in layout.fields}
    neutral_row(view, 1)
    own = {"slots", "last_token", "num_tokens", "state_slots", "block_tables"}
    assert not any((view[n].view(np.int32)[1] == 7).any() for n in view.keys() - own)
    assert all((view[n][1] == 7).all() for n in own)
    assert view["top_p"][1] == 1.0 and view["temperature"][1] == 0.0
