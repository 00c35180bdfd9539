"""Router over N prompt and M completion engines: who prefills a request, who decodes it, when to
wait, what to do on failure.

Bookkeeping only: the caller moves the requests and reports what happened; the same class serves the
in-process runner, the router process and the simulator. Every call is O(engines) or O(what it
returns); it looks at no clock.

Life of a request (ids on the right are attempt ids, `request_id@attempt`, so nothing can find an
older attempt's result):

    add(request_id, prompt_token_ids, max_tokens)   queued in the router
    dispatch() -> [Assignment]                      give it to `prompt_engine`
    assign_decode(attempt) -> engine or None        before its KV moves; None: no room, ask later
    prefill_progress(attempt, tokens, seconds)      a chunk is computed (feeds the time estimate)
    prefilled(attempt)                              its KV waits on the prompt engine
    release_decode(attempt)                         refused or failed: assign_decode() again
    delivered(attempt)                              the prompt engine is free of it
    finish(attempt) -> request_id or None           once per request; None: late or cancelled
    fail(attempt, reason) -> Verdict                queued under a new attempt id, or given up
    cancel(request_id) -> [(engine, attempt)]       both sides, to be notified
    engine_failed(name, reason) -> [Verdict]        for everything it held
    engine_recovered(name)                          brings it back
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Lengths are tokens, times seconds; the bounds are per engine.

    length_buckets: upper bounds of context-length classes (the last class is open); each has its
    own cost per token. max_queued_tokens: prompt tokens given to a prompt engine and not computed
    yet; the rest waits here, to be placed late. max_held_*: requests (and their tokens) a prompt
    engine may have while KV waits there for a completion engine; at the bound it gets no more
    prompts. expected_output_fraction: share of max_tokens counted as decode load (1.0: all of it).
    affinity_block: tokens per entry of the prefix index (0: no affinity); affinity_entries: entries
    kept per engine.
    """

    length_buckets: tuple[int, ...] = (256, 1024, 4096, 16384)
    seconds_per_token: float = 1e-4
    cost_smoothing: float = 0.2
    max_queued_tokens: int = 2**30
    max_held_requests: int = 64
    max_held_tokens: int = 2**30
    max_attempts: int = 3
    expected_output_fraction: float = 1.0
    affinity_block: int = 64
    affinity_entries: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_queued_tokens", "max_held_requests", "max_held_tokens", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError(f"length_buckets must ascend, got {self.length_buckets}")
        if not 0 < self.cost_smoothing <= 1 or self.seconds_per_token <= 0:
            raise ValueError(
                f"cost_smoothing {self.cost_smoothing} must lie in (0, 1], seconds_per_token"
                f" {self.seconds_per_token} be > 0"
            )
        if not 0 <= self.expected_output_fraction <= 1:
            raise ValueError(
                f"expected_output_fraction must lie in [0, 1], got {self.expected_output_fraction}"
            )
        if self.affinity_block < 0 or self.affinity_entries < 1:
            raise ValueError(
                f"affinity_block {self.affinity_block} must be >= 0, affinity_entries"
                f" {self.affinity_entries} >= 1"
            )


@dataclass(frozen=True)
class Capacity:
    """What a completion engine can hold over all its ranks: requests, and tokens of KV; max_len
    limits one request."""

    max_requests: int
    max_tokens: int
    max_len: int = 2**31


@dataclass(frozen=True)
class Assignment:
    request_id: str
    attempt_id: str
    prompt_engine: str


@dataclass(frozen=True)
class Verdict:
    """A failed attempt. retry: the request is queued again; otherwise it has ended, and the caller
    must be told `reason`. engines_to_notify: engines, beside the failed one, that
    still hold the attempt and must cancel it."""

    request_id: str
    attempt_id: str
    reason: str
    retry: bool
    engines_to_notify: tuple[str, ...] = ()


