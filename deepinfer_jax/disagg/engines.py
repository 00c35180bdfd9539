"""An engine whose requests come from a coordinator: what both roles of a hand-over share."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_jax.disagg.layout import Layout, make_layout
from deepinfer_jax.disagg.side import HandoverSide
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests import Request
from deepinfer_jax.kv.block_layout import BlockLayout
from deepinfer_jax.kv.block_mover import BUCKETS, BlockMover
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler.routing.ids import AttemptId


class ServedEngine(LLMEngine):
    """An engine whose requests are attempts, and whose outputs are listened to as they are made.

    By itself it is a NORMAL one that answers attempts alone.
    """

    hand_overs: HandoverSide | None = None
    on_output: Callable[[RequestOutput], object] | None = None
    """Called before the step goes on: a request's first token must not be overtaken by what its
    completion engine makes of it."""

    def process_output(self, output: RequestOutput) -> RequestOutput:
        if self.on_output is not None:
            self.on_output(output)
        return output

    def pump(self) -> None:
        """Moves hand-overs on; between steps."""
        if self.hand_overs is not None:
            with self.lock:
                self.hand_overs.pump()

    def add_attempt(
        self,
        attempt: AttemptId,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        arrival_time: float,
    ) -> Request:
        """Queues one completion. seed: the 64-bit seed of its draws, so that a retry repeats them.
        Raises ValueError for what this engine cannot serve."""
        with self.lock:
            prompt = {"prompt_token_ids": prompt_token_ids}
            request = self.add_request(str(attempt), prompt, params, arrival_time=arrival_time)
            request.completions[0].seed = seed
            return request

    def cancel_attempt(self, attempt: AttemptId, reason: str) -> None:
        """Ends whatever this engine holds of an attempt."""
        self.abort_request(str(attempt))

    def cancel_all(self, reason: str) -> None:
        """Ends whatever this engine holds."""
        with self.lock:
            self.abort_request(list(self.live.requests))

    def held(self) -> list[str]:
        """Sequences that hold anything, in words."""
        with self.lock:
            return [str(seq) for s in self.schedulers for seq in s.sequences]

    def check_integrity(self) -> None:
        with self.lock:
            super().check_integrity()

    def layout(self) -> Layout:
        """What a router compares, and both ends of a link; see `layout.check_layouts`."""
        c = self.config
        blocks = BlockLayout(self.runner.cache_specs, c.axes, c.block_size, stacked=False)
        return make_layout(c.role, self.fingerprint, blocks.describe(), c.max_model_len)


class HandoverEngine(ServedEngine):
    """What both sides have: a BlockMover, a layout, a name that is unique in the deployment."""

    hand_overs: HandoverSide
    transfer_buckets = BUCKETS

    def init_pd_split(self) -> None:
        self.mover = BlockMover(self.runner, self.transfer_buckets)
        self._cuts: dict[str, int] = {}

    def prepare_link(self, peer: str, peer_tp: int) -> None:
        """Compiles what a peer with another tp needs. Before the first transfer, under the engine's
        lock."""
        with self.lock, compile_watch().expected():
            self._cuts[peer] = self.ensure_mover().prepare_for(peer_tp)
