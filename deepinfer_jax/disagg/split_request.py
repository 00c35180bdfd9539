"""A user's request as the disaggregated engine sees it: n parts that travel alone, put together
again for the caller."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, PartId

_PROCESS = os.urandom(3).hex()
_serial = itertools.count()


def unique_id(request_id: str) -> str:
    """A name that no request of any process has had: an id that is used again must not find its old
    hand-over's "success"."""
    return f"{request_id}#{_PROCESS}-{next(_serial)}"


@dataclass(eq=False)
class CompletionPart:
    """One completion. answering: the hand-over whose outputs the caller is given, once one has made
    any. answerer: the engine that makes them."""

    request: FannedOutRequest
    index: int
    params: SamplingParams
    seed: int
    arrival_time: float
    answering: HandoffId | None = None
    answerer: str | None = None
    last: RequestOutput | None = None

    @property
    def id(self) -> PartId:
        return PartId(self.request.unique_id, self.index)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    def restart(self) -> None:
        """Another attempt begins; the caller has been given nothing."""
        self.answering = self.answerer = None

    def accepts(self, output_of: AttemptId | HandoffId, engine: str) -> bool:
        """Whether the caller may see this output: only one hand-over of an attempt answers."""
        if isinstance(output_of, AttemptId):  # from the prompt engine: the first token
            return self.answering is None
        if self.answering is None:
            self.answering, self.answerer = output_of, engine
        return self.answering == output_of and self.answerer == engine

    def ended(self, finish_reason: str, stop_reason: str | None) -> RequestOutput:
        """A final output without an engine's: what was reported last, and why it ended."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        known = None if self.last is None or delta else self.last.outputs[0]
        completion = (
            CompletionOutput(self.index, "", []) if known is None else dataclasses.replace(known)
        )
        completion.finish_reason, completion.stop_reason = finish_reason, stop_reason
        metrics = RequestMetrics(self.arrival_time) if self.last is None else self.last.metrics
        return RequestOutput(
            str(self.id), None, self.prompt_token_ids, None, [completion], True, metrics
        )


@dataclass(eq=False)
class FannedOutRequest:
    """n parts of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    parts: list[CompletionPart] = field(default_factory=list)
    unique_id: str = ""
    done: dict[int, RequestOutput] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        draw_seed: Callable[[], int],
        arrival: float,
    ) -> FannedOutRequest:
        """The parts of a request; part i draws with the request's seed + i, as one engine would."""
        request = cls(request_id, prompt, ids, params, unique_id=unique_id(request_id))
        base = draw_seed() if params.seed is None else params.seed
        for index in range(params.n):
            child = params if params.n == 1 else params.child(index)
            if index:
                child = child.replace(prompt_logprobs=None)
            request.parts.append(
                CompletionPart(request, index, child, (base + index) % 2**64, arrival)
            )
        return request

    @property
    def finished(self) -> bool:
        return len(self.done) == len(self.parts)

    def unfinished(self) -> list[CompletionPart]:
        return [p for p in self.parts if p.index not in self.done]

    def merge(self, part: CompletionPart, output: RequestOutput) -> RequestOutput | None:
        """What the caller gets for a part's output: nothing before the end if it asked for the
        final output only."""
        part.last = output
        if output.finished:
            self.done[part.index] = output
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        latest = [p.last for p in self.parts if p.last is not None]
        fresh = kind is RequestOutputKind.DELTA
        outputs = [self._completion(p, changed=not fresh or p is part) for p in self.parts]
        metrics = self._metrics([x.metrics for x in latest if x.metrics is not None])
        logprobs = self.parts[0].last.prompt_logprobs if self.parts[0].last is not None else None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            logprobs,
            outputs,
            self.finished,
            metrics,
            metrics.num_cached_tokens,
        )

    def _completion(self, part: CompletionPart, changed: bool) -> CompletionOutput:
        if part.last is None:
            return CompletionOutput(part.index, "", [])
        completion = dataclasses.replace(part.last.outputs[0], index=part.index)
        if not changed:
            completion.text, completion.token_ids = "", []
            completion.logprobs = None if completion.logprobs is None else []
        return completion

    def _metrics(self, parts: list[RequestMetrics]) -> RequestMetrics:
        """Of the whole request: first of the first times, last of the last, sums of the counts."""
        if len(parts) == 1:
            return dataclasses.replace(parts[0])
        known = lambda name: [v for m in parts if (v := getattr(m, name)) is not None]  # noqa: E731
        return RequestMetrics(
            arrival_time=parts[0].arrival_time,
            first_scheduled_time=min(known("first_scheduled_time"), default=None),
            first_token_time=min(known("first_token_time"), default=None),
            last_token_time=max(known("last_token_time"), default=None),
            finished_time=max(known("finished_time"), default=None),
            time_in_queue=min(known("time_in_queue"), default=None),
            num_cached_tokens=max(m.num_cached_tokens for m in parts),
            num_prompt_tokens=len(self.prompt_token_ids),
            num_generation_tokens=sum(m.num_generation_tokens for m in parts),
            num_preemptions=sum(m.num_preemptions for m in parts),
        )
