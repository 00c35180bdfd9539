"""What a router knows of each request and of each engine: who holds what, and how much that is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.scheduler.routing.config import Capacity, RouterConfig
from deepinfer_jax.scheduler.routing.ids import AttemptId, PartId


@dataclass(eq=False)
class Job:
    """One completion on its way. prompt_engine / completion_engine: who holds it now."""

    part: PartId
    tokens: np.ndarray  # int32 [prompt tokens]
    max_tokens: int
    attempt: int = 0
    prompt_engine: str | None = None
    completion_engine: str | None = None
    left: int = 0  # prompt tokens still to compute
    held: bool = False  # the prompt is computed, its KV waits on the prompt engine
    retryable: bool = True
    deaths: int = 0  # engines that have died while they held it

    @property
    def attempt_id(self) -> AttemptId:
        return self.part.attempt(self.attempt)

    @property
    def engines(self) -> list[str]:
        """Who holds it, the prompt engine first."""
        return [e for e in (self.prompt_engine, self.completion_engine) if e is not None]


@dataclass(frozen=True)
class Assignment:
    part: PartId
    attempt: AttemptId
    prompt_engine: str


@dataclass(frozen=True)
class Verdict:
    """A failed attempt. retry: the part is queued again; otherwise it has ended, and the caller
    must be told `reason`. engines_to_notify: engines, beside the failed one, that still hold the
    attempt and must cancel it."""

    part: PartId
    attempt: AttemptId
    reason: str
    retry: bool
    engines_to_notify: tuple[str, ...] = ()


class PrefillCosts:
    """Seconds per prompt token, learned per context-length class."""

    def __init__(self, config: RouterConfig) -> None:
        self._bounds, self._smoothing = config.length_buckets, config.cost_smoothing
        self.rates = [config.seconds_per_token] * (len(config.length_buckets) + 1)

    def bucket(self, length: int) -> int:
        return bisect_left(self._bounds, length)

    def learn(self, length: int, seconds_per_token: float) -> None:
        bucket = self.bucket(length)
        self.rates[bucket] += self._smoothing * (seconds_per_token - self.rates[bucket])


@dataclass(eq=False)
class PromptLoad:
    name: str
    alive: bool = True
    jobs: dict[PartId, Job] = field(default_factory=dict)
    held_requests: int = 0
    held_tokens: int = 0
    per_bucket: Counter[int] = field(default_factory=Counter)  # requests by context-length class
    left_per_bucket: Counter[int] = field(default_factory=Counter)  # tokens to compute, likewise
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def queued_tokens(self) -> int:
        return self.left_per_bucket.total()

    def seconds(self, costs: PrefillCosts) -> float:
        """Estimated, until it has computed what it was given."""
        return sum(tokens * costs.rates[bucket] for bucket, tokens in self.left_per_bucket.items())

    def at_bound(self, c: RouterConfig, tokens: int) -> bool:
        """It has enough to compute, or KV waits for a completion engine and what is queued would
        come on top of it."""
        if self.queued_tokens and self.queued_tokens + tokens > c.max_queued_tokens:
            return True
        if not self.held_requests:
            return False
        return (
            len(self.jobs) >= c.max_held_requests
            or self.held_tokens + self.queued_tokens >= c.max_held_tokens
        )

    def take(self, job: Job, bucket: int, hit_tokens: int) -> None:
        job.prompt_engine, job.held = self.name, False
        job.left = max(1, len(job.tokens) - hit_tokens)
        self.jobs[job.part] = job
        self.left_per_bucket[bucket] += job.left
        self.per_bucket[bucket] += 1

    def computed(self, job: Job, bucket: int, tokens: int) -> None:
        job.left -= tokens
        self.left_per_bucket[bucket] -= tokens

    def hold(self, job: Job, bucket: int) -> None:
        """Its prompt is computed; its KV stays until somebody takes it."""
        self.computed(job, bucket, job.left)
        job.held = True
        self.held_requests += 1
        self.held_tokens += len(job.tokens)

    def drop(self, job: Job, bucket: int) -> None:
        if job.held:
            self.held_requests -= 1
            self.held_tokens -= len(job.tokens)
            job.held = False
        self.computed(job, bucket, job.left)
        self.per_bucket[bucket] -= 1
        del self.jobs[job.part]
        job.prompt_engine = None

    def hit_tokens(self, hashes: Sequence[int], block: int) -> int:
        """Leading tokens of a prompt that it has probably computed before."""
        count = 0
        for h in hashes:
            if h not in self.prefixes:
                break
            count += 1
        return count * block

    def remember(self, hashes: Sequence[int], limit: int) -> None:
        for h in hashes:
            self.prefixes[h] = None
            self.prefixes.move_to_end(h)
        while len(self.prefixes) > limit:
            self.prefixes.popitem(last=False)

    def stats(self, costs: PrefillCosts) -> dict[str, Any]:
        return {
            "alive": self.alive,
            "requests": len(self.jobs),
            "queued_tokens": self.queued_tokens,
            "queued_seconds": self.seconds(costs),
            "held_requests": self.held_requests,
            "held_tokens": self.held_tokens,
        }

    def check(self) -> None:
        """Raises AssertionError if the sums are not those of its jobs."""
        held = [j for j in self.jobs.values() if j.held]
        assert all(j.prompt_engine == self.name for j in self.jobs.values()), self
        assert self.queued_tokens == sum(j.left for j in self.jobs.values()), self
        sums = (len(held), sum(len(j.tokens) for j in held))
        assert (self.held_requests, self.held_tokens) == sums, self
        assert sum(self.per_bucket.values()) == len(self.jobs), self


@dataclass(eq=False)
class CompletionLoad:
    name: str
    capacity: Capacity
    alive: bool = True
    jobs: dict[PartId, Job] = field(default_factory=dict)
    tokens: int = 0

    def load_with(self, tokens: int) -> tuple[float, float]:
        """(larger, smaller) of the shares of requests and of KV in use if `tokens` more were placed
        here."""
        shares = (
            (len(self.jobs) + 1) / self.capacity.max_requests,
            (self.tokens + tokens) / self.capacity.max_tokens,
        )
        return max(shares), min(shares)

    def take(self, job: Job, tokens: int) -> None:
        job.completion_engine = self.name
        self.jobs[job.part] = job
        self.tokens += min(tokens, self.capacity.max_len)

    def drop(self, job: Job, tokens: int) -> None:
        self.tokens -= min(tokens, self.capacity.max_len)
        del self.jobs[job.part]
        job.completion_engine = None

    def stats(self) -> dict[str, Any]:
        return {"alive": self.alive, "requests": len(self.jobs), "tokens": self.tokens}

    def check(self, tokens: int) -> None:
        """tokens: the sum over its jobs, as `take` was told."""
        assert all(j.completion_engine == self.name for j in self.jobs.values()), self
        assert self.tokens == tokens, self


def prefix_chain(tokens: np.ndarray, block: int) -> Iterator[int]:
    """Hashes of the whole leading blocks of int32 [tokens], each over everything before it. A hint
    only: engines compare tokens."""
    if not block:
        return
    parent = 0
    for end in range(block, len(tokens), block):
        parent = hash((parent, tokens[end - block : end].tobytes()))
        yield parent
