"""An LLM that answers by a rule, for tests of the commands."""

from __future__ import annotations

from types import SimpleNamespace

import tiny_tokenizers as tiny

from deepinfer_jax.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.text.tokenizer import Tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class FakeLLM:
    """Answers every prompt with its text in capitals, and notes the calls."""

    def __init__(self, *, chat: bool = True, tokenizer: bool = True) -> None:
        self._tokenizer = (
            Tokenizer(tiny.byte_level(), chat_templates={"default": CHAT} if chat else None)
            if tokenizer
            else None
        )
        self.calls: list[SimpleNamespace] = []
        self.closed = False
        self.reason = "length"
        self.stops_before: int | None = None
        self.stops_with: BaseException = KeyboardInterrupt()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True

    def get_tokenizer(self):
        return self._tokenizer

    def generate_as_finished(self, *, prompt_token_ids, sampling_params):
        self.calls.append(SimpleNamespace(ids=prompt_token_ids, params=sampling_params))
        return self._finished(prompt_token_ids, sampling_params)

    def _finished(self, ids, params):
        """The last prompt first."""
        for i in reversed(range(len(ids))):
            if self.stops_before == i:
                raise self.stops_with
            yield self._answer(i, ids[i], params[i].n)

    def stream(self, *, prompt_token_ids, sampling_params):
        self.calls.append(SimpleNamespace(ids=[prompt_token_ids], params=[sampling_params]))
        answer = self._answer(0, prompt_token_ids, 1).outputs[0]
        for char, token in zip(answer.text, answer.token_ids, strict=True):
            if char == "!":
                raise KeyboardInterrupt
            yield RequestOutput(
                "r", None, prompt_token_ids, outputs=[CompletionOutput(0, char, [token])]
            )
        yield RequestOutput(
            "r",
            None,
            prompt_token_ids,
            outputs=[CompletionOutput(0, "", [], finish_reason=self.reason)],
            finished=True,
        )

    def _answer(self, index, ids, n):
        text = self._tokenizer.decode(ids).upper() if self._tokenizer else ""
        outputs = [
            CompletionOutput(k, text, list(ids), finish_reason=self.reason) for k in range(n)
        ]
        return RequestOutput(str(index), None, list(ids), outputs=outputs, finished=True)

    def prompts(self, call=0) -> list[str]:
        return [self._tokenizer.decode(ids) for ids in self.calls[call].ids]
