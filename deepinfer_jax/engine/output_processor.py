"""From a step's tokens to request outputs: what has ended, what is owed to whom. Part
of LLMEngine."""

from __future__ import annotations

import itertools
import logging

import numpy as np

from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.runner.decode_state import ResultRows
from deepinfer_jax.runner.model_runner import InFlight
from deepinfer_jax.scheduler.outputs import SchedulerOutputs
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus

logger = logging.getLogger("deepinfer_jax.engine.llm_engine")


class EngineResultsMixin:
    """Part of LLMEngine; its state is declared there."""

    def _process_prefill(
        self,
        rank: int,
        o: SchedulerOutputs,
        rows: ResultRows,
        now: float,
        touched: dict[str, Request],
    ) -> None:
        row_of = list(itertools.accumulate((int(item.is_last) for item in o.prefill), initial=0))
        tokens = np.zeros((len(o.prefill), 1), np.int32)
        for i, item in enumerate(o.prefill):
            if item.is_last:
                tokens[i] = rows.tokens[row_of[i]]
        self._fail_rows(rank, o.seqs, tokens)
        processed = self.schedulers[rank].process_outputs(o, tokens, np.ones(len(tokens), np.int32))
        self.stats_log.first_tokens(
            rank,
            [item.seq.slot for i, item in enumerate(o.prefill) if processed.num_accepted[i]],
            now,
        )
        for i, item in enumerate(o.prefill):
            c = self._completions.get(item.seq.request_id)
            if c is None:
                continue
            metrics = c.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                metrics.time_in_queue = now - metrics.arrival_time
            if processed.num_accepted[i]:
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
                    self.stats_log.first_token(now - metrics.arrival_time)
                if not self.policy.does_decode:
                    self._processed.append(c)
                if self.kv is not None:
                    self.kv.save(c.seq, rank)
                self._take_tokens(c, rows, row_of[i], now, touched)

    def _process_decode(
        self,
        rank: int,
        o: SchedulerOutputs,
        rows: ResultRows,
        now: float,
        touched: dict[str, Request],
    ) -> None:
        count = len(o.slots)
        tokens = rows.tokens[:count, None]
        if count and tokens.min() < 0:
            self._fail_rows(rank, o.seqs, tokens)
        processed = self.schedulers[rank].process_outputs(o, tokens, np.ones(count, np.int32))
        accepted = processed.num_accepted > 0
        if count:
            self.stats_log.next_tokens(rank, o.slots[accepted], now)
        watched = np.flatnonzero(self._watch[rank][o.slots] & accepted) if count else ()
        if len(watched):
            seqs = o.seqs
            for row in watched.tolist():
                c = self._completions.get(seqs[row].request_id)
                if c is not None:
                    self._take_tokens(c, rows, row, now, touched)
        for seq in processed.finished:
            c = self._completions.get(seq.request_id)
            if c is not None and not c.finished:
                self._take_tokens(c, rows, -1, now, touched)

    def _take_tokens(
        self, c: Completion, rows: ResultRows, row: int, now: float, touched: dict[str, Request]
    ) -> None:
        """Gives a completion's new tokens to its detokenizer, ends it on a stop string, notes its
        request as touched."""
        if c.logprobs is not None and len(c.logprobs) < c.seq.num_output_tokens:
            c.add_logprobs(rows, row, self.tokenizer)
        if c.needs_every_step() or c.seq.is_finished:
            stopped = c.consume()
            if stopped and not c.finished and c.seq.finish_reason != "stop":
                self._stop_on_string(c)
            elif stopped:
                c.stop_reason = c.detokenizer.stop_reason
        request = c.request
        request.metrics.last_token_time = now
        if c.seq.is_finished:
            self._end(c)
        touched[request.request_id] = request

    def _stop_on_string(self, c: Completion) -> None:
        scheduler = self.schedulers[c.rank]
        if not c.seq.is_finished:
            scheduler.finish(
                c.seq, SequenceStatus.FINISHED_STOPPED, "stop", c.detokenizer.stop_reason
            )
        else:  # the same token also reached max_tokens: the stop string is the more telling reason
            c.seq.finish_reason, c.seq.stop_reason = "stop", c.detokenizer.stop_reason

    def _fail_rows(self, rank: int, seqs: list[Sequence], tokens: np.ndarray) -> None:
        """Rows whose logits held NaN or infinity carry the error token: their requests end, the
        others go on."""
        for row in np.flatnonzero(tokens[:, 0] < 0).tolist():
            if not seqs[row].is_finished:
                logger.error(
                    "%s: request %s: the model produced non-finite logits",
                    self.name,
                    seqs[row].request_id,
                )
                self.schedulers[rank].finish(
                    seqs[row], SequenceStatus.FINISHED_ERROR, "error", "non-finite logits"
                )
                c = self._completions[seqs[row].request_id]
                self._end(c)
                self._ended.append(c.request)

    def _take_prompt_logprobs(self, done: InFlight) -> None:
        if done.prompt_logprobs is None:
            return
        for items, rows in zip(done.plp_items, done.wait_prompt_logprobs(), strict=True):
            at = 0
            for seq, position, count in items:
                c = self._completions.get(seq.request_id)
                if c is not None:
                    c.request.add_prompt_logprobs(rows, at, position, count, self.tokenizer)
                at += count

    def _end(self, c: Completion) -> None:
        if not c.finished:
            c.finish(c.seq.finish_reason or "abort", c.seq.stop_reason)

    def _due(self, request: Request) -> bool:
        """Whether this step owes the caller an output of the request."""
        return request.request_id in self._requests and (request.finished or request.streams)

    def _request_output(self, request: Request) -> RequestOutput:
        if request.finished:
            self._forget(request)
        return request.output()

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        for c in request.completions:
            self._completions.pop(c.seq.request_id, None)
        self.stats_log.finished(request)

    def _outputs_outside_steps(self, substeps: list[list[SchedulerOutputs]]) -> list[RequestOutput]:
        """Outputs of requests that ended without a token: refused, aborted, stopped by preemption,
        failed."""
        for seq in [s for outputs in substeps for o in outputs for s in o.ignored]:
            self._ranks.pop(seq.request_id, None)  # the scheduler has released it already
        for seq in [
            s
            for outputs in substeps
            for o in outputs
            for s in (*o.ignored, *o.preempted)
            if s.is_finished
        ]:
            c = self._completions.get(seq.request_id)
            if c is not None:
                c.consume()
                self._end(c)
                self._ended.append(c.request)
        ended, self._ended = self._ended, []
        done = {r.request_id: r for r in ended if r.finished and r.request_id in self._requests}
        return [self.process_output(self._request_output(r)) for r in done.values()]
