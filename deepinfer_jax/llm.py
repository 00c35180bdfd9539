"""LLM: batch generation, streaming and chat over an engine.

Imports: llm_engine, disagg, rpc, snapshot, engine, text, config, environ, outputs,
sampling_params, calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from tqdm import tqdm

from deepinfer_jax import environ
from deepinfer_jax.calls import Calls
from deepinfer_jax.config import EngineArgs
from deepinfer_jax.disagg.config import DisaggregationConfig
from deepinfer_jax.disagg.deployment import DisaggregatedEngine
from deepinfer_jax.engine.admission import PromptInput
from deepinfer_jax.llm_engine import LLMEngine
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.rpc.client import RemoteEngine
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
from deepinfer_jax.snapshot.job import SnapshotJob
from deepinfer_jax.snapshot.job import snapshot_on_sigterm as arrange_snapshot_on_sigterm
from deepinfer_jax.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_NO_SNAPSHOTS = "with a router, snapshots are taken and restored by the engines' own processes"

OFFLINE_PREFILL_INTERVAL = 16
"""Decode steps between attempts to prefill: 70, the engine's default, keeps places empty for long
when a batch is larger than max_num_seqs (7 % of the throughput of 600 prompts on 32 places in
`deepinfer-jax simulate`); below 16 nothing more is gained."""


class InvalidPrompt(ValueError):
    """One prompt of a call cannot be served. index: its position among the call's prompts."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class LLM:
    """An engine for offline use: `generate`, `stream`, `chat`.

    model: a Hugging Face folder, a .gguf file, or "demo" (a small real model that comes with the
    package's dependencies). Every other keyword is a field of `EngineArgs`. Differences from an
    engine's defaults, because nobody waits for a single request here: preempted requests are
    recomputed instead of stopped, programs are compiled when first needed (warm_up=True compiles
    them all at construction), and waiting prompts take freed places after OFFLINE_PREFILL_INTERVAL
    decode steps (unless DEEPINFER_PREFILL_ATTEMPT_INTERVAL is set).

    >>> with LLM("demo", max_model_len=512) as llm:
    ...     print(llm.generate("The capital of France is",
    SamplingParams(max_tokens=8))[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int = 1,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = True,
        *,
        stop_preempted_request: bool = False,
        warm_up: bool = False,
        disable_log_stats: bool = True,
        devices: Seq[Any] | None = None,
        disaggregate: str | None = None,
        prompt_mesh: Mapping[str, Any] | None = None,
        completion_mesh: Mapping[str, Any] | None = None,
        disaggregation: Mapping[str, Any] | None = None,
        router: str | None = None,
        router_options: Mapping[str, Any] | None = None,
        snapshot_on_sigterm: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        """decode_sequence=False leaves `text` empty for all requests (token ids only). devices:
        default all.

        disaggregate="2P:1D" prefills on two engines and decodes on a third, each with its own
        devices and thread. prompt_mesh and completion_mesh give arguments to one role only
        ({"data_parallel_size": 2, "devices": [...]}); either alone means 1P:1D. disaggregation:
        further fields of `DisaggregationConfig` (time-outs, router, reservations).
        router="host:port" builds no engine: requests go to a deployment of other processes, which
        keeps its own arguments. Then model says only where to find a tokenizer. router_options:
        further arguments of `RemoteEngine` (secret, time-out). snapshot_on_sigterm: folder for a
        snapshot of all live requests that SIGTERM takes before the process ends. A warm-up shows a
        progress bar on stderr.
        """
        self._decode = decode_sequence
        self._serial = itertools.count()
        self.engine: LLMEngine | DisaggregatedEngine | RemoteEngine
        if router is not None:
            if engine_args or disaggregate is not None or snapshot_on_sigterm is not None:
                raise ValueError(
                    f"with router={router!r} the engines' arguments are theirs; got"
                    f" {sorted(engine_args) or 'disaggregate or snapshot_on_sigterm'}"
                )
            self.engine = RemoteEngine(router, model, tokenizer, **(router_options or {}))
            self._calls = Calls(self.engine)
            return
        if model is None:
            raise ValueError("give a model, or the router of a deployment")
        if environ.given("PREFILL_ATTEMPT_INTERVAL", int) is None:
            engine_args.setdefault("prefill_attempt_interval", OFFLINE_PREFILL_INTERVAL)
        fields = dict(
            model=str(model),
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            expert_parallel_size=expert_parallel_size,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            stop_preempted_request=stop_preempted_request,
            warm_up=warm_up,
            disable_log_stats=disable_log_stats,
            **engine_args,
        )
        if any(x is not None for x in (disaggregate, prompt_mesh, completion_mesh, disaggregation)):
            meshes = {"prompt_mesh": prompt_mesh or {}, "completion_mesh": completion_mesh or {}}
            config = DisaggregationConfig.parse(disaggregate, **meshes, **(disaggregation or {}))
            self.engine = DisaggregatedEngine(fields, config, devices)
        else:
            self.engine = _build_engine(EngineArgs(**fields), devices)
        self._calls = Calls(self.engine)
        if snapshot_on_sigterm is not None:
            arrange_snapshot_on_sigterm(self.snapshot, snapshot_on_sigterm)

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | PromptInput | Seq[PromptInput] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many; returns one RequestOutput each, in input order.

        prompts: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of them
        ([] gives []). sampling_params: one for all, or one per prompt. Raises ValueError, before
        anything runs, if a prompt or a parameter is invalid; a prompt that is merely too long ends
        with finish_reason "prompt_length_exceeded".
        """
        requests = self._requests(
            prompts, prompt_token_ids, sampling_params, RequestOutputKind.FINAL_ONLY
        )
        ids, outputs = self._start(requests)
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), disable=not use_tqdm, unit="req", dynamic_ncols=True) as bar:
            generated = 0
            try:
                for output in outputs:
                    done[output.request_id] = output
                    generated += sum(len(c.token_ids) for c in output.outputs)
                    rate = generated / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                    bar.update()
            except BaseException:
                self._abandon([i for i in ids if i not in done])
                raise
        return [done[i] for i in ids]

    def stream(
        self,
        prompts: str | PromptInput | Seq[PromptInput] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields increments (RequestOutputKind.DELTA) of all prompts as they come; `request_id` is
        the prompt's index as text.

        Closing the iterator early aborts what is left.
        """
        requests = self._requests(
            prompts, prompt_token_ids, sampling_params, RequestOutputKind.DELTA
        )
        return self._stream(*self._start(requests))

    def generate_as_finished(
        self,
        prompts: str | PromptInput | Seq[PromptInput] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each prompt's output when it is complete; `request_id` is the
        prompt's index as text. Raises InvalidPrompt, a ValueError, before anything runs.

        Closing the iterator early aborts what is left.
        """
        requests = self._requests(
            prompts, prompt_token_ids, sampling_params, RequestOutputKind.FINAL_ONLY
        )
        return self._stream(*self._start(requests))

    def _stream(self, ids: list[str], outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        index = {request_id: str(i) for i, request_id in enumerate(ids)}
        left = set(ids)
        try:
            for output in outputs:
                if output.finished:
                    left.discard(output.request_id)
                output.request_id = index[output.request_id]
                yield output
        finally:
            if left:
                self._abandon(left)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Seq[Any] | None = None,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, rendered with the checkpoint's chat
        template.

        continue_final_message (with add_generation_prompt=False): the model goes on with the last
        message. tools: JSON schemas or functions. chat_template_kwargs and template_args: variables
        for the template. See `Tokenizer.apply_chat_template`. Raises ValueError for what the
        template does not read or refuses.
        """
        prompts = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            **template_args,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], **template_args: Any
    ) -> list[list[int]]:
        """Token ids of one conversation or a list of them ([] gives [])."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError(
                "chat needs a tokenizer with a chat template; the model folder has none"
            )
        if not isinstance(messages, list | tuple):
            raise ValueError(f"chat needs a conversation or a list of them, got {messages!r}")
        if messages and not isinstance(messages[0], list | tuple):
            return [cast("list[int]", tokenizer.apply_chat_template(messages, **template_args))]
        prompts: list[list[int]] = []
        for i, conversation in enumerate(messages):
            try:
                ids = tokenizer.apply_chat_template(conversation, **template_args)
            except ValueError as error:
                raise ValueError(f"conversation {i}: {error}") from error
            prompts.append(cast("list[int]", ids))
        return prompts

    # ---- plumbing --------------------------------------------------------------------------------

    def _requests(
        self, prompts: Any, prompt_token_ids: Any, sampling_params: Any, kind: RequestOutputKind
    ) -> list[tuple[PromptInput, SamplingParams]]:
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give either prompts or prompt_token_ids")
        batch = as_batch(prompts if prompt_token_ids is None else prompt_token_ids)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise ValueError(
                f"{len(params)} sampling_params for {len(batch)} prompts: give one for all or one"
                " each"
            )
        detokenize = {} if self._decode else {"detokenize": False}
        return [
            (p, s.replace(output_kind=kind, **detokenize))
            for p, s in zip(batch, params, strict=True)
        ]

    def _start(
        self, requests: list[tuple[PromptInput, SamplingParams]]
    ) -> tuple[list[str], Iterator[RequestOutput]]:
        """Queues all or none; their ids, and their outputs as they come."""
        call = next(self._serial)
        ids = [f"{call}-{i}" for i in range(len(requests))]
        box = self._calls.open(ids)
        try:
            for index, (prompt, params) in enumerate(requests):
                try:
                    self.engine.add_request(ids[index], prompt, params)
                except ValueError as error:
                    raise InvalidPrompt(index, str(error)) from error
        except Exception:
            self._abandon(ids)
            self._calls.drain()
            raise
        return ids, self._calls.outputs(ids, box)

    def _abandon(self, ids: Iterable[str]) -> None:
        self._calls.close(ids)
        self.engine.abort_request(list(ids))

    # ---- state -----------------------------------------------------------------------------------

    def snapshot(self, path: str | Path) -> SnapshotJob:
        """Saves all live requests with their KV while they go on; from another thread, or between
        the outputs of `stream`.

        `.wait()` returns once the snapshot is complete on disk. See `snapshot.job.take`. ValueError
        with a router: its engines are other processes, which have snapshots of their own.
        """
        match self.engine:
            case LLMEngine() | DisaggregatedEngine():
                return self.engine.snapshot(path)
        raise ValueError(f"snapshot {path}: {_NO_SNAPSHOTS}")

    def _restore(self, path: str | Path) -> list[str]:
        match self.engine:
            case LLMEngine() | DisaggregatedEngine():
                return self.engine.restore(path)
        raise ValueError(f"restore {path}: {_NO_SNAPSHOTS}")

    def restore(self, path: str | Path, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Takes a snapshot's requests over and generates to their end; one output each, in the
        order they once came in.

        A request that streamed increments gives its last one only. Raises SnapshotError,
        SnapshotMismatch or ValueError before anything runs.
        """
        with self._calls.between_steps():
            ids = self._restore(path)
            box = self._calls.open(ids)
        used = [
            int(call)
            for call, dash, _ in (i.partition("-") for i in ids)
            if dash and call.isdigit()
        ]
        self._serial = itertools.count(max(used, default=-1) + 1 + next(self._serial))
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), disable=not use_tqdm, unit="req", dynamic_ncols=True) as bar:
            for output in self._calls.outputs(ids, box):
                if output.finished:
                    done[output.request_id] = output
                    bar.update()
        return [done[i] for i in ids]

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None where its folder has none."""
        return self.engine.tokenizer

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        """Frees device memory; the object cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_engine(args: EngineArgs, devices: Seq[Any] | None) -> LLMEngine:
    """With a progress bar while it compiles."""
    with tqdm(
        desc="compiling", unit="program", disable=not args.warm_up, dynamic_ncols=True
    ) as bar:
        return LLMEngine(args, devices=devices, warm_up_progress=partial(show_warm_up, bar))


def show_warm_up(bar: tqdm, program: str, done: int, count: int) -> None:
    """One more program is ready."""
    bar.total = count
    bar.set_postfix_str(program, refresh=False)
    bar.update(done - bar.n)


def as_batch(prompts: Any) -> list[PromptInput]:
    """One prompt (text, mapping, or a flat list of ids) or a list of prompts -> a list
    of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(
        not isinstance(p, str | Mapping) and not hasattr(p, "__len__") for p in prompts
    ):
        return [prompts]
    return prompts
