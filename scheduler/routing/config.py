"""What a router is told: its bounds, and what a completion engine can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Lengths are tokens, times seconds; the bounds are per engine.

    length_buckets: upper bounds of context-length classes (the last class is open).
    Each has its own cost per token.
    max_queued_tokens: prompt tokens given to a prompt engine and not computed yet.
    The rest waits in the router, to be placed late.
    max_held_*: requests (and their tokens) a prompt engine may have while KV waits there for a
    completion engine. At the bound it gets no more prompts.
    max_deaths: engines that may die while they hold a request. At the bound it is taken for the
    cause, and ends.
    expected_output_fraction: share of max_tokens counted as decode load (1.0: all of it).
    affinity_block: tokens per entry of the prefix index (0: no affinity).
    affinity_entries: entries kept per engine.
    """

    length_buckets: tuple[int, ...] = (256, 1024, 4096, 16384)
    seconds_per_token: float = 1e-4
    cost_smoothing: float = 0.2
    max_queued_tokens: int = 2**30
    max_held_requests: int = 64
    max_held_tokens: int = 2**30
    max_attempts: int = 3
    max_deaths: int = 2
    expected_output_fraction: float = 1.0
    affinity_block: int = 64
    affinity_entries: int = 8192

    def __post_init__(self) -> None:
        for name in (
            "max_queued_tokens",
            "max_held_requests",
            "max_held_tokens",
            "max_attempts",
            "max_deaths",
        ):
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

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"capacity: {name} must be >= 1, got {getattr(self, name)}")
