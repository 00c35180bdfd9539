"""How one request samples: `SamplingParams`, checked once, at construction.

Imports: nothing of ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean greedy decoding (dividing logits by them would overflow)."""

MAX_LOGPROBS = 1000
"""The most log-probabilities per token that a request may ask for."""

MAX_COMPLETIONS = 16384
"""The largest n; engines and routers have lower limits of their own."""

MAX_INT32 = 2**31 - 1
"""Token counts and ids are 32-bit integers on the device."""

MAX_PRIORITY = 2**53
"""Magnitude of a priority: what every message format carries exactly."""

SMALLEST_PROBABILITY = 1e-30
"""Positive limits (top_p) stay above this: smaller ones would be 0 as a float32."""

MAX_TEMPERATURE = 1e30
MAX_LOGIT_BIAS = 1e9
REPETITION_PENALTIES = (1e-6, 1e6)
"""Bounds that keep logit + bias, times or divided by a penalty, finite as a float32."""

MAX_STOP_STRINGS = 1024
MAX_STOP_TOKENS = 65536
MAX_TEXT = 65536
"""Characters of a stop string, a user id or a cache salt."""


class RequestOutputKind(enum.Enum):
    """What each RequestOutput of a request holds."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the previous output
    FINAL_ONLY = 2  # one output, when the request has finished


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request. The names are those vLLM users know; every field is checked
    at construction.

    Order of operations: `logit_bias`, the ban of `min_tokens`, repetition, presence and frequency
    penalties, then (unless greedy) temperature, `min_p`, `top_k`, `top_p`, and one draw per
    generated token from a counter-based generator keyed by (seed, position).

    Raises ValueError that names the field, the value and the limit.
    """

    n: int = 1
    """Completions per prompt, 1 .. 16384 (an engine's own limit is EngineArgs.max_completions)."""
    temperature: float = 1.0
    """In [0, 1e30]; below 1e-5 the most probable token is taken (greedy)."""
    top_p: float = 1.0
    """In [1e-30, 1]: keep the most probable tokens whose mass reaches top_p."""
    top_k: int = -1
    """Keep the k most probable tokens; -1, 0 and everything from the vocabulary's size on keep all.
    """
    min_p: float = 0.0
    """In [0, 1]: drop tokens less probable than min_p times the most probable one."""
    repetition_penalty: float = 1.0
    """In [1e-6, 1e6]; above 1 makes tokens of the prompt and of the output less probable (logit /
    penalty, or * penalty if negative)."""
    presence_penalty: float = 0.0
    """In [-2, 2]: subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """In [-2, 2]: subtracted from the logit of a generated token, times its count."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> value in [-1e9, 1e9] added to its logit."""
    seed: int | None = None
    """64-bit seed of this request's draws; None: the engine draws one."""
    max_tokens: int | None = 16
    """The most tokens to generate. 0 is taken as 1; None: up to the engine's max_model_len."""
    min_tokens: int = 0
    """EOS and stop tokens cannot be sampled, and stop strings do not count, until so many tokens
    are generated."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request when generated. Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the request when generated, beside the model's EOS ids. Kept as a tuple.
    """
    ignore_eos: bool = False
    """Go on after an EOS token (stop_token_ids still count)."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted so that scripts port. The decoders of tokenizer.json never put spaces between
    special tokens."""
    logprobs: int | None = None
    """Log-probabilities per generated token: the N most probable and the sampled one (0: only the
    sampled one)."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    detokenize: bool = True
    """False: return token ids only; `text` stays empty."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of `LLMEngine.step` holds for this request."""
    priority: int = 0
    """Smaller runs first where the scheduling policy looks at priority."""
    user_id: str = ""
    """Whom the request counts for where the scheduling policy shares fairly between users."""
    cache_salt: str = ""
    """Only requests with equal salts share prefix-cache blocks."""
    top_logprobs: int | None = None
    """Alias of `logprobs` (0 here: none); None again after construction."""
    seq_seed: int | None = None
    """Alias of `seed`; None again after construction."""
    first_n_token_no_eos: int | None = None
    """Alias of `min_tokens`; None again after construction."""

    def __post_init__(self) -> None:
        self._resolve_aliases()
        self._normalise()
        self._check_numbers()
        self._check_lengths()
        self._check_rest()

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken and nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True where logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def child(self, index: int) -> Self:
        """Parameters of completion `index` (0-based) of `n`: n=1 and, where a seed is given, its
        own seed."""
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return self.replace(n=1, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes back."""
        values = dataclasses.asdict(self)
        values["output_kind"] = self.output_kind.name
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parameters from a mapping such as one line of a JSONL file; an unknown name raises
        ValueError."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                raise ValueError(
                    f"unknown sampling parameter {name!r}"
                    + (f"; did you mean {close[0]!r}?" if close else "")
                )
        values = dict(values)
        if isinstance(values.get("logit_bias"), Mapping):  # JSON keys are strings
            values["logit_bias"] = {
                _int_from_text("logit_bias key", k): v for k, v in values["logit_bias"].items()
            }
        if isinstance(values.get("output_kind"), str):
            values["output_kind"] = _output_kind(values["output_kind"])
        return cls(**values)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _resolve_aliases(self) -> None:
        if self.top_logprobs is not None:
            _check_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            self._take_alias(
                "top_logprobs", "logprobs", self.top_logprobs or self.logprobs, unset=None
            )
        if self.seq_seed is not None:
            self._take_alias("seq_seed", "seed", self.seq_seed, unset=None)
        if self.first_n_token_no_eos is not None:
            _check_int("first_n_token_no_eos", self.first_n_token_no_eos, 0, MAX_INT32)
            self._take_alias(
                "first_n_token_no_eos",
                "min_tokens",
                self.first_n_token_no_eos or self.min_tokens,
                unset=0,
            )

    def _take_alias(self, alias: str, name: str, value: Any, *, unset: Any) -> None:
        current = getattr(self, name)
        if current != unset and current != value:
            raise ValueError(
                f"{alias}={getattr(self, alias)!r} is an alias of {name}, which is given as"
                f" {current!r}"
            )
        self._set(name, value)
        self._set(alias, None)

    def _normalise(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):  # the reference's prompt_logprobs is a switch
                self._set(name, 1 if value else None)
        stop = self.stop
        self._set(
            "stop",
            () if stop is None else (stop,) if isinstance(stop, str) else _as_tuple("stop", stop),
        )
        self._set("stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
                )
            self._set("logit_bias", dict(self.logit_bias) or None)
        _check_int("top_k", self.top_k, -1)
        if not 0 < self.top_k <= MAX_INT32:  # no vocabulary is larger: both mean all tokens
            self._set("top_k", -1)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_COMPLETIONS)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, SMALLEST_PROBABILITY, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias key", token, 0, MAX_INT32)
            _check_number(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)

    def _check_lengths(self) -> None:
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.max_tokens is None:
            return
        _check_int("max_tokens", self.max_tokens, 0, MAX_INT32)
        if self.max_tokens == 0:
            self._set("max_tokens", 1)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )

    def _check_rest(self) -> None:
        assert self.stop is not None and self.stop_token_ids is not None  # tuples by now
        _check_count("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
            _check_text("a stop string", text)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids entry", token, 0, MAX_INT32)
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={list(self.stop)!r} needs detokenize=True: stop strings are looked for in"
                " the text"
            )
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("user_id", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
            _check_text(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")


def _limits(low: float | None, high: float | None) -> str:
    parts = []
    if low is not None:
        parts.append(f">= {low}")
    if high is not None:
        parts.append(f"<= {high}")
    return " and ".join(parts)


def _check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    """Refuses bool and everything that is not an integer (NumPy integers pass)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} must be {_limits(low, high)}, got {value}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # an array, or an integer beyond any float
        raise ValueError(f"{name} must be a number in [{low}, {high}]") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be {_limits(low, high)}, got {value}")


def _check_count(name: str, values: Sequence[Any], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} must have at most {most} entries, got {len(values)}")


def _check_text(name: str, text: str) -> None:
    """Text that any process can encode and that fits into a message."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name} must have at most {MAX_TEXT} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be valid Unicode, got {text!r}") from None


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _int_from_text(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def _output_kind(name: str) -> RequestOutputKind:
    try:
        return RequestOutputKind[name.upper()]
    except KeyError:
        raise ValueError(
            f"output_kind must be one of {[k.name for k in RequestOutputKind]}, got {name!r}"
        ) from None
