"""An engine for asyncio: one thread steps it, every request has a queue of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepinfer_jax.engine.admission import PromptInput
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.serve.errors import ApiError

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""How long the stepping thread may take to notice that it is to end."""


class AsyncEngine:
    """Requests from coroutines to an engine of `LLM` (local, disaggregated or a router's).

    The event loop never waits for a step: requests are added and aborted on threads, because an
    engine takes them between steps. A reader that does not read holds nobody up: its queue grows,
    by one request's tokens at most.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._queues: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._sizes: dict[str, int] = {}  # completions of each
        self._serial = itertools.count()
        self._wake = threading.Event()
        self._stopped = False
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="serve-add")
        self._thread = threading.Thread(target=self._run, name="serve-step", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    @property
    def num_completions(self) -> int:
        """Unfinished ones: a request has n."""
        return sum(self._sizes.values())

    def start(self) -> None:
        """Call it from the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def drained(self) -> None:
        """Returns once no request is left."""
        while self._queues:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Ends the stepping thread; requests that are left get no more outputs."""
        self._stopped = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        self._end_all()
        self._threads.shutdown(wait=False)

    async def generate(
        self, prompt: PromptInput, params: SamplingParams, kind: str
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; closing the iterator early aborts the request. kind: the beginning
        of its id.

        Raises ValueError for a request that the engine refuses, ApiError 503 when it has failed.
        """
        request_id = f"{kind}-{next(self._serial)}"
        box: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        if self.failure is not None or self._stopped:
            raise ApiError(f"the engine has ended: {self.failure or 'shutting down'}", status=503)
        self._queues[request_id], self._sizes[request_id] = box, params.n
        finished = False
        added = self._on_thread(self.engine.add_request, request_id, prompt, params)
        try:
            await asyncio.shield(added)
            self._wake.set()
            while not finished:
                output = await box.get()
                if output is None:
                    reason = self.failure or "shutting down"
                    raise ApiError(f"the engine has ended: {reason}", status=503)
                finished = output.finished
                yield output
        except RuntimeError as error:  # the router is lost, no engine is left
            raise ApiError(str(error), status=503) from error
        finally:
            del self._queues[request_id], self._sizes[request_id]
            if not finished:  # an abort must not overtake what it ends
                added.add_done_callback(lambda _: self._threads.submit(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        with contextlib.suppress(Exception):
            self.engine.abort_request(request_id)
            self._wake.set()

    def _on_thread(self, function: Any, *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    # ---- the stepping thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                if not self.engine.has_unfinished_requests():
                    self._wake.wait()
                    self._wake.clear()
                    continue
                outputs = self.engine.step()
                if outputs:
                    self._call(self._deliver, outputs)
        except Exception as error:
            logger.exception("the engine failed; every request ends, /health says so")
            self.failure = f"{type(error).__name__}: {error}"
            self._call(self._end_all)

    def _call(self, function: Any, *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            box = self._queues.get(output.request_id)
            if box is not None:
                box.put_nowait(output)

    def _end_all(self) -> None:
        for box in self._queues.values():
            box.put_nowait(None)
