"""How a prompt engine asks its router, in another process, what its coordinator would say: answers
come a moment later."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_jax.rpc import messages as wire


class RouterPlacement:
    """A pd_engines.PromptCoordinator. Everything runs in the engine's thread; `send` may be called
    from any."""

    def __init__(
        self, send: Callable[[wire.WireMessage], None], has_links: Callable[[], bool]
    ) -> None:
        self._send, self._has_links = send, has_links
        self._asked: dict[str, frozenset[str]] = {}
        self._answers: dict[str, str | None] = {}

    def choose_target(self, key: str, exclude: set[str]) -> str | None:
        """The router's answer once it is there; None until then, and while nobody has room."""
        target = self._answers.get(key)
        if target is not None:
            self.forget(key)
            return target
        wanted = frozenset(exclude)
        if key not in self._asked or (key in self._answers and self._asked[key] != wanted):
            self._answers.pop(key, None)
            self._asked[key] = wanted
            self._send(wire.Place(key, sorted(wanted)))
        return None

    def placed(self, key: str, target: str | None) -> None:
        if key in self._asked:
            self._answers[key] = target

    def forget(self, key: str) -> None:
        self._asked.pop(key, None)
        self._answers.pop(key, None)

    def unchoose_target(self, key: str, target: str) -> None:
        self.forget(key)
        self._send(wire.Unplace(key, target))

    def prefill_progress(self, key: str, tokens: int, seconds: float) -> None:
        self._send(wire.Progress(key, tokens, seconds))

    def prefilled(self, key: str) -> None:
        self._send(wire.Prefilled(key))

    def handed_over(self, key: str, target: str) -> None:
        self.forget(key)
        self._send(wire.HandedOver(key, target))

    def hand_over_failed(self, key: str, reason: str, retry: bool) -> None:
        self.forget(key)
        self._send(
            wire.HandOverFailed(key, reason, retry or not self._has_links())
        )  # another one may join
