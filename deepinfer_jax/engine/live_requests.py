"""The requests an engine has taken and not answered to the end."""

from __future__ import annotations

from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.scheduler.sequence import Sequence


class LiveRequests:
    """Requests by their id; completions and ranks by the id of their sequence.

    A rank stays known until the sequence has given its blocks back, which may be after its request
    has been answered.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.completions: dict[str, Completion] = {}
        self._ranks: dict[str, int] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.requests

    def add(self, request: Request) -> None:
        """Takes a request in; those of its completions that have not ended hold a rank."""
        self.requests[request.request_id] = request
        for c in request.completions:
            self.completions[c.seq.request_id] = c
            if not c.finished:
                self._ranks[c.seq.request_id] = c.rank

    def forget(self, request: Request) -> None:
        """The request is answered, or another engine's now."""
        self.requests.pop(request.request_id, None)
        for c in request.completions:
            self.completions.pop(c.seq.request_id, None)

    def of(self, seq: Sequence) -> Completion:
        """The completion a sequence serves; KeyError once its request is forgotten."""
        return self.completions[seq.request_id]

    def find(self, seq: Sequence) -> Completion | None:
        return self.completions.get(seq.request_id)

    def rank_of(self, seq: Sequence) -> int:
        """Index of the local rank that owns a sequence."""
        return self._ranks[seq.request_id]

    def drop_rank(self, seq: Sequence) -> int | None:
        """The sequence holds nothing any more; the rank it had, None if that is known already."""
        return self._ranks.pop(seq.request_id, None)
