"""Talk to a chat model in the terminal.

/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops the answer that is being
written.

  deepinfer-jax chat --model demo
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from deepinfer_jax.cli import common
from deepinfer_jax.flags import add_model_flag
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM

DEFAULTS = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.95}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    common.add_sampling_flags(parser, DEFAULTS)
    common.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams.from_dict(
        {**common.sampling_values(args, DEFAULTS), "output_kind": RequestOutputKind.DELTA}
    )
    if params.n != 1:
        raise ValueError(f"--n must be 1 in a conversation, got {params.n}")
    with common.build_llm(args) as llm:
        if llm.get_tokenizer() is None or not llm.get_tokenizer().has_chat_template:
            raise ValueError(f"{args.model} has no chat template; use `generate` with it")
        Conversation(llm, params, args.system).loop()
    return 0


class Conversation:
    """The messages so far and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)
        self._interactive = sys.stdin.isatty()

    def loop(self) -> None:
        """Reads turns from stdin (a terminal, or one per line) until its end or /exit."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (importing it gives input() line editing)
            print("/reset forgets the conversation, /exit leaves.", file=sys.stderr)
        while (line := self._read()) is not None:
            if line == "/reset":
                self.messages = list(self._start)
            elif line == "/exit":
                return
            elif line:
                self.turn(line)

    def turn(self, text: str) -> None:
        """One question and its answer; a refused question (too long, say) is reported
        and left out."""
        question = {"role": "user", "content": text}
        shown: list[str] = []
        try:
            ids = self._llm.get_tokenizer().apply_chat_template([*self.messages, question])
            outputs = self._llm.stream(prompt_token_ids=ids, sampling_params=self._params)
            with contextlib.closing(outputs):  # Ctrl-C: closing the stream aborts its request
                last, _ = common.show_stream(outputs, lambda part: _show(part, shown))
            if last.finish_reason == "prompt_length_exceeded":
                raise ValueError(
                    "the conversation is longer than the engine's max_model_len; /reset starts a"
                    " new one"
                )
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
        print()
        self.messages += [question, {"role": "assistant", "content": "".join(shown)}]

    def _read(self) -> str | None:
        try:
            return input("> " if self._interactive else "").strip()
        except EOFError:
            return None


def _show(text: str, shown: list[str]) -> None:
    shown.append(text)
    sys.stdout.write(text)
    sys.stdout.flush()
