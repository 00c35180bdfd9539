"""Complete prompts given on the command line or in a file.

A chat model gets each prompt as a user's message in its chat template; --raw gives it the text as
it stands. Text goes to stdout or to --output; progress and speed go to stderr.

  deepinfer-jax generate --model demo --prompt "What is the capital of France?"
  deepinfer-jax generate --model demo --input questions.txt --output answers.jsonl --max-tokens 64
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from deepinfer_jax import json_text
from deepinfer_jax.cli import common
from deepinfer_jax.cli.prompts import Prompt, read_prompts
from deepinfer_jax.cli.results import SUFFIXES, OrderedStream, Results, open_results, result_line
from deepinfer_jax.cli.speed import Stopwatch
from deepinfer_jax.flags import add_model_flag
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.outputs import CompletionOutput, RequestOutput

DEFAULTS = {"max_tokens": 128, "temperature": 0.0}
"""Unlike the library's 16 tokens at temperature 1: an answer of useful length, the same one each
time."""


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
        help="write one line per prompt to FILE: .txt (line breaks as \\n) or .jsonl; an older"
        " FILE is replaced when all is done",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what the .jsonl output of an earlier run holds, and run the other prompts only",
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
    with _results(args, prompts) as (results, done):
        left = [i for i in range(len(prompts)) if i not in done]
        if left:
            _run(args, results, prompts, params, left)
    return 0


def _run(
    args: argparse.Namespace,
    results: Results,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    left: Sequence[int],
) -> None:
    """Completes the prompts with the indices `left`."""
    with common.build_llm(args) as llm:
        tokenizer = llm.get_tokenizer()
        chat = not args.raw and tokenizer is not None and tokenizer.has_chat_template
        ids = {i: prompts[i].tokenize(tokenizer, chat=chat, system=args.system) for i in left}
        if tokenizer is not None and _can_stream(args, params):
            _stream_one(llm, prompts[0], ids[0], params[0])
            return
        as_json = args.json or (args.output is not None and args.output.endswith(".jsonl"))
        with Stopwatch() as watch:
            count = tokens = 0
            for i, output in _outputs(args, llm, prompts, params, ids):
                if args.output or args.json:
                    line = result_line(i, prompts[i], output, as_json=as_json)
                else:
                    line = _answers(prompts, i, output, as_text=tokenizer is not None)
                results.add(i, line)
                _report_failure(prompts[i], output.outputs[0])
                count += 1
                tokens += sum(len(c.token_ids) for c in output.outputs)
        print(watch.report(count, tokens), file=sys.stderr)


def _check(args: argparse.Namespace) -> None:
    if args.output and Path(args.output).suffix not in SUFFIXES:
        raise ValueError(f"--output must end in {' or '.join(SUFFIXES)}, got {args.output!r}")
    if args.output and args.input and os.path.realpath(args.output) == os.path.realpath(args.input):
        raise ValueError(f"--output {args.output} is the input file itself")
    if args.resume and not (args.output and args.output.endswith(".jsonl")):
        raise ValueError("--resume continues an --output file that ends in .jsonl")
    if args.system is not None and args.raw:
        raise ValueError("--system is part of the chat template, which --raw leaves out")
    given = {f"prompt {i}": text for i, text in enumerate(args.prompt or (), 1)}
    for name, text in {**given, "--system": args.system or ""}.items():
        try:
            json_text.check_text(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _sampling_params(args: argparse.Namespace, prompt: Prompt) -> SamplingParams:
    try:
        values = {
            **common.sampling_values(args, DEFAULTS),
            **prompt.sampling,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        return SamplingParams.from_dict(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{prompt.source}: {error}" if prompt.sampling else str(error)) from error


@contextmanager
def _results(
    args: argparse.Namespace, prompts: Sequence[Prompt]
) -> Iterator[tuple[Results, set[int]]]:
    """Where results go, and the indices of prompts that have theirs."""
    if args.output:
        tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
        with open_results(args.output, prompts, resume=args.resume, say=tell) as opened:
            yield opened
        return
    ordered = OrderedStream(sys.stdout)
    try:
        yield ordered, set()
    finally:
        ordered.close()


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
    _report_failure(prompt, last)
    print(watch.report(1, tokens), file=sys.stderr)


def _report_failure(prompt: Prompt, completion: CompletionOutput) -> None:
    """One line on stderr for a prompt that was not answered; the others' results stand."""
    if completion.finish_reason not in (None, "stop", "length"):
        print(f"{prompt.source}: not completed: {completion.finish_reason}", file=sys.stderr)


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _outputs(
    args: argparse.Namespace,
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    ids: Mapping[int, list[int]],
) -> Iterator[tuple[int, RequestOutput]]:
    """(index of the prompt, output) as the requests finish. A refused request is named by the line
    it comes from, before anything runs."""
    from deepinfer_jax.llm import InvalidPrompt

    order = list(ids)
    try:
        outputs = llm.generate_as_finished(
            prompt_token_ids=[ids[i] for i in order], sampling_params=[params[i] for i in order]
        )
    except InvalidPrompt as error:
        raise ValueError(f"{prompts[order[error.index]].source}: {error}") from error
    show = sys.stderr.isatty() if args.progress is None else args.progress
    with tqdm(total=len(order), disable=not show, unit="req", dynamic_ncols=True) as bar:
        for output in outputs:
            yield order[int(output.request_id)], output
            bar.update()


def _answers(prompts: Sequence[Prompt], index: int, output: RequestOutput, *, as_text: bool) -> str:
    """Answers for people, under their prompt where there are several. Without a tokenizer: token
    ids."""
    texts = [c.text if as_text else " ".join(map(str, c.token_ids)) for c in output.outputs]
    if len(prompts) == 1 and len(texts) == 1:
        return texts[0]
    return "\n".join([f">>> {_title(prompts[index])}", *texts, ""])


def _title(prompt: Prompt) -> str:
    text = (
        prompt.text
        or (str(prompt.messages[-1].get("content", "")) if prompt.messages else "")
        or prompt.source
    )
    return " ".join(text.split())
