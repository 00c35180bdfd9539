"""Several callers of one engine: each gets its own outputs, in order, whoever steps."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest
from engine_cases import GOLDEN

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.calls import Calls
from deepinfer_jax.outputs import CompletionOutput, RequestOutput


class CountingEngine:
    """Gives every live request its next number per step; a request ends with its last one."""

    def __init__(self, **lengths: int) -> None:
        self.left = dict(lengths)
        self.told: Counter[str] = Counter()
        self.inside = 0
        self.fail_at: int | None = None
        self.steps = 0

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.left)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[RequestOutput]:
        self.inside += 1
        assert self.inside == 1, "two threads step at once"
        self.steps += 1
        if self.steps == self.fail_at:
            self.inside -= 1
            raise RuntimeError("broken")
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            self.told[name] += 1
            c = CompletionOutput(0, "", [self.told[name]], None, None, None)
            outputs.append(RequestOutput(name, None, [], None, [c], not self.left[name]))
            if not self.left[name]:
                del self.left[name]
        self.inside -= 1
        return outputs


def numbers(outputs) -> list[int]:
    return [o.outputs[0].token_ids[0] for o in outputs]


def test_interleaved_iterators_get_their_own_outputs_in_order():
    calls = Calls(CountingEngine(a=3, b=5, c=4))
    boxes = {name: calls.open([name]) for name in "abc"}
    streams = [calls.outputs([name], boxes[name]) for name in "abc"]
    rows = list(itertools.zip_longest(*streams))
    for stream, length in zip(zip(*rows, strict=True), (3, 5, 4), strict=True):
        assert numbers(o for o in stream if o) == list(range(1, length + 1))


def test_threads_get_their_own_outputs_and_step_one_at_a_time():
    lengths = {f"r{i}": 20 + 7 * i for i in range(8)}
    calls = Calls(CountingEngine(**lengths))
    boxes = {name: calls.open([name]) for name in lengths}
    got: dict[str, list[int]] = {}

    def run(name: str) -> None:
        got[name] = numbers(calls.outputs([name], boxes[name]))

    threads = [threading.Thread(target=run, args=(name,)) for name in lengths]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()
    assert got == {name: list(range(1, n + 1)) for name, n in lengths.items()}


def test_outputs_of_a_closed_call_are_dropped():
    calls = Calls(CountingEngine(a=2, b=2))
    box_a, box_b = calls.open(["a"]), calls.open(["b"])
    calls.close(["a"])
    assert numbers(calls.outputs(["b"], box_b)) == [1, 2] and not box_a


def test_an_error_of_a_step_reaches_whoever_steps_and_leaves_the_others_going():
    engine = CountingEngine(a=3, b=3)
    engine.fail_at = 2
    calls = Calls(engine)
    a, b = (calls.outputs([name], calls.open([name])) for name in "ab")
    assert numbers([next(a)]) == [1]
    with pytest.raises(RuntimeError, match="broken"):
        next(a)
    assert numbers(b) == [1, 2, 3]


def test_calls_of_one_llm_overlap():
    greedy = {n: SamplingParams(max_tokens=n, temperature=0.0) for n in (4, 12)}
    prompts = {"a": [5, 6, 7], "b": [1, 2, 3]}
    with LLM(str(GOLDEN / "llama"), max_model_len=64, num_blocks=64, max_num_seqs=8) as llm:

        def generate(name: str, count: int = 12) -> list[int]:
            out = llm.generate(
                prompt_token_ids=[prompts[name]], sampling_params=greedy[count], use_tqdm=False
            )
            return out[0].outputs[0].token_ids

        def stream(name: str):
            for o in llm.stream(prompt_token_ids=[prompts[name]], sampling_params=greedy[12]):
                yield from o.outputs[0].token_ids

        want = {name: generate(name) for name in prompts}
        rows = list(itertools.zip_longest(stream("a"), stream("b")))
        assert [list(r) for r in zip(*rows, strict=True)] == [want["a"], want["b"]]

        open_stream = stream("a")
        first = next(open_stream)
        assert generate("b", 4) == want["b"][:4]
        assert [first, *open_stream] == want["a"]

        got: dict[str, list[int]] = {}
        threads = [
            threading.Thread(target=lambda n=n: got.update({n: generate(n)})) for n in prompts
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert got == want
        assert llm.engine.num_unfinished_requests == 0
        llm.engine.check_integrity()
