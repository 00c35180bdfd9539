"""Text of a request as its tokens arrive: decoding, stop strings, and what of it may be shown
already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from deepinfer_jax.text.stop_strings import StopMatcher
from deepinfer_jax.text.token_decoder import make_token_decoder, token_text

if TYPE_CHECKING:
    from deepinfer_jax.sampling_params import SamplingParams
    from deepinfer_jax.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "token_text"]


class IncrementalDetokenizer:
    """Turns a request's generated tokens into text, in time linear in their number.

    `push` returns text that is final: an incomplete UTF-8 character and an end of the text that may
    begin a stop string are held back until they are decided; `finish` releases them. Text of the
    prompt never appears.

    Attributes: text: everything returned so far. num_tokens: tokens taken; after a stop string, up
      to and including the token that completed it (so that a step that
        brought more tokens can be cut there).
      stop_reason: the stop string found, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "stop": list(stop),
            "include_stop_str_in_output": include_stop_str_in_output,
            "min_tokens": min_tokens,
        }
        self._decoder = make_token_decoder(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._taken = 0  # entries of _parts that take_text has returned
        self._finished = False
        self.num_tokens = 0

    @classmethod
    def for_request(
        cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Self:
        """The detokenizer that a request's sampling parameters ask for."""
        return cls(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop or (),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stop_reason(self) -> str | None:
        return self._matcher.matched

    def take_text(self) -> str:
        """What was released since the previous call: the text of a DELTA output, without copying
        all that came before."""
        text = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return text

    def push(self, token_ids: Sequence[int], *, last_is_stop_token: bool = False) -> str:
        """Adds generated tokens and returns the text they release ("" after a stop string).

        last_is_stop_token: the last one is the EOS or stop token that ended the request; it is
        counted, but its text is left out unless include_stop_str_in_output.
        """
        released = []
        for i, token_id in enumerate(token_ids):
            if self._matcher.matched is not None:
                break
            self.num_tokens += 1
            if (
                last_is_stop_token
                and i == len(token_ids) - 1
                and not self._options["include_stop_str_in_output"]
            ):
                break
            text = self._decoder.feed(int(token_id))
            if text:
                released.append(
                    self._matcher.feed(text, may_stop=self.num_tokens >= self._min_tokens)
                )
        return self._release("".join(released))

    def finish(self) -> str:
        """Ends the text: returns what was held back, an incomplete character as U+FFFD. Further
        calls return ""."""
        if self._finished:
            return ""
        self._finished = True
        tail = self._matcher.feed(
            self._decoder.finish(), may_stop=self.num_tokens >= self._min_tokens
        )
        return self._release(tail + self._matcher.flush())

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on elsewhere, as plain values (JSON or msgpack can carry it)."""
        return {
            "options": self._options,
            "decoder": self._decoder.state_dict(),
            "matcher": self._matcher.state_dict(),
            "num_tokens": self.num_tokens,
            "finished": self._finished,
            "text": self.text,
            "taken": sum(map(len, self._parts[: self._taken])),
        }

    @classmethod
    def from_state_dict(cls, tokenizer: Tokenizer, state: Mapping[str, Any]) -> Self:
        """A detokenizer that goes on where `state_dict` was taken; the tokenizer must be the same
        model's."""
        self = cls(tokenizer, **state["options"])
        self._decoder.load_state_dict(state["decoder"])
        self._matcher.load_state_dict(state["matcher"])
        self.num_tokens = state["num_tokens"]
        self._finished = state["finished"]
        self._parts = [state["text"][: state["taken"]], state["text"][state["taken"] :]]
        self._taken = 1
        return self

    def _release(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
