"""A router whose engines come and go: the one a router process uses. Requests wait while a role is
missing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from deepinfer_jax.scheduler.routing.router import (
    Assignment,
    Capacity,
    CompletionLoad,
    Job,
    PromptLoad,
    Router,
    RouterConfig,
    Verdict,
)


class ElasticRouter(Router):
    """Starts empty. NORMAL engines join as prompt engines that answer everything themselves
    (`needs_completion` False)."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        super().__init__((), {}, config)
        self.needs_completion = True

    def _check_engines(self) -> None:
        pass

    def _may_retry(self) -> bool:
        return True  # it waits until somebody joins, or its owner gives it up

    # ---- engines ---------------------------------------------------------------------------------

    def join(self, name: str, capacity: Capacity | None = None) -> None:
        """A prompt engine (capacity None) or a completion engine. ValueError if the
        name is taken."""
        if name in self.prompt or name in self.completion:
            raise ValueError(f"the name {name!r} is taken")
        if capacity is None:
            self.prompt[name] = PromptLoad(name)
        else:
            self.completion[name] = CompletionLoad(name, capacity)

    def leave(self, name: str, reason: str) -> list[Verdict]:
        """It is gone, and forgotten: one verdict per request it held. [] for an unknown name."""
        if name not in self.prompt and name not in self.completion:
            return []
        verdicts = self.engine_failed(name, reason)
        (self.prompt if name in self.prompt else self.completion).pop(name)
        return verdicts

    def drain(self, name: str) -> None:
        """It keeps what it has and gets nothing new."""
        load = self.prompt.get(name) or self.completion.get(name)
        if load is not None:
            load.alive = False

    def resume(self, name: str) -> None:
        """Takes back `drain`."""
        load = self.prompt.get(name) or self.completion.get(name)
        if load is not None:
            load.alive = True

    def missing(self) -> tuple[str, ...]:
        """Roles without a living engine."""
        prompt, completion = self.alive()
        if not self.needs_completion:
            return () if prompt else ("normal",)
        return tuple(
            role for role, names in (("prompt", prompt), ("completion", completion)) if not names
        )

    def starved(self) -> list[Job]:
        """Requests that cannot go on because of a missing role."""
        missing = self.missing()
        if not missing:
            return []
        if "completion" in missing:
            return [j for j in self.jobs.values() if j.completion_engine is None]
        return list(self.queue)

    # ---- requests --------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt_token_ids: Seq[int] | np.ndarray, max_tokens: int
    ) -> None:
        if self.needs_completion and self.completion:
            super().add(request_id, prompt_token_ids, max_tokens)
            return
        if request_id in self.jobs:
            raise ValueError(f"request {request_id!r}: this id is already in use")
        job = Job(request_id, np.asarray(prompt_token_ids, np.int32), max_tokens)
        self.jobs[request_id] = job
        self.queue.append(job)

    def dispatch(self) -> list[Assignment]:
        return [] if self.missing() else super().dispatch()
