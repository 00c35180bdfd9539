"""A router's clients: what they may submit, and their outputs."""

from __future__ import annotations

import dataclasses
import queue

import numpy as np

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.split_request import FannedOutRequest
from deepinfer_jax.launch.cluster.admission import check_prompt
from deepinfer_jax.launch.cluster.members import ClientMember
from deepinfer_jax.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.sampling_params import SamplingParams


class ClientDesk:
    """In the hub's thread. max_parts: unfinished completions at a time, of all clients. max_n: of
    one request."""

    def __init__(self, coordinator: Coordinator, max_parts: int, max_n: int) -> None:
        self._coordinator, self._max_parts, self._max_n = coordinator, max_parts, max_n
        self._clients: dict[str, ClientMember] = {}  # by session
        self._seeds = np.random.default_rng()
        self.draining = False

    def __len__(self) -> int:
        return len(self._clients)

    def join(self, client: ClientMember) -> None:
        self._clients[client.channel.session] = client

    def leave(self, client: ClientMember) -> None:
        """Its requests end with it."""
        self._clients.pop(client.channel.session, None)
        self._coordinator.abort_request(list(client.requests))

    def submit(
        self, client: ClientMember, m: wire.Submit, model: wire.ModelInfo | None
    ) -> str | None:
        """Why the request is refused (the client has been told); None: it is queued."""
        name = client.own_name(m.request_id)
        try:
            params, model = self._check(name, m, model)
            request = FannedOutRequest.make(
                name, None, m.prompt_token_ids, params, self._draw_seed, m.arrival_time
            )
            client.requests.add(name)
            if len(m.prompt_token_ids) >= model.max_model_len:
                self._coordinator.refuse(request, "prompt_length_exceeded")
            else:
                self._coordinator.submit(request, model.max_model_len)
        except (ValueError, TypeError) as error:
            client.requests.discard(name)
            completion = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
            output = RequestOutput(m.request_id, None, [], None, [completion], True)
            client.channel.send(wire.Result(output))
            return str(error)
        return None

    def _check(
        self, name: str, m: wire.Submit, model: wire.ModelInfo | None
    ) -> tuple[SamplingParams, wire.ModelInfo]:
        """Raises ValueError naming the request, the value and the limit."""
        said = f"request {m.request_id!r}"
        if self._coordinator.is_active(name):
            raise ValueError(f"{said}: a request with this id is already running")
        if self.draining:
            raise ValueError(f"{said}: the router is draining")
        if model is None:
            raise ValueError(f"{said}: no engine has joined, so the model's limits are unknown")
        check_prompt(m, model)
        params = SamplingParams.from_dict(m.params)
        if params.n > self._max_n:
            raise ValueError(f"{said}: n={params.n} exceeds the router's limit of {self._max_n}")
        unfinished = len(self._coordinator.parts)
        if unfinished + params.n > self._max_parts:
            raise ValueError(
                f"{said}: n={params.n}, and {unfinished} completions are unfinished; the router's"
                f" limit is {self._max_parts}"
            )
        return params, model

    def _draw_seed(self) -> int:
        return int(self._seeds.integers(0, 2**64, dtype=np.uint64))

    def deliver(self) -> int:
        """Outputs to their clients; how many requests have ended with them."""
        ended = 0
        while True:
            try:
                output = self._coordinator.outputs.get_nowait()
            except queue.Empty:
                return ended
            ended += output.finished
            session, _, request_id = output.request_id.partition(".")
            client = self._clients.get(session)
            if client is None:
                continue
            if output.finished:
                client.requests.discard(output.request_id)
            sent = dataclasses.replace(output, request_id=request_id, prompt_token_ids=[])
            client.channel.send(wire.Result(sent))
