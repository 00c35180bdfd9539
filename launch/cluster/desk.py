"""Where prompt engines in other processes ask a router for a completion engine."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.scheduler.routing.ids import AttemptId


class PlacementDesk:
    """Answers at once, and again when there is room for who found none."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._waiting: dict[AttemptId, tuple[Callable[[wire.Assigned], None], set[str]]] = {}

    def ask(
        self, attempt: AttemptId, exclude: set[str], reply: Callable[[wire.Assigned], None]
    ) -> None:
        target = self._coordinator.assign_decode(attempt, exclude)
        if target is None and self._coordinator.current(attempt) is not None:
            self._waiting[attempt] = (reply, exclude)
        else:
            self._waiting.pop(attempt, None)
        reply(wire.Assigned(attempt, target))

    def answer_waiting(self) -> None:
        """Room may have been made: those who wait for a place, in the order they asked."""
        for attempt, (reply, exclude) in list(self._waiting.items()):
            if self._coordinator.current(attempt) is None:
                del self._waiting[attempt]
                continue
            target = self._coordinator.assign_decode(attempt, exclude)
            if target is not None:
                del self._waiting[attempt]
                reply(wire.Assigned(attempt, target))
