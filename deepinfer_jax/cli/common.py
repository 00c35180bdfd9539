"""What `generate` and `chat` share: their flags, building the LLM, showing a stream."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.flags import add_dataclass_flags, dataclass_values
from deepinfer_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.outputs import CompletionOutput, RequestOutput

# Set by the commands themselves, or of no use without a scheduler between several clients.
_OWN_SAMPLING_FLAGS = (
    "output_kind",
    "detokenize",
    "user_id",
    "cache_salt",
    "priority",
    "top_logprobs",
    "seq_seed",
    "first_n_token_no_eos",
)


# `--seed` is each request's seed here, which fixes the result by itself.
_OWN_ENGINE_FLAGS = ("model", "seed")


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    add_dataclass_flags(
        parser, SamplingParams, "sampling", skip=_OWN_SAMPLING_FLAGS, defaults=defaults
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    from deepinfer_jax.llm import LLM

    defaults = {
        p.name: p.default
        for p in inspect.signature(LLM).parameters.values()
        if p.default not in (inspect.Parameter.empty, None)
    }
    add_dataclass_flags(parser, EngineArgs, "engine", skip=_OWN_ENGINE_FLAGS, defaults=defaults)


def sampling_values(args: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by name: the command's defaults and the flags given."""
    return {
        k: v
        for k, v in dataclass_values(args, SamplingParams, defaults).items()
        if k not in _OWN_SAMPLING_FLAGS
    }


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """EngineArgs by name, without `model`: the flags given."""
    return {
        k: v for k, v in dataclass_values(args, EngineArgs).items() if k not in _OWN_ENGINE_FLAGS
    }


def build_llm(args: argparse.Namespace, **overrides: Any) -> LLM:
    """The LLM that the engine flags describe."""
    from deepinfer_jax.llm import LLM

    return LLM(args.model, **{**engine_values(args), **overrides})


def show_stream(
    outputs: Iterable[RequestOutput], write: Callable[[str], object]
) -> tuple[CompletionOutput, int]:
    """Writes the text of a request's increments as they come; returns the last increment and the
    number of tokens."""
    tokens = 0
    for output in outputs:
        last = output.outputs[0]
        tokens += len(last.token_ids)
        write(last.text)
    return last, tokens