@dataclass(eq=False)
class Job:
    """One request. prompt_engine / completion_engine: who holds it now."""

    request_id: str
    tokens: np.ndarray
    max_tokens: int
    attempt: int = 0
    prompt_engine: str | None = None
    completion_engine: str | None = None
    left: int = 0  # prompt tokens still to compute
    held: bool = False
    retryable: bool = True

    @property
    def attempt_id(self) -> str:
        return f"{self.request_id}@{self.attempt}"


@dataclass(eq=False)
class PromptLoad:
    name: str
    alive: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    held_requests: int = 0
    held_tokens: int = 0
    per_bucket: Counter[int] = field(default_factory=Counter)  # requests by context-length class
    left_per_bucket: Counter[int] = field(
        default_factory=Counter
    )  # prompt tokens still to compute, likewise
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def queued_tokens(self) -> int:
        return self.left_per_bucket.total()


@dataclass(eq=False)
class CompletionLoad:
    name: str
    capacity: Capacity
    alive: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    tokens: int = 0

    def load_with(self, tokens: int) -> tuple[float, float]:
        """(larger, smaller) of the shares of requests and of KV in use if `tokens` more were placed
        here."""
        shares = (
            (len(self.jobs) + 1) / self.capacity.max_requests,
            (self.tokens + tokens) / self.capacity.max_tokens,
        )
        return max(shares), min(shares)


def split_attempt(attempt_id: str) -> tuple[str, int]:
    """ "a@b@2" -> ("a@b", 2)."""
    request_id, _, attempt = attempt_id.rpartition("@")
    return request_id, int(attempt)


