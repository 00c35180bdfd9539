"""Router over prompt and completion engines: who prefills a request, who decodes it, when to wait,
what to do on failure.

Bookkeeping only: the caller moves the requests and reports what happened.
The same class serves the in-process runner, the router process and the simulator.
Every call is O(engines) or O(what it returns); it looks at no clock.

Engines come and go (`join`, `leave`, `drain`, `engine_failed`, `engine_recovered`). While a role is
`missing`, requests wait; the owner ends those it will not let wait (`starved`). NORMAL engines join
as prompt engines that answer everything themselves (`needs_completion` False).

Life of one completion (an `AttemptId` has a new number for every try, so nothing can find an older
attempt's result):

    add(part, prompt_token_ids, max_tokens)         queued in the router
    dispatch() -> [Assignment]                      give it to `prompt_engine`
    assign_decode(attempt) -> engine or None        before its KV moves; None: no room, ask later
    prefill_progress(attempt, tokens, seconds)      a chunk is computed (feeds the time estimate)
    prefilled(attempt)                              its KV waits on the prompt engine
    release_decode(attempt)                         refused or failed: assign_decode() again
    delivered(attempt)                              the prompt engine is free of it
    finish(attempt) -> part or None                 once per part; None: late or cancelled
    fail(attempt, reason) -> Verdict                queued under a new attempt id, or given up
    cancel(part) -> [(engine, attempt)]             both sides, to be notified
    engine_failed(name, reason) -> [Verdict]        for everything it held
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from deepinfer_jax.scheduler.routing.config import Capacity, RouterConfig
from deepinfer_jax.scheduler.routing.ids import AttemptId, PartId
from deepinfer_jax.scheduler.routing.loads import (
    Assignment,
    CompletionLoad,
    Job,
    PrefillCosts,
    PromptLoad,
    Verdict,
    prefix_chain,
)


class Router:
    """See the module's text. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        prompt_engines: Iterable[str] = (),
        completion_engines: Mapping[str, Capacity] | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        """The engines that are there from the start. ValueError if two have the same name."""
        self.config = config or RouterConfig()
        self.needs_completion = True
        self.prompt: dict[str, PromptLoad] = {}
        self.completion: dict[str, CompletionLoad] = {}
        self.queue: deque[Job] = deque()
        self.jobs: dict[PartId, Job] = {}
        self._costs = PrefillCosts(self.config)
        self.counters = {
            "retries": 0,
            "failed": 0,
            "cancelled": 0,
            "finished": 0,
            "late": 0,
            "back_pressure": 0,
            "poison": 0,
        }
        for name in prompt_engines:
            self.join(name)
        for name, capacity in (completion_engines or {}).items():
            self.join(name, capacity)

    # ---- engines ---------------------------------------------------------------------------------

    def join(self, name: str, capacity: Capacity | None = None) -> None:
        """A prompt engine (capacity None) or a completion engine. ValueError if the name is
        taken."""
        if name in self.prompt or name in self.completion:
            raise ValueError(f"the name {name!r} is taken")
        if capacity is None:
            self.prompt[name] = PromptLoad(name)
        else:
            self.completion[name] = CompletionLoad(name, capacity)

    def leave(self, name: str, reason: str) -> list[Verdict]:
        """It is gone, and forgotten: one verdict per part it held. [] for an unknown name."""
        if self.load_of(name) is None:
            return []
        verdicts = self.engine_failed(name, reason)
        (self.prompt if name in self.prompt else self.completion).pop(name)
        return verdicts

    def drain(self, name: str) -> None:
        """It keeps what it has and gets nothing new until `engine_recovered`."""
        load = self.load_of(name)
        if load is not None:
            load.alive = False

    def engine_failed(self, name: str, reason: str) -> list[Verdict]:
        """An engine is gone: one verdict per part it held. It gets nothing more until
        engine_recovered(name)."""
        load = self.prompt.get(name) or self.completion[name]
        load.alive = False
        if isinstance(load, PromptLoad):
            load.prefixes.clear()
        verdicts = []
        for job in list(load.jobs.values()):
            job.deaths += 1
            verdicts.append(self._fail(job, reason, True, failed=(name,)))
        return verdicts

    def engine_recovered(self, name: str) -> None:
        """It takes requests again. Does nothing for an unknown name."""
        load = self.load_of(name)
        if load is not None:
            load.alive = True

    def load_of(self, name: str) -> PromptLoad | CompletionLoad | None:
        return self.prompt.get(name) or self.completion.get(name)

    def alive(self) -> tuple[list[str], list[str]]:
        """Names of the living (prompt, completion) engines."""
        return [p.name for p in self.prompt.values() if p.alive], [
            c.name for c in self.completion.values() if c.alive
        ]

    def missing(self) -> tuple[str, ...]:
        """Roles without a living engine."""
        prompt, completion = self.alive()
        if not self.needs_completion:
            return () if prompt else ("normal",)
        return tuple(
            role for role, names in (("prompt", prompt), ("completion", completion)) if not names
        )

    def starved(self) -> list[Job]:
        """What cannot go on because of a missing role."""
        missing = self.missing()
        if not missing:
            return []
        if "completion" in missing:
            return [j for j in self.jobs.values() if j.completion_engine is None]
        return list(self.queue)

    # ---- prefill ---------------------------------------------------------------------------------

    def add(self, part: PartId, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int) -> None:
        """Queues one completion of a prompt. Raises ValueError if the id is in use or no completion
        engine could ever hold it."""
        self._add(part, prompt_token_ids, max_tokens)
        self.queue.append(self.jobs[part])

    def _add(self, part: PartId, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int) -> Job:
        if part in self.jobs:
            raise ValueError(f"request {part.request!r}: this id is already in use")
        job = Job(part, np.asarray(prompt_token_ids, np.int32), max_tokens)
        need = self._decode_tokens(job)
        largest = max((c.capacity.max_tokens for c in self.completion.values()), default=need)
        if self.needs_completion and need > largest:
            raise ValueError(
                f"request {part.request!r}: needs KV for {need} tokens, the largest completion"
                f" engine holds {largest}"
            )
        self.jobs[part] = job
        return job

    def dispatch(self) -> list[Assignment]:
        """Gives queued requests, in order, to prompt engines; stops when none may take more."""
        out: list[Assignment] = []
        while self.queue and not self.missing():
            job = self.queue[0]
            hashes = list(prefix_chain(job.tokens, self.config.affinity_block))
            load = self._choose_prompt(job, hashes)
            if load is None:
                break
            self.queue.popleft()
            job.attempt += 1
            hit = load.hit_tokens(hashes, self.config.affinity_block)
            load.take(job, self._bucket(job), hit)
            load.remember(hashes, self.config.affinity_entries)
            out.append(Assignment(job.part, job.attempt_id, load.name))
        return out

    def _choose_prompt(self, job: Job, hashes: Seq[int]) -> PromptLoad | None:
        """The engine expected to have prefilled the request first; None when every one is at a
        bound."""
        bucket, block = self._bucket(job), self.config.affinity_block
        best, best_key = None, None
        for load in self.prompt.values():
            if not load.alive or load.at_bound(self.config, len(job.tokens)):
                continue
            own = max(1, len(job.tokens) - load.hit_tokens(hashes, block))
            seconds = load.seconds(self._costs) + own * self._costs.rates[bucket]
            key = (seconds, load.per_bucket[bucket], len(load.jobs))
            if best_key is None or key < best_key:
                best, best_key = load, key
        if best is None:
            self.counters["back_pressure"] += 1
        return best

    def prefill_progress(
        self, attempt: AttemptId, tokens: int, seconds: float | None = None
    ) -> None:
        """`tokens` more tokens of the prompt are computed; seconds: what they took, if known."""
        job = self._current(attempt)
        if job is None or job.prompt_engine is None or job.held or tokens <= 0:
            return
        self.prompt[job.prompt_engine].computed(job, self._bucket(job), min(tokens, job.left))
        if seconds is not None and seconds > 0:
            self._costs.learn(len(job.tokens), seconds / tokens)

    def prefilled(self, attempt: AttemptId) -> None:
        """The prompt is computed; until delivered() its KV is held by the prompt engine."""
        job = self._current(attempt)
        if job is not None and job.prompt_engine is not None and not job.held:
            self.prompt[job.prompt_engine].hold(job, self._bucket(job))

    def queue_seconds(self, prompt_engine: str) -> float:
        """Estimated seconds until this prompt engine has computed what it was given."""
        return self.prompt[prompt_engine].seconds(self._costs)

    # ---- decode ----------------------------------------------------------------------------------

    def assign_decode(self, attempt: AttemptId, exclude: Iterable[str] = ()) -> str | None:
        """Chooses and charges a completion engine: the one whose fuller dimension (requests, KV
        tokens) stays lowest."""
        job = self._current(attempt)
        if job is None:
            return None
        if job.completion_engine is not None:
            return job.completion_engine
        return self._charge(job, exclude)

    def adopt(
        self, part: PartId, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int
    ) -> tuple[AttemptId, str] | None:
        """Takes over a request that decodes already (restored from a snapshot): (attempt,
        completion engine), or None and nothing taken when no completion engine has room. It is not
        retried. Raises ValueError like add()."""
        job = self._add(part, prompt_token_ids, max_tokens)
        job.attempt, job.retryable = 1, False
        name = self._charge(job, ())
        if name is None:
            del self.jobs[part]
            return None
        return job.attempt_id, name

    def _charge(self, job: Job, exclude: Iterable[str]) -> str | None:
        need, excluded = self._decode_tokens(job), set(exclude)
        best, best_key = None, None
        for c in self.completion.values():
            if not c.alive or c.name in excluded:
                continue
            key = c.load_with(min(need, c.capacity.max_len))
            if key[0] <= 1 and (best_key is None or key < best_key):
                best, best_key = c, key
        if best is None:
            return None
        best.take(job, need)
        return best.name

    def release_decode(self, attempt: AttemptId, completion_engine: str | None = None) -> None:
        """The chosen completion engine (if it is still the given one) will not get this request
        after all."""
        job = self._current(attempt)
        if job is not None and completion_engine in (None, job.completion_engine):
            self._leave_completion(job)

    def delivered(self, attempt: AttemptId) -> None:
        """The completion engine has acknowledged: the prompt engine no longer holds the request."""
        job = self._current(attempt)
        if job is not None:
            self._leave_prompt(job)

    def no_retry(self, attempt: AttemptId) -> None:
        """The caller has been given tokens: a failure from now on is final."""
        job = self._current(attempt)
        if job is not None:
            job.retryable = False

    # ---- ends ------------------------------------------------------------------------------------

    def finish(self, attempt: AttemptId) -> PartId | None:
        """The part, if this attempt is the one that answers it; None for late, duplicate and
        cancelled ones."""
        job = self._current(attempt)
        if job is None:
            self.counters["late"] += 1
            return None
        self._drop(job)
        self.counters["finished"] += 1
        return job.part

    def fail(self, attempt: AttemptId, reason: str, retry: bool = True) -> Verdict | None:
        """An attempt has failed: queued again (at the front) or given up. None if it is not the
        current attempt."""
        job = self._current(attempt)
        return None if job is None else self._fail(job, reason, retry, failed=())

    def cancel(self, part: PartId) -> list[tuple[str, AttemptId]]:
        """Ends a part; returns (engine, attempt) of every engine that must drop it. Unknown ids:
        []."""
        job = self.jobs.get(part)
        if job is None:
            return []
        engines_to_notify = [(e, job.attempt_id) for e in job.engines]
        self._drop(job)
        self.counters["cancelled"] += 1
        return engines_to_notify

    def _fail(self, job: Job, reason: str, retry: bool, failed: tuple[str, ...]) -> Verdict:
        attempt = job.attempt_id
        engines_to_notify = tuple(e for e in job.engines if e not in failed)
        poison = job.deaths >= self.config.max_deaths
        if poison:
            self.counters["poison"] += 1
            reason = (
                f"{job.deaths} engines have died while they held this request, it is not given to"
                f" another: {reason}"
            )
        retry = retry and job.retryable and job.attempt < self.config.max_attempts and not poison
        if retry:  # no engine holds it, so it is not current: what comes late finds nothing
            self._leave_prompt(job)
            self._leave_completion(job)
            self.queue.appendleft(job)
            self.counters["retries"] += 1
        else:
            self._drop(job)
            self.counters["failed"] += 1
        return Verdict(job.part, attempt, reason, retry, engines_to_notify)

    def is_current(self, attempt: AttemptId) -> bool:
        """This attempt is being served, and may still answer its request."""
        return self._current(attempt) is not None

    def holders(self, attempt: AttemptId) -> list[str]:
        """Engines that hold this attempt, the prompt engine first; [] if it is not current."""
        job = self._current(attempt)
        return [] if job is None else job.engines

    # ---- bookkeeping -----------------------------------------------------------------------------

    def _current(self, attempt: AttemptId) -> Job | None:
        job = self.jobs.get(attempt.part_id)
        return job if job is not None and job.attempt == attempt.attempt and job.engines else None

    def _drop(self, job: Job) -> None:
        self._leave_prompt(job)
        self._leave_completion(job)
        if job in self.queue:
            self.queue.remove(job)
        del self.jobs[job.part]

    def _leave_prompt(self, job: Job) -> None:
        if job.prompt_engine is not None:
            self.prompt[job.prompt_engine].drop(job, self._bucket(job))

    def _leave_completion(self, job: Job) -> None:
        if job.completion_engine is not None:
            self.completion[job.completion_engine].drop(job, self._decode_tokens(job))

    def _decode_tokens(self, job: Job) -> int:
        share = self.config.expected_output_fraction
        return len(job.tokens) + math.ceil(max(1, job.max_tokens) * share)

    def _bucket(self, job: Job) -> int:
        return self._costs.bucket(len(job.tokens))

    # ---- seen from outside -----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain values: counters, and what every engine holds."""
        return {
            **self.counters,
            "queued": len(self.queue),
            "prompt": {p.name: p.stats(self._costs) for p in self.prompt.values()},
            "completion": {c.name: c.stats() for c in self.completion.values()},
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if the loads are not exactly the sum of the jobs."""
        loads: list[PromptLoad | CompletionLoad]
        loads = [*self.prompt.values(), *self.completion.values()]
        for load in loads:
            assert all(self.jobs.get(part) is job for part, job in load.jobs.items()), load
        for p in self.prompt.values():
            p.check()
        for c in self.completion.values():
            need = (min(self._decode_tokens(j), c.capacity.max_len) for j in c.jobs.values())
            c.check(sum(need))
        assert all(self.jobs.get(j.part) is j and not j.engines for j in self.queue), self.queue
        held = {*self.queue} | {j for load in loads for j in load.jobs.values()}
        assert len(held) == len(self.jobs), f"{len(self.jobs)} requests, {len(held)} somewhere"
