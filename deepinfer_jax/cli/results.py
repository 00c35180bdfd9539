"""Writing results as requests finish, so that an interrupted run keeps what it has done.

A result file comes into being under a temporary name in its own folder and takes the place of an
older file only when the run has succeeded.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from deepinfer_jax import json_text
from deepinfer_jax.cli.prompts import Prompt

if TYPE_CHECKING:
    from deepinfer_jax.outputs import CompletionOutput, LogprobDict, RequestOutput

PARTIAL = ".partial"
SUFFIXES = (".txt", ".jsonl")
_ANSWERED = ("stop", "length", "prompt_length_exceeded")
"""Finish reasons that another run would give again; what ended otherwise is tried again."""


# ---- a result as a line


def result_line(index: int, prompt: Prompt, output: RequestOutput, *, as_json: bool) -> str:
    """One line without its end: JSON, or the first completion's text with line breaks as \\n."""
    if as_json:
        return json_text.dumps(result_record(index, prompt, output))
    text = output.outputs[0].text
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def result_record(index: int, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """What a line of a .jsonl result holds; log-probabilities only where they were asked for."""
    record: dict[str, Any] = {"index": index, "request_id": output.request_id}
    if prompt.id is not None:
        record["id"] = prompt.id
    for key, value in (("prompt", prompt.text), ("messages", prompt.messages)):
        if value is not None:
            record[key] = value
    record["prompt_token_ids"] = list(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if d is None else _logprobs(d) for d in output.prompt_logprobs
        ]
    record["outputs"] = [_completion(c) for c in output.outputs]
    return record


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    record = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = [_logprobs(d) for d in completion.logprobs]
    return record


def _logprobs(entries: LogprobDict) -> list[dict[str, Any]]:
    return [
        {"token_id": i, "logprob": p.logprob, "rank": p.rank, "token": p.decoded_token}
        for i, p in entries.items()
    ]


# ---- where lines go


class Results(Protocol):
    """Takes the line of each request as it finishes."""

    def add(self, index: int, line: str) -> None: ...


class OrderedStream:
    """Lines to a stream in the order of the prompts, each as soon as all before it are there."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._early: dict[int, str] = {}
        self._next = 0

    def add(self, index: int, line: str) -> None:
        self._early[index] = line
        while self._next in self._early:
            self._stream.write(self._early.pop(self._next) + "\n")
            self._next += 1
        self._stream.flush()

    def close(self) -> None:
        """Whatever waits for an earlier prompt that never finished is written too."""
        for _, line in sorted(self._early.items()):
            self._stream.write(line + "\n")
        self._early.clear()
        self._stream.flush()


class ResultFile:
    """The lines of an output file, kept on disk in the order in which requests finish.

    They go to `<name>.partial` in the same folder, as "index<TAB>line" in the case of .txt.
    finish() puts them into the order of the prompts, under the real name. keep() is for a run that
    did not end: the partial file takes the real name where that is free.
    """

    def __init__(self, path: Path, done: Mapping[int, str], work: Path) -> None:
        """done: lines of an earlier run, by index; `work` holds them already."""
        self.path, self.work = path, work
        self.num_done = len(done)
        self._plain = path.suffix == ".jsonl"
        self._spans: dict[int, tuple[int, int]] = {}
        self._file = open(work, "ab" if done else "wb")  # noqa: SIM115 (closed by finish or keep)
        self._end = 0
        for index, line in done.items():
            self._note(index, len(line.encode()) + 1)

    def add(self, index: int, line: str) -> None:
        text = line if self._plain else f"{index}\t{line}"
        data = (text + "\n").encode()
        self._file.write(data)
        self._file.flush()
        self._note(index, len(data))
        self.num_done += 1

    def _note(self, index: int, size: int) -> None:
        self._spans[index] = (self._end, size)
        self._end += size

    def finish(self) -> None:
        """All results are there: the file appears, or replaces the older one, in one move."""
        self._file.close()
        sorted_file = self.path.with_name(self.path.name + ".sorted")
        self._write_in_order(sorted_file, max(self._spans, default=-1) + 1)
        if self.path.exists():
            shutil.copymode(self.path, sorted_file)
        os.replace(sorted_file, self.path)
        if self.work != self.path:
            self.work.unlink()

    def keep(self) -> Path | None:
        """The run did not end: where its results are now; None if there are none."""
        self._file.close()
        if not self.num_done:
            if self.work != self.path:
                self.work.unlink()
            return None
        if self.work == self.path or self.path.exists():
            return self.work
        if self._plain:
            os.replace(self.work, self.path)
        else:
            self._write_in_order(self.path, max(self._spans) + 1)
            self.work.unlink()
        return self.path

    def _write_in_order(self, target: Path, count: int) -> None:
        """Line n is prompt n's in a .txt file, empty if it has no answer."""
        with open(self.work, "rb") as source, open(target, "wb") as out:
            for index in range(count):
                if index in self._spans:
                    start, size = self._spans[index]
                    source.seek(start)
                    line = source.read(size)
                    out.write(line if self._plain else line.partition(b"\t")[2])
                elif not self._plain:
                    out.write(b"\n")
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def open_results(
    path: str, prompts: Sequence[Prompt], *, resume: bool, say: Callable[[str], object]
) -> Iterator[tuple[Results, set[int]]]:
    """(where lines go, indices of prompts that need no run). The file is opened before anything
    runs, so that a path that cannot be written is known at once.

    `say` is told where the results of a run that did not end are. Raises ValueError and OSError
    naming the file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        if target.is_dir():
            raise ValueError(f"{path}: is a folder")
        with open(target, "w", encoding="utf-8") as stream:  # a pipe or a device: nothing to keep
            ordered = OrderedStream(stream)
            try:
                yield ordered, set()
            finally:
                ordered.close()
        return
    results, done = _open_file(path, target, prompts, resume)
    try:
        yield results, set(done)
    except BaseException:
        kept = results.keep()
        if kept is not None:
            more = "; --resume continues from there" if target.suffix == ".jsonl" else ""
            say(f"{results.num_done} of {len(prompts)} results are in {kept}{more}")
        raise
    results.finish()


def _open_file(
    path: str, target: Path, prompts: Sequence[Prompt], resume: bool
) -> tuple[ResultFile, dict[int, str]]:
    partial = target.with_name(target.name + PARTIAL)
    try:
        if not resume:
            if partial.exists() and partial.stat().st_size:
                raise ValueError(
                    f"{path}: {partial} holds results of a run that did not end: continue it with"
                    " --resume, or remove it"
                )
            return ResultFile(target, {}, partial), {}
        work = partial if partial.exists() or not target.exists() else target
        done = _completed(work, prompts) if work.exists() else {}
        if work.exists():
            _rewrite(work, done.values())
        return ResultFile(target, done, work), done
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _rewrite(work: Path, lines: Iterable[str]) -> None:
    """Leaves exactly these lines: what is torn, or is to run again, goes."""
    fresh = work.with_name(work.name + ".new")
    fresh.write_bytes("".join(line + "\n" for line in lines).encode())
    shutil.copymode(work, fresh)
    os.replace(fresh, work)


def _completed(work: Path, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Lines of an earlier run by the index of their prompt in this one. A torn last line, and
    requests that were not completed, are left out."""
    index_of = {prompt.id: i for i, prompt in enumerate(prompts) if prompt.id is not None}
    *lines, last = work.read_bytes().split(b"\n")
    found: dict[int, str] = {}
    for number, data in enumerate([*lines, last], 1):
        if not data.strip():
            continue
        where = f"{work}:{number}"
        try:
            line = data.decode()
            record = json_text.loads(line)
        except ValueError as error:
            if number > len(lines):  # without its line end: torn
                continue
            raise ValueError(f"{where}: {error}") from None
        index = _index_of(where, record, index_of, prompts)
        if all(output["finish_reason"] in _ANSWERED for output in record["outputs"]):
            found[index] = line
    return found


def _index_of(
    where: str, record: Any, index_of: Mapping[Any, int], prompts: Sequence[Prompt]
) -> int:
    """The prompt that a result answers; ValueError if there is none."""
    if not _is_result(record):
        raise ValueError(f"{where}: not a result of `generate`: --resume cannot continue this file")
    index = index_of.get(record["id"], -1) if "id" in record else record["index"]
    if not 0 <= index < len(prompts) or not _answers(record, prompts[index]):
        name = f"id {record['id']!r}" if "id" in record else f"index {index}"
        raise ValueError(
            f"{where}: the result with {name} does not belong to this input: --resume continues a"
            " run of the same prompts"
        )
    return index


def _is_result(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("index"), int)
        and isinstance(record.get("id", ""), str | int)
        and isinstance(record.get("outputs"), list)
        and len(record["outputs"]) > 0
        and all(isinstance(o, dict) and "finish_reason" in o for o in record["outputs"])
    )


def _answers(record: Mapping[str, Any], prompt: Prompt) -> bool:
    if prompt.token_ids is not None:
        return bool(record.get("prompt_token_ids") == prompt.token_ids)
    given = (record.get("prompt"), record.get("messages"), record.get("id"))
    return given == (prompt.text, prompt.messages, prompt.id)