class Router:
    """See the module's text. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        prompt_engines: Iterable[str],
        completion_engines: Mapping[str, Capacity],
        config: RouterConfig | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.prompt = {name: PromptLoad(name) for name in prompt_engines}
        self.completion = {
            name: CompletionLoad(name, capacity) for name, capacity in completion_engines.items()
        }
        self._check_engines()
        self.queue: deque[Job] = deque()
        self.jobs: dict[str, Job] = {}
        self._rates = [self.config.seconds_per_token] * (len(self.config.length_buckets) + 1)
        self.counters = {
            "retries": 0,
            "failed": 0,
            "cancelled": 0,
            "finished": 0,
            "late": 0,
            "back_pressure": 0,
        }

    def _check_engines(self) -> None:
        if not self.prompt or not self.completion or self.prompt.keys() & self.completion.keys():
            raise ValueError(
                "need at least one engine of each role, with different names; got"
                f" {list(self.prompt)}, {list(self.completion)}"
            )

    # ---- prefill ---------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int
    ) -> None:
        """Queues a request. Raises ValueError if the id is in use or no completion engine could
        ever hold it."""
        if request_id in self.jobs:
            raise ValueError(f"request {request_id!r}: this id is already in use")
        job = Job(request_id, np.asarray(prompt_token_ids, np.int32), max_tokens)
        need = self._decode_tokens(job)
        if all(need > c.capacity.max_tokens for c in self.completion.values()):
            most = max(c.capacity.max_tokens for c in self.completion.values())
            raise ValueError(
                f"request {request_id!r}: needs KV for {need} tokens, the largest completion engine"
                f" holds {most}"
            )
        self.jobs[request_id] = job
        self.queue.append(job)

    def dispatch(self) -> list[Assignment]:
        """Gives queued requests, in order, to prompt engines; stops when none may take more."""
        out = []
        while self.queue:
            job = self.queue[0]
            load = self._choose_prompt(job)
            if load is None:
                break
            self.queue.popleft()
            self._take(load, job)
            out.append(Assignment(job.request_id, job.attempt_id, load.name))
        return out

    def _choose_prompt(self, job: Job) -> PromptLoad | None:
        """The engine expected to have prefilled the request first; None when every one is at a
        bound."""
        bucket, hashes = self._bucket(len(job.tokens)), list(self._chain(job.tokens))
        best, best_key = None, None
        for load in self.prompt.values():
            if not load.alive or self._at_bound(load, len(job.tokens)):
                continue
            own = max(1, len(job.tokens) - self._hit(load, hashes))
            key = (
                self.queue_seconds(load.name) + own * self._rates[bucket],
                load.per_bucket[bucket],
                len(load.jobs),
            )
            if best_key is None or key < best_key:
                best, best_key = load, key
        if best is None:
            self.counters["back_pressure"] += 1
        return best

    def _at_bound(self, load: PromptLoad, tokens: int) -> bool:
        """It has enough to compute, or KV waits for a completion engine and what is queued would
        come on top of it."""
        c = self.config
        if load.queued_tokens and load.queued_tokens + tokens > c.max_queued_tokens:
            return True
        if not load.held_requests:
            return False
        return (
            len(load.jobs) >= c.max_held_requests
            or load.held_tokens + load.queued_tokens >= c.max_held_tokens
        )

    def _take(self, load: PromptLoad, job: Job) -> None:
        hashes = list(self._chain(job.tokens))
        job.attempt += 1
        job.prompt_engine, job.held = load.name, False
        job.left = max(1, len(job.tokens) - self._hit(load, hashes))
        load.jobs[job.request_id] = job
        bucket = self._bucket(len(job.tokens))
        load.left_per_bucket[bucket] += job.left
        load.per_bucket[bucket] += 1
        for h in hashes:
            load.prefixes[h] = None
            load.prefixes.move_to_end(h)
        while len(load.prefixes) > self.config.affinity_entries:
            load.prefixes.popitem(last=False)

    def prefill_progress(self, attempt_id: str, tokens: int, seconds: float | None = None) -> None:
        """`tokens` more tokens of the prompt are computed; seconds: what they took, if known."""
        job = self._current(attempt_id)
        if job is None or job.prompt_engine is None or job.held or tokens <= 0:
            return
        self._uncount(job, min(tokens, job.left))
        if seconds is not None and seconds > 0:
            bucket = self._bucket(len(job.tokens))
            self._rates[bucket] += self.config.cost_smoothing * (
                seconds / tokens - self._rates[bucket]
            )

    def prefilled(self, attempt_id: str) -> None:
        """The prompt is computed; until delivered() its KV is held by the prompt engine."""
        job = self._current(attempt_id)
        if job is None or job.prompt_engine is None or job.held:
            return
        load = self.prompt[job.prompt_engine]
        self._uncount(job, job.left)
        job.held = True
        load.held_requests += 1
        load.held_tokens += len(job.tokens)

    def queue_seconds(self, prompt_engine: str) -> float:
        """Estimated seconds until this prompt engine has computed what it was given."""
        return sum(
            tokens * self._rates[bucket]
            for bucket, tokens in self.prompt[prompt_engine].left_per_bucket.items()
        )

    # ---- decode ----------------------------------------------------------------------------------

    def assign_decode(self, attempt_id: str, exclude: Iterable[str] = ()) -> str | None:
        """Chooses and charges a completion engine: the one whose fuller dimension (requests, KV
        tokens) stays lowest."""
        job = self._current(attempt_id)
        if job is None:
            return None
        if job.completion_engine is not None:
            return job.completion_engine
        return self._charge(job, exclude)

    def resume(
        self, request_id: str, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int
    ) -> tuple[str, str] | None:
        """Takes over a request that decodes already (restored from a snapshot): (attempt id,
        completion engine), or None and nothing taken when no completion engine has room. It is not
        retried. Raises ValueError like add()."""
        self.add(request_id, prompt_token_ids, max_tokens)
        job = self.queue.pop()
        job.attempt, job.retryable = 1, False
        name = self._charge(job, ())
        if name is None:
            del self.jobs[request_id]
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
        job.completion_engine = best.name
        best.jobs[job.request_id] = job
        best.tokens += min(need, best.capacity.max_len)
        return best.name

    def release_decode(self, attempt_id: str, completion_engine: str | None = None) -> None:
        """The chosen completion engine (if it is still the given one) will not get this request
        after all."""
        job = self._current(attempt_id)
        if job is not None and completion_engine in (None, job.completion_engine):
            self._leave_completion(job)

    def delivered(self, attempt_id: str) -> None:
        """The completion engine has acknowledged: the prompt engine no longer holds the request."""
        job = self._current(attempt_id)
        if job is not None:
            self._leave_prompt(job)

    def no_retry(self, attempt_id: str) -> None:
        """The caller has been given tokens: a failure from now on is final."""
        job = self._current(attempt_id)
        if job is not None:
            job.retryable = False

    # ---- ends ------------------------------------------------------------------------------------

    def finish(self, attempt_id: str) -> str | None:
        """The request's id if this attempt is the one that answers it; None for late, duplicate and
        cancelled ones."""
        job = self._current(attempt_id)
        if job is None:
            self.counters["late"] += 1
            return None
        self._drop(job)
        self.counters["finished"] += 1
        return job.request_id

    def fail(self, attempt_id: str, reason: str, retry: bool = True) -> Verdict | None:
        """An attempt has failed: queued again (at the front) or given up. None if it is not the
        current attempt."""
        job = self._current(attempt_id)
        return None if job is None else self._fail(job, reason, retry, failed=())

    def cancel(self, request_id: str) -> list[tuple[str, str]]:
        """Ends a request; returns (engine, attempt id) of every engine that must drop it. Unknown
        ids: []."""
        job = self.jobs.get(request_id)
        if job is None:
            return []
        engines_to_notify = [
            (e, job.attempt_id) for e in (job.prompt_engine, job.completion_engine) if e is not None
        ]
        self._drop(job)
        self.counters["cancelled"] += 1
        return engines_to_notify

    def engine_failed(self, name: str, reason: str) -> list[Verdict]:
        """An engine is gone: one verdict per request it held. It gets nothing more until
        engine_recovered(name)."""
        load = self.prompt.get(name) or self.completion[name]
        load.alive = False
        if isinstance(load, PromptLoad):
            load.prefixes.clear()
        return [self._fail(job, reason, True, failed=(name,)) for job in list(load.jobs.values())]

    def engine_recovered(self, name: str) -> None:
        (self.prompt.get(name) or self.completion[name]).alive = True

    def alive(self) -> tuple[list[str], list[str]]:
        """Names of the living (prompt, completion) engines."""
        return [p.name for p in self.prompt.values() if p.alive], [
            c.name for c in self.completion.values() if c.alive
        ]

    def _fail(self, job: Job, reason: str, retry: bool, failed: tuple[str, ...]) -> Verdict:
        attempt_id = job.attempt_id
        engines_to_notify = tuple(
            e
            for e in (job.prompt_engine, job.completion_engine)
            if e is not None and e not in failed
        )
        retry = (
            retry and job.retryable and job.attempt < self.config.max_attempts and self._may_retry()
        )
        if (
            retry
        ):  # held by no engine it is not current: what arrives late for this attempt finds nothing
            self._leave_prompt(job)
            self._leave_completion(job)
            self.queue.appendleft(job)
            self.counters["retries"] += 1
        else:
            self._drop(job)
            self.counters["failed"] += 1
        return Verdict(job.request_id, attempt_id, reason, retry, engines_to_notify)

    def is_current(self, attempt_id: str) -> bool:
        """This attempt is being served, and may still answer its request."""
        return self._current(attempt_id) is not None

    def _may_retry(self) -> bool:
        """Whether a failed attempt has anywhere to go."""
        return all(self.alive())

    # ---- bookkeeping -----------------------------------------------------------------------------

    def _current(self, attempt_id: str) -> Job | None:
        request_id, attempt = split_attempt(attempt_id)
        job = self.jobs.get(request_id)
        if (
            job is None
            or job.attempt != attempt
            or (job.prompt_engine is None and job.completion_engine is None)
        ):
            return None
        return job

    def _drop(self, job: Job) -> None:
        self._leave_prompt(job)
        self._leave_completion(job)
        if job in self.queue:
            self.queue.remove(job)
        del self.jobs[job.request_id]

    def _leave_prompt(self, job: Job) -> None:
        if job.prompt_engine is None:
            return
        load = self.prompt[job.prompt_engine]
        if job.held:
            load.held_requests -= 1
            load.held_tokens -= len(job.tokens)
            job.held = False
        self._uncount(job, job.left)
        bucket = self._bucket(len(job.tokens))
        load.per_bucket[bucket] -= 1
        del load.jobs[job.request_id]
        job.prompt_engine = None

    def _leave_completion(self, job: Job) -> None:
        if job.completion_engine is None:
            return
        load = self.completion[job.completion_engine]
        load.tokens -= min(self._decode_tokens(job), load.capacity.max_len)
        del load.jobs[job.request_id]
        job.completion_engine = None

    def _uncount(self, job: Job, tokens: int) -> None:
        load = self.prompt[job.prompt_engine]
        job.left -= tokens
        load.left_per_bucket[self._bucket(len(job.tokens))] -= tokens

    def _decode_tokens(self, job: Job) -> int:
        return len(job.tokens) + math.ceil(
            max(1, job.max_tokens) * self.config.expected_output_fraction
        )

    def _bucket(self, length: int) -> int:
        return bisect_left(self.config.length_buckets, length)

    def _chain(self, tokens: np.ndarray) -> Iterator[int]:
        """Hashes of the whole leading blocks, each over everything before it. A hint only: engines
        compare tokens."""
        size, parent = self.config.affinity_block, 0
        if not size:
            return
        for end in range(size, len(tokens), size):
            parent = hash((parent, tokens[end - size : end].tobytes()))
            yield parent

    def _hit(self, load: PromptLoad, hashes: list[int]) -> int:
        count = 0
        for h in hashes:
            if h not in load.prefixes:
                break
            count += 1
        return count * self.config.affinity_block

    # ---- seen from outside -----------------------------------------------------------------------

    def stats(self) -> dict:
        return {
            **self.counters,
            "queued": len(self.queue),
            "prompt": {
                p.name: {
                    "alive": p.alive,
                    "requests": len(p.jobs),
                    "queued_tokens": p.queued_tokens,
                    "queued_seconds": self.queue_seconds(p.name),
                    "held_requests": p.held_requests,
                    "held_tokens": p.held_tokens,
                }
                for p in self.prompt.values()
            },
            "completion": {
                c.name: {"alive": c.alive, "requests": len(c.jobs), "tokens": c.tokens}
                for c in self.completion.values()
            },
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if the loads are not exactly the sum of the jobs."""
        for p in self.prompt.values():
            assert all(
                self.jobs.get(i) is j and j.prompt_engine == p.name for i, j in p.jobs.items()
            ), p
            assert p.queued_tokens == sum(j.left for j in p.jobs.values()), p
            held = [j for j in p.jobs.values() if j.held]
            assert (p.held_requests, p.held_tokens) == (
                len(held),
                sum(len(j.tokens) for j in held),
            ), p
            assert sum(p.per_bucket.values()) == len(p.jobs), p
        for c in self.completion.values():
            assert all(
                self.jobs.get(i) is j and j.completion_engine == c.name for i, j in c.jobs.items()
            ), c
            assert c.tokens == sum(
                min(self._decode_tokens(j), c.capacity.max_len) for j in c.jobs.values()
            ), c
        for job in self.queue:
            assert (
                self.jobs.get(job.request_id) is job
                and job.prompt_engine is None
                and job.completion_engine is None
            ), job
        held = {*self.queue} | {j for p in self.prompt.values() for j in p.jobs.values()}
        held |= {j for c in self.completion.values() for j in c.jobs.values()}
        assert len(held) == len(self.jobs), f"{len(self.jobs)} requests, {len(held)} somewhere"
