"""Which errors are one request's own affair, and what becomes of a row that could not be filled."""

from __future__ import annotations

import numpy as np
from jax.errors import JaxRuntimeError


class EngineStopped(RuntimeError):
    """The engine has stopped after an error that is no single request's; the message says which."""


def is_requests_own(error: Exception) -> bool:
    """Whether an error met while one request was dealt with is that request's. A failing device and
    exhausted memory are not: what they have left behind is unknown."""
    return not isinstance(error, JaxRuntimeError | MemoryError)


def reason_of(error: Exception) -> str:
    """What the request's caller is told."""
    return f"{type(error).__name__}: {error}"


def neutral_row(view: dict[str, np.ndarray], row: int) -> None:
    """Makes row `row` of the admit fields a greedy one with everything else off, whatever has been
    written of it. Identity and block table stay."""
    for name in _ZERO:
        view[name][row] = 0
    for name in _ONE:
        view[name][row] = 1
    for name in _NONE:
        view[name][row] = -1


_ZERO = (
    "temperature",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_len",
    "bias_vals",
    "prompt_len",
)
_ONE = ("top_p", "repetition_penalty")
_NONE = ("eos_ids", "bias_ids", "num_logprobs")
