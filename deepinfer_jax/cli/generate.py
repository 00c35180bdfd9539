"""Complete prompts given on the command line or in a file.

A chat model gets each prompt as a user's message in its chat template; --raw gives it the text as
it stands. Text goes to stdout or to --output; progress and speed go to stderr.

  deepinfer-jax generate --model demo --prompt "What is the capital of France?"
  deepinfer-jax generate --model demo --input questions.txt --output answers.jsonl --max-tokens 64
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from deepinfer_jax.cli import common
from deepinfer_jax.cli.prompts import Prompt, read_prompts, write_results
from deepinfer_jax.cli.speed import Stopwatch
from deepinfer_jax.flags import add_model_flag
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.outputs import CompletionOutput, RequestOutput

DEFAULTS = {"max_tokens": 128, "temperature": 0.0}
"""Unlike the library's 16 tokens at temperature 1: an answer of useful length, the same one each
time."""

_OUTPUT_SUFFIXES = (".txt", ".jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times"
    )
    source.add_argument(
        "--input",
        metavar="FILE",
        help="prompts from FILE: .txt, one per line, or .jsonl, one object per line",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write one line per prompt to FILE: .txt (line breaks as \\n) or .jsonl",
    )
    parser.add_argument(
        "--json", action="store_true", help="print results on stdout as .jsonl does"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="progress bar (default: where stderr is a terminal)",
    )
    common.add_sampling_flags(parser, DEFAULTS)
    common.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    prompts = (
        read_prompts(args.input)
        if args.input
        else [Prompt(f"prompt {i}", text=t) for i, t in enumerate(args.prompt, 1)]
    )
    params = [_sampling_params(args, p) for p in prompts]
    with _open_output(args.output) as stream, common.build_llm(args) as llm:
        tokenizer = llm.get_tokenizer()
        chat = not args.raw and tokenizer is not None and tokenizer.has_chat_template
        token_ids = [p.tokenize(tokenizer, chat=chat, system=args.system) for p in prompts]
        if tokenizer is not None and _can_stream(args, params):
            _stream_one(llm, prompts[0], token_ids[0], params[0])
            return 0
        outputs = _generate(args, llm, token_ids, params)
        _report_failures(prompts, [o.outputs[0] for o in outputs])
        if args.output or args.json:
            write_results(
                stream, prompts, outputs, as_json=args.json or args.output.endswith(".jsonl")
            )
        else:
            _print_answers(prompts, outputs, as_text=tokenizer is not None)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.output and Path(args.output).suffix not in _OUTPUT_SUFFIXES:
        raise ValueError(
            f"--output must end in {' or '.join(_OUTPUT_SUFFIXES)}, got {args.output!r}"
        )
    if args.system is not None and args.raw:
        raise ValueError("--system is part of the chat template, which --raw leaves out")


def _sampling_params(args: argparse.Namespace, prompt: Prompt) -> SamplingParams:
    try:
        values = {
            **common.sampling_values(args, DEFAULTS),
            **prompt.sampling,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        return SamplingParams.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{prompt.source}: {error}" if prompt.sampling else str(error)) from error


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    """The output file, opened before the model loads so that a path that cannot be written is known
    at once."""
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as stream:
        yield stream


def _can_stream(args: argparse.Namespace, params: Sequence[SamplingParams]) -> bool:
    """A single completion on a terminal is shown as it is generated."""
    return (
        len(params) == 1
        and params[0].n == 1
        and sys.stdout.isatty()
        and not (args.output or args.json)
    )


def _stream_one(llm: LLM, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> None:
    params = params.replace(output_kind=RequestOutputKind.DELTA)
    with Stopwatch() as watch:
        last, tokens = common.show_stream(
            llm.stream(prompt_token_ids=token_ids, sampling_params=params), _write_now
        )
    print()
    _report_failures([prompt], [last])
    print(watch.report(1, tokens), file=sys.stderr)


def _report_failures(prompts: Sequence[Prompt], completions: Sequence[CompletionOutput]) -> None:
    """One line on stderr per prompt that was not answered; the others' results stand."""
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.finish_reason not in (None, "stop", "length"):
            print(f"{prompt.source}: not completed: {completion.finish_reason}", file=sys.stderr)


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _generate(
    args: argparse.Namespace, llm: LLM, token_ids: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    progress = sys.stderr.isatty() if args.progress is None else args.progress
    with Stopwatch() as watch:
        outputs = llm.generate(
            prompt_token_ids=token_ids, sampling_params=params, use_tqdm=progress
        )
    print(
        watch.report(len(outputs), sum(len(c.token_ids) for o in outputs for c in o.outputs)),
        file=sys.stderr,
    )
    return outputs


def _print_answers(
    prompts: Sequence[Prompt], outputs: Sequence[RequestOutput], *, as_text: bool
) -> None:
    """Answers on stdout; each under its prompt where there are several. Without a tokenizer: token
    ids."""
    several = len(prompts) > 1 or len(outputs[0].outputs) > 1
    for prompt, output in zip(prompts, outputs, strict=True):
        if several:
            print(f">>> {_title(prompt)}")
        for completion in output.outputs:
            print(completion.text if as_text else " ".join(map(str, completion.token_ids)))
        if several:
            print()


def _title(prompt: Prompt) -> str:
    text = (
        prompt.text
        or (str(prompt.messages[-1].get("content", "")) if prompt.messages else "")
        or prompt.source
    )
    return " ".join(text.split())
