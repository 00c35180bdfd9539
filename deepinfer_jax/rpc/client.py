"""A client of a router in another process, with the methods of LLMEngine that `LLM` uses:
`LLM(router="host:port")`.

Requests are checked and tokenised here, text is made by the engines. Every request ends exactly
once: with its result, or, when the router is lost, with finish_reason "error" and the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.engine.admission import Admission, PromptInput, RequestLimits
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import Channel, HubConfig
from deepinfer_jax.rpc.endpoint import as_endpoint
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams

WAIT_SECONDS = 0.2
"""Seconds step() waits for outputs."""
REDIAL_SECONDS = 0.5


class RouterConnection:
    """A client's channel to a router: connects, sends, collects messages. Thread-safe."""

    def __init__(
        self, router: str, secret: bytes | str | Path | None = None, hub: HubConfig | None = None
    ) -> None:
        """secret: the secret itself as bytes, or the path of a file that holds it."""
        security = Security(secret) if isinstance(secret, bytes) else Security.from_file(secret)
        self.router = as_endpoint(router)
        self.hub = Hub("client", security, hub or HubConfig(max_frame=64 << 20)).start()
        self.channel: Channel | None = None
        self.inbox: queue.SimpleQueue[wire.WireMessage] = queue.SimpleQueue()
        self.statuses: queue.SimpleQueue[wire.StatusReply] = queue.SimpleQueue()
        self.asking = threading.Lock()
        self.lost_reason: str | None = None
        self._event = threading.Event()
        self._model: wire.ModelInfo | None = None
        self._final = False

    def connect(self, timeout: float, need_model: bool = True) -> wire.ModelInfo | None:
        """Returns what the router says of the deployment's model; waits for the router and, with
        need_model, for an engine.

        ConnectionError, with the reason, if that takes longer than `timeout` seconds or the router
        refuses.
        """
        deadline = time.monotonic() + timeout
        reason = "no answer"
        while time.monotonic() < deadline:
            self._event.clear()
            self.lost_reason = None
            name = f"client-{threading.get_native_id()}"
            self.hub.dial(self.router, wire.Hello(wire.PROTOCOL, "client", name), self)
            self._event.wait(max(0.0, deadline - time.monotonic()))
            if self.lost_reason is None and self.channel is not None:
                if self._model is not None or not need_model:
                    return self._model
                self.channel.close("will ask again")
                self.channel = None
            reason = self.lost_reason or "no engine has joined it"
            if self._final:
                break
            time.sleep(min(REDIAL_SECONDS, max(0.0, deadline - time.monotonic())))
        self.hub.stop(0)
        raise ConnectionError(f"router {self.router}: {reason}")

    def send(self, message: wire.WireMessage) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close("closed by the client")
        self.hub.stop(0.2)

    # ---- Handler ---------------------------------------------------------------------------------

    def opened(self, channel: Channel, welcome: wire.Welcome) -> None:
        self.channel, self._model = channel, welcome.model
        self._event.set()

    def message(self, channel: Channel, message: wire.WireMessage, frames: Sequence[Any]) -> None:
        if isinstance(message, wire.StatusReply):
            self.statuses.put(message)
        else:
            self.inbox.put(message)

    def lost(self, channel: Channel, reason: str, final: bool) -> None:
        if self.channel is None or self.channel is channel:
            self.lost_reason, self._final = reason, final
            self._event.set()


