"""How a prompt engine asks its router, in another process, which completion engine takes a request:
the answers come a moment later."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.scheduler.routing.ids import AttemptId


class RouterPlacement:
    """A prompt engine's Placement. Everything runs in the engine's thread; `send` may be called
    from any."""

    def __init__(
        self, send: Callable[[wire.WireMessage], None], has_links: Callable[[], bool]
    ) -> None:
        self._send, self._has_links = send, has_links
        self._asked: dict[AttemptId, frozenset[str]] = {}
        self._answers: dict[AttemptId, str | None] = {}

    def assign_decode(self, attempt: AttemptId, exclude: set[str]) -> str | None:
        """The router's answer once it is there; None until then, and while nobody has room."""
        target = self._answers.get(attempt)
        if target is not None:
            self.forget(attempt)
            return target
        wanted = frozenset(exclude)
        if attempt not in self._asked or (
            attempt in self._answers and self._asked[attempt] != wanted
        ):
            self._answers.pop(attempt, None)
            self._asked[attempt] = wanted
            self._send(wire.AssignDecode(attempt, sorted(wanted)))
        return None

    def assigned(self, attempt: AttemptId, target: str | None) -> None:
        if attempt in self._asked:
            self._answers[attempt] = target

    def forget(self, attempt: AttemptId) -> None:
        self._asked.pop(attempt, None)
        self._answers.pop(attempt, None)

    def release_decode(self, attempt: AttemptId, target: str) -> None:
        self.forget(attempt)
        self._send(wire.ReleaseDecode(attempt, target))

    def prefill_progress(self, attempt: AttemptId, tokens: int, seconds: float) -> None:
        self._send(wire.Progress(attempt, tokens, seconds))

    def prefilled(self, attempt: AttemptId) -> None:
        self._send(wire.Prefilled(attempt))

    def handed_over(self, attempt: AttemptId, target: str) -> None:
        self.forget(attempt)
        self._send(wire.HandedOver(attempt, target))

    def hand_over_failed(self, attempt: AttemptId, reason: str, retry: bool) -> None:
        self.forget(attempt)
        retry = retry or not self._has_links()  # another completion engine may join
        self._send(wire.HandOverFailed(attempt, reason, retry))
