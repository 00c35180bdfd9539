"""From a step's tokens to requests that have something to report: what has ended, what is new."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence as Seq

import numpy as np

from deepinfer_jax.engine.faults import is_requests_own, reason_of
from deepinfer_jax.engine.live_requests import LiveRequests
from deepinfer_jax.engine.prefix_store import PrefixStore
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.engine.stats.metrics import EngineStats
from deepinfer_jax.runner.decode_state import ResultRows
from deepinfer_jax.runner.model_runner import InFlight
from deepinfer_jax.scheduler.outputs import Processed, SchedulerOutputs
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence, SequenceStatus
from deepinfer_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Commits sampled tokens to the schedulers and to the completions they belong to.

    keeps_prefilled: the engine does not decode, prefilled completions wait to be handed over.
    """

    def __init__(
        self,
        live: LiveRequests,
        schedulers: Seq[Scheduler],
        stats: EngineStats,
        tokenizer: Tokenizer | None,
        prefix_store: PrefixStore | None,
        keeps_prefilled: bool,
    ) -> None:
        self._live, self._schedulers, self._stats = live, schedulers, stats
        self._tokenizer, self._prefix_store = tokenizer, prefix_store
        self._keeps_prefilled = keeps_prefilled
        self._prefilled: list[Completion] = []
        self._ended: list[Request] = []
        self._watched = [np.zeros(s.config.max_num_seqs, bool) for s in schedulers]
        """Per rank, slots whose every token is looked at."""

    # ---- what the engine tells and takes ---------------------------------------------------------

    def admitted(self, rank: int, seq: Sequence) -> None:
        """A sequence has got a slot."""
        self._watched[rank][seq.slot] = self._live.of(seq).needs_every_step()

    def end(self, c: Completion) -> None:
        """Ends a completion outside a step's tokens; its request is reported by the next step."""
        c.end()
        self._ended.append(c.request)

    def fail(self, c: Completion, error: Exception) -> None:
        """Ends a completion over an error of its own; the others do not notice."""
        if not is_requests_own(error):
            raise error
        reason = reason_of(error)
        logger.error(
            "%s: request %s ends: %s",
            self._stats.engine_name,
            c.request.request_id,
            reason,
            exc_info=error,
        )
        if not c.seq.is_finished:
            self._schedulers[c.rank].finish(c.seq, SequenceStatus.FINISHED_ERROR, "error", reason)
        c.fail(reason)
        self._ended.append(c.request)

    def take_prefilled(self) -> list[Completion]:
        """Completions that got their first token since the last call."""
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def take_ended(self, substeps: Seq[Seq[SchedulerOutputs]] = ()) -> list[Request]:
        """Live requests that ended without a token: refused, aborted, failed, or stopped by
        preemption in these scheduler outputs."""
        outputs = [o for step in substeps for o in step]
        for seq in (s for o in outputs for s in o.ignored):
            self._live.drop_rank(seq)  # the scheduler has released it already
        for seq in (s for o in outputs for s in (*o.ignored, *o.preempted) if s.is_finished):
            c = self._live.find(seq)
            if c is not None:
                try:
                    c.consume()
                    self.end(c)
                except Exception as error:
                    self.fail(c, error)
        ended, self._ended = self._ended, []
        unique = {r.request_id: r for r in ended if r.finished and r.request_id in self._live}
        return list(unique.values())

    # ---- a step's results ------------------------------------------------------------------------

    def process(self, done: InFlight, results: list[list[ResultRows]], now: float) -> list[Request]:
        """Takes the tokens of a step (`InFlight.wait`). Returns the requests that owe their caller
        an output. now: seconds of time.time()."""
        touched: dict[str, Request] = {}
        if done.is_prefill:
            self._take_prompt_logprobs(done)
        for outputs, step_results in zip(done.substeps, results, strict=True):
            for rank, (o, rows) in enumerate(zip(outputs, step_results, strict=True)):
                if done.is_prefill:
                    self._process_prefill(rank, o, rows, now, touched)
                else:
                    self._process_decode(rank, o, rows, now, touched)
        return [
            r for r in touched.values() if r.request_id in self._live and (r.finished or r.streams)
        ]

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
        accepted = self._commit(rank, o, tokens).num_accepted
        sampled = [item.seq.slot for i, item in enumerate(o.prefill) if accepted[i]]
        self._stats.first_tokens(rank, sampled, now)
        for i, item in enumerate(o.prefill):
            c = self._live.find(item.seq)
            if c is None:
                continue
            self._note_start(c, now, first_token=bool(accepted[i]))
            if accepted[i]:
                if self._prefix_store is not None:
                    self._prefix_store.save(c.seq, rank)
                self._take_tokens(c, rows, row_of[i], now, touched)
                if self._keeps_prefilled and c.finish_reason != "error":
                    self._prefilled.append(c)

    def _process_decode(
        self,
        rank: int,
        o: SchedulerOutputs,
        rows: ResultRows,
        now: float,
        touched: dict[str, Request],
    ) -> None:
        count = len(o.slots)
        processed = self._commit(rank, o, rows.tokens[:count, None])
        accepted = processed.num_accepted > 0
        if count:
            self._stats.next_tokens(rank, o.slots[accepted], now)
        watched = np.flatnonzero(self._watched[rank][o.slots] & accepted) if count else ()
        if len(watched):
            seqs = o.seqs
            for row in watched.tolist():
                c = self._live.find(seqs[row])
                if c is not None:
                    self._take_tokens(c, rows, row, now, touched)
        for seq in processed.finished:
            c = self._live.find(seq)
            if c is not None and not c.finished:
                self._take_tokens(c, rows, -1, now, touched)

    def _commit(self, rank: int, o: SchedulerOutputs, tokens: np.ndarray) -> Processed:
        """Gives the scheduler one token per row, i32 [rows, 1]. Rows whose logits held NaN or
        infinity carry the error token: their requests end, the others go on."""
        if tokens.size and tokens.min() < 0:
            seqs = o.seqs
            for row in np.flatnonzero(tokens[:, 0] < 0).tolist():
                self._fail(rank, seqs[row])
        return self._schedulers[rank].process_outputs(o, tokens, np.ones(len(tokens), np.int32))

    def _fail(self, rank: int, seq: Sequence) -> None:
        if seq.is_finished:
            return
        logger.error(
            "%s: request %s: the model produced non-finite logits",
            self._stats.engine_name,
            seq.request_id,
        )
        self._schedulers[rank].finish(
            seq, SequenceStatus.FINISHED_ERROR, "error", "non-finite logits"
        )
        self.end(self._live.of(seq))

    def _note_start(self, c: Completion, now: float, first_token: bool) -> None:
        metrics = c.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now
            metrics.time_in_queue = now - metrics.arrival_time
        if first_token and metrics.first_token_time is None:
            metrics.first_token_time = now
            self._stats.first_token(now - metrics.arrival_time)

    def _take_tokens(
        self, c: Completion, rows: ResultRows, row: int, now: float, touched: dict[str, Request]
    ) -> None:
        """Gives a completion its new tokens, notes its request as touched. An error on the way is
        that request's end, not the step's."""
        try:
            self._read_tokens(c, rows, row)
        except Exception as error:
            self.fail(c, error)
        c.request.metrics.last_token_time = now
        touched[c.request.request_id] = c.request

    def _read_tokens(self, c: Completion, rows: ResultRows, row: int) -> None:
        """Log-probabilities and text of new tokens; ends the completion on a stop string."""
        if c.logprobs is not None and len(c.logprobs) < c.seq.num_output_tokens:
            c.add_logprobs(rows, row, self._tokenizer)
        if c.needs_every_step() or c.seq.is_finished:
            stopped = c.consume()
            if stopped and not c.finished and c.seq.finish_reason != "stop":
                self._stop_on_string(c)
            elif stopped:
                c.stop_reason = c.detokenizer.stop_reason
        if c.seq.is_finished:
            c.end()

    def _stop_on_string(self, c: Completion) -> None:
        reason = c.detokenizer.stop_reason
        if not c.seq.is_finished:
            scheduler = self._schedulers[c.rank]
            scheduler.finish(c.seq, SequenceStatus.FINISHED_STOPPED, "stop", reason)
        else:  # the same token also reached max_tokens: the stop string is the more telling reason
            c.seq.finish_reason, c.seq.stop_reason = "stop", reason

    def _take_prompt_logprobs(self, done: InFlight) -> None:
        if done.prompt_logprobs is None:
            return
        for items, rows in zip(done.plp_items, done.wait_prompt_logprobs(), strict=True):
            at = 0
            for seq, position, count in items:
                c = self._live.find(seq)
                if c is not None:
                    try:
                        c.request.add_prompt_logprobs(rows, at, position, count, self._tokenizer)
                    except Exception as error:
                        self.fail(c, error)
                at += count
