"""Several callers of one engine: each gets the outputs of its own requests, whoever steps.

Imports: outputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from deepinfer_jax.outputs import RequestOutput


class Stepped(Protocol):
    """What calls need of an engine."""

    @property
    def num_unfinished_requests(self) -> int: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


class Calls:
    """Hands every output of `engine.step()` to the call that the request belongs to.

    One caller at a time steps, whichever finds nothing in its box; the others wait for what it
    brings. So calls may overlap: in threads, or one opened while the iterator of another rests.
    Outputs of requests that no call has opened are dropped: their call was abandoned.
    """

    def __init__(self, engine: Stepped) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._stepping = False
        self._boxes: dict[str, deque[RequestOutput]] = {}

    def open(self, ids: Iterable[str]) -> deque[RequestOutput]:
        """A box for the outputs of these requests; call it before they are queued."""
        box: deque[RequestOutput] = deque()
        with self._changed:
            self._boxes.update(dict.fromkeys(ids, box))
        return box

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Nobody steps inside: for what makes requests known whose ids the engine chooses."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def close(self, ids: Iterable[str]) -> None:
        """Nobody asks for these requests any more."""
        with self._changed:
            for request_id in ids:
                self._boxes.pop(request_id, None)

    def outputs(self, ids: Iterable[str], box: deque[RequestOutput]) -> Iterator[RequestOutput]:
        """Outputs of a call's requests as they come, until every one of them has ended."""
        left = set(ids)
        while left:
            output = self._next(box)
            if output is None:
                continue
            if output.finished:
                left.discard(output.request_id)
            yield output
        self.drain()

    def drain(self) -> None:
        """Lets ended sequences give their blocks back, where nothing else is going on."""
        engine = self._engine
        while engine.num_unfinished_requests == 0 and engine.has_unfinished_requests():
            with self._changed:
                if self._stepping:
                    return  # whoever steps now drains after its own requests
                self._stepping = True
            self._step()

    def _next(self, box: deque[RequestOutput]) -> RequestOutput | None:
        """The box's next output; None after a step that brought none."""
        with self._changed:
            while not box and self._stepping:
                self._changed.wait()
            if box:
                return box.popleft()
            self._stepping = True
        self._step()
        return None

    def _step(self) -> None:
        """One step; its outputs go into the boxes. The caller has set `_stepping`."""
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.step()
        finally:
            with self._changed:
                self._stepping = False
                for output in outputs:
                    box = self._boxes.get(output.request_id)
                    if box is not None:
                        box.append(output)
                    if output.finished:
                        self._boxes.pop(output.request_id, None)
                self._changed.notify_all()
