"""What a request returns. Field names are those vLLM users know, so that their scripts port.

Imports: nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    """Natural logarithm of the model's probability, before temperature, penalties and filters."""
    rank: int | None = None
    """1-based rank in the vocabulary (1: the most probable)."""
    decoded_token: str | None = None
    """The token's own text; None without a tokenizer."""


LogprobDict = dict[int, Logprob]
"""Token id -> Logprob: the sampled (or prompt) token and the N most probable ones, at one position.
"""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.time()`, and its counters. None: not
    reached yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    """Seconds from arrival to the first step that held the request."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between generated tokens after the first; None with fewer than two."""
        if (
            self.first_token_time is None
            or self.last_token_time is None
            or self.num_generation_tokens < 2
        ):
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request (or its newest part, with
    RequestOutputKind.DELTA)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' log-probabilities; None unless `logprobs` was asked for."""
    logprobs: list[LogprobDict] | None = None
    """One dictionary per entry of token_ids; None unless `logprobs` was asked for."""
    finish_reason: str | None = None
    """None while running; "stop", "length", "abort", "prompt_length_exceeded",
    "insufficient_system_resource" (preempted and not recomputed), or "error": the request failed,
    `stop_reason` says how, and what text there was is not to be relied on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, what went wrong with "error"; None for EOS
    and for every other reason."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of one request after a step: the whole of it, or what is new, as its `output_kind`
    says."""

    request_id: str
    prompt: str | None
    """The prompt's text; None where the request was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None = None
    """One entry per prompt token, the first one None; None unless `prompt_logprobs` was asked for.
    """
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    """True once every completion has finished."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