class RemoteEngine:
    """Not an engine, but used like one by `LLM`."""

    def __init__(
        self,
        router: str,
        model: str | None = None,
        tokenizer: str | None = None,
        *,
        secret: bytes | str | Path | None = None,
        connect_timeout: float = 30.0,
        hub: HubConfig | None = None,
    ) -> None:
        """model: where the tokenizer is read from; None: where the engines read theirs, if that
        path exists here (without a tokenizer, prompts must be token ids). Raises ConnectionError if
        there is no deployment within connect_timeout seconds."""
        self.connection = RouterConnection(router, secret, hub)
        info = self.connection.connect(connect_timeout)
        assert info is not None  # it waits for an engine
        self.info = info
        self.tokenizer = _find_tokenizer(tokenizer or model, info.model)
        limits = RequestLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_logprobs=info.max_logprobs,
            enable_penalties=info.enable_penalties,
        )
        self.admission = Admission(limits, self.tokenizer, info.eos_token_ids, SeedSource(None))
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._requests: dict[str, _Sent] = {}  # by our id on the wire
        self._wire_ids: dict[str, str] = {}  # caller's id -> ours
        self._outbox: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

    def add_request(
        self,
        request_id: str | None,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
    ) -> None:
        """Sends a request. ValueError for a bad one, RuntimeError when the router is lost."""
        with self._lock:
            if self.connection.lost_reason is not None:
                raise RuntimeError(
                    f"request {request_id!r}: the router is lost: {self.connection.lost_reason}"
                )
            wire_id = str(next(self._ids))
            request_id = wire_id if request_id is None else request_id
            params = params or SamplingParams()
            self.admission.check(request_id, params, self._wire_ids)
            text, ids = self.admission.tokenize(request_id, prompt)
            arrival = time.time() if arrival_time is None else arrival_time
            if len(ids) >= self.admission.limits.max_model_len:
                # as an engine does: ended at once, no error
                completions = [
                    CompletionOutput(i, "", [], finish_reason="prompt_length_exceeded")
                    for i in range(params.n)
                ]
                self._wire_ids[request_id] = ""
                self._outbox.put(
                    RequestOutput(
                        request_id, text, ids, None, completions, True, RequestMetrics(arrival)
                    )
                )
                return
            self._requests[wire_id] = _Sent(request_id, text, ids, params, arrival)
            self._wire_ids[request_id] = wire_id
            self.connection.send(wire.Submit(wire_id, ids, params.to_dict(), arrival))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[str]:
        """Asks for the end of requests; each still gets its final output. Returns the ids that were
        alive."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._lock:
            alive = [i for i in ids if i in self._wire_ids]
            self.connection.send(
                wire.Cancel([self._wire_ids[i] for i in alive if self._wire_ids[i]])
            )
            return alive

    def step(self) -> list[RequestOutput]:
        """Waits for outputs and returns all there are; [] when a while has passed without any."""
        outputs: list[RequestOutput] = []
        if self._outbox.empty() and self._requests:
            self._take(block=True, outputs=outputs)
        while not self.connection.inbox.empty():
            self._take(block=False, outputs=outputs)
        if self.connection.lost_reason is not None and self.connection.inbox.empty():
            outputs += self._all_lost()
        while not self._outbox.empty():
            outputs.append(self._outbox.get())
        for output in outputs:
            if output.finished:
                self._wire_ids.pop(output.request_id, None)
        return outputs

    def _take(self, block: bool, outputs: list[RequestOutput]) -> None:
        try:
            message = self.connection.inbox.get(block, WAIT_SECONDS if block else None)
        except queue.Empty:
            return
        if not isinstance(message, wire.Result):
            return
        output = message.output
        sent = self._requests.get(output.request_id)
        if sent is None:  # ended already
            return
        if output.finished:
            del self._requests[output.request_id]
        elif sent.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return
        outputs.append(
            dataclasses.replace(
                output, request_id=sent.request_id, prompt=sent.prompt, prompt_token_ids=sent.ids
            )
        )

    def _all_lost(self) -> list[RequestOutput]:
        with self._lock:
            lost, self._requests = self._requests, {}
        reason = f"the router is lost: {self.connection.lost_reason}"
        return [
            RequestOutput(
                s.request_id,
                s.prompt,
                s.ids,
                None,
                [
                    CompletionOutput(i, "", [], finish_reason="error", stop_reason=reason)
                    for i in range(s.params.n)
                ],
                True,
                RequestMetrics(s.arrival),
            )
            for s in lost.values()
        ]

    # ---- the rest of what LLM needs --------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests) or not self._outbox.empty()

    def is_active(self, request_id: str) -> bool:
        return request_id in self._wire_ids

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def stats(self) -> dict[str, Any]:
        """The router's status (see `deepinfer-jax status`), also while requests are unfinished.
        TimeoutError or ConnectionError without an answer."""
        return ask_status(self.connection)

    def close(self) -> None:
        self.connection.close()


@dataclasses.dataclass(frozen=True)
class _Sent:
    request_id: str
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    arrival: float


def ask_status(connection: RouterConnection, timeout: float = 10.0) -> dict[str, Any]:
    """The router's status. TimeoutError without an answer."""
    with connection.asking:  # one at a time: an answer does not say whose it is
        while not connection.statuses.empty():  # came too late for who asked
            connection.statuses.get()
        connection.send(wire.StatusQuery())
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                return connection.statuses.get(timeout=min(left, WAIT_SECONDS)).status
            except queue.Empty:
                if connection.lost_reason is not None:
                    raise ConnectionError(
                        f"router {connection.router}: {connection.lost_reason}"
                    ) from None
    raise TimeoutError(f"router {connection.router}: no status within {timeout} s")


def _find_tokenizer(wanted: str | None, engines: str) -> Any:
    """The caller's tokenizer; else the engines' if their path exists here; else None."""
    from deepinfer_jax.models.resolve import resolve_model_path
    from deepinfer_jax.text.tokenizer import load_tokenizer

    if wanted is None and engines != "demo" and not Path(engines).exists():
        return None
    return load_tokenizer(resolve_model_path(wanted or engines))
