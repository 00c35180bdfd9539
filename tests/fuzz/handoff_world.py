"""A deployment of fake engines on a fake clock: real schedulers, senders, receivers, router and
coordinator; integers for KV.

Links lose, delay, double and reorder messages if told to; engines crash, come back and stall. A
request's tokens depend on every KV entry of its prompt (see sched_device.py), so a wrong, stale,
partial or foreign block shows in the result.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np
from sched_driver import Driver

from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.messages import Message, Pages, Segment
from deepinfer_jax.disagg.protocol import HandoffConfig, PeerLost, Refused
from deepinfer_jax.disagg.receiver import Receiver
from deepinfer_jax.disagg.sender import Sender
from deepinfer_jax.disagg.split_request import FannedOutRequest
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
from deepinfer_jax.scheduler import EngineType, SchedulerConfig, Sequence
from deepinfer_jax.scheduler.routing.config import Capacity, RouterConfig
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, attempt_of
from deepinfer_jax.scheduler.routing.router import Router

EOS = 0


@dataclass(frozen=True)
class Faults:
    """Chances: per message, or per engine and tick."""

    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    crash: float = 0.0
    stall: float = 0.0
    abort: float = 0.0  # per tick


class FakeLink:
    def __init__(self, world: World, owner: str, peer: str) -> None:
        self.world, self.owner, self.peer = world, owner, peer
        self.inbox: list[Message] = []
        self.lost: str | None = None
        self.other: FakeLink

    def send(self, message: Message, rank: int = 0) -> None:
        if self.lost is None:
            self.world.post(self.other, message)

    def poll(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        if not messages and self.lost is not None:
            raise PeerLost(self.lost)
        return messages

    def close(self, reason: str = "closed") -> None:
        self.other.lost = self.other.lost or reason


class FakePayload:
    def __init__(self, world: World, rows: np.ndarray) -> None:
        self.world, self.rows = world, rows
        self.arrives = world.now + world.rng.choice([0.0, 0.0, 1.0, 3.0])

    @property
    def count(self) -> int:
        return len(self.rows)

    def ready(self) -> bool:
        return self.world.now >= self.arrives


class FakePrompt(Driver):
    """PromptEngine without a model."""

    def __init__(self, world: World, name: str, config: SchedulerConfig, ranks: int) -> None:
        super().__init__(config, ranks, lambda: world.now, check_every=16)
        self.world, self.name, self.policy = world, name, config.policy
        self.hand_overs = self.sender = Sender(
            self, world.coordinator, name, world.handoff, lambda: world.now
        )
        self.seqs: dict[AttemptId, Sequence] = {}
        self.rank: dict[AttemptId, int] = {}
        self.states: dict[AttemptId, RequestState] = {}

    def add_attempt(self, key, part) -> None:
        if self.world.coordinator.current(key) is None:
            return
        seq = new_sequence(key, part.prompt_token_ids, part.params)
        self.states[key] = RequestState(
            request_id=str(key),
            prompt_token_ids=part.prompt_token_ids,
            params=part.params.to_dict(),
            seed=part.seed,
        )
        self.seqs[key], self.rank[key] = seq, self.world.rng.randrange(len(self.schedulers))
        self.schedulers[self.rank[key]].add_request(seq)

    def cancel_attempt(self, key, reason) -> None:
        if key in self.seqs:
            self.schedulers[self.rank[key]].abort(key)
            self.sender.cancel(key, "aborted")
            self.drop(key)

    def drop(self, key) -> None:
        seq = self.seqs.pop(key)
        self.schedulers[self.rank.pop(key)].release_detached(seq)

    def pump(self) -> None:
        self.sender.pump()

    def on_processed(self, scheduler, out, processed) -> None:
        for item, accepted in zip(out.prefill, processed.num_accepted, strict=True):
            key, seq = item.seq.request_id, item.seq
            if key not in self.seqs:
                continue
            c = scheduler.config
            if key not in self.sender.outgoing and scheduler.max_len_of(seq) > seq.prompt_len + 1:
                self.sender.offer(key, self.states[key], c.pages(seq.prompt_len))
            if self.world.rng.random() < 0.5:
                self.sender.pump()  # chunks move while later ones are computed
            if not accepted or key not in self.seqs:
                continue
            if seq.is_finished:
                self.sender.cancel(key, "ended with its first token")
                del self.seqs[key], self.rank[key]
                self.world.output(self, key, seq.output_token_ids.tolist(), seq.finish_reason)
                continue
            if self.world.streams(key):
                self.world.output(self, key, seq.output_token_ids.tolist(), None)
            scheduler.detach(seq)
            self.world.coordinator.prefilled(key)
            state = msgspec.structs.replace(
                self.states[key], output_token_ids=seq.output_token_ids.tolist()
            )
            self.sender.prefilled(key, state)

    def step(self):
        outputs = super().step()
        for scheduler, out in zip(self.schedulers, outputs, strict=True):
            for seq in out.finished:
                scheduler.free_seq(seq)
        return outputs

    def _end(self, seq) -> None: ...

    # SourcePort

    def ready_pages(self, key):
        seq = self.seqs[key]
        if seq.is_finished:
            return 0
        done = seq.num_scheduled
        pages = (
            self.config.pages(seq.prompt_len)
            if done >= seq.prompt_len
            else done // self.config.block_size
        )
        return min(pages, seq.num_blocks)

    def send_payloads(self, link, kind, ranges):
        by_rank: dict[tuple[int, int], list] = {}
        for r in ranges:
            by_rank.setdefault((self.rank[r.handoff.attempt], r.rank), []).append(r)
        for (rank, target), parts in by_rank.items():
            rows, segments, at = [], [], 0
            for r in parts:
                blocks = self.seqs[r.handoff.attempt].block_ids[r.first : r.first + r.count]
                rows.append(self.devices[rank].pool[blocks].copy())
                segments.append(Segment(r.handoff, r.first, r.count, at))
                at += r.count
            payload = FakePayload(self.world, np.concatenate(rows))
            link.send(Message(Pages(kind, tuple(segments)), payload), target)

    def forget(self, key, error):
        if error is not None:
            self.schedulers[self.rank[key]].abort(key)
        self.drop(key)


class FakeCompletion(Driver):
    """CompletionEngine without a model."""

    def __init__(self, world: World, name: str, config: SchedulerConfig, ranks: int) -> None:
        super().__init__(config, ranks, lambda: world.now, check_every=16)
        self.world, self.name, self.policy = world, name, config.policy
        self.hand_overs = self.receiver = Receiver(self, name, world.handoff, lambda: world.now)
        self.reserved: dict[HandoffId, tuple[Sequence, int]] = {}
        self.running: dict[HandoffId, tuple[Sequence, int]] = {}

    def pump(self) -> None:
        self.receiver.pump()

    def cancel_attempt(self, key, reason) -> None:
        self.receiver.drop(key, reason)
        for handoff_id in [i for i in self.running if i.attempt == key]:
            self.abort(handoff_id)

    def on_processed(self, scheduler, out, processed) -> None:
        for seq in [
            out.seq_by_slot[s]
            for s, n in zip(out.slots.tolist(), processed.num_accepted, strict=True)
            if n
        ]:
            if not seq.is_finished and self.world.streams(seq.request_id):
                self.world.output(self, seq.request_id, seq.output_token_ids.tolist(), None)

    def _end(self, seq: Sequence) -> None:
        super()._end(seq)
        self.running.pop(seq.request_id, None)
        self.world.output(self, seq.request_id, seq.output_token_ids.tolist(), seq.finish_reason)

    # TargetPort

    def reserve(self, handoff_id, request, pages, states):
        rank = self.world.rng.randrange(len(self.schedulers))
        params = SamplingParams.from_dict(request.params)
        seq = new_sequence(handoff_id, request.prompt_token_ids, params)
        scheduler = self.schedulers[rank]
        assert pages == scheduler.config.pages(seq.prompt_len) and not states
        try:
            if scheduler.reserve(seq, scheduler.max_len_of(seq)):
                self.reserved[handoff_id] = (seq, rank)
                return rank
        except ValueError as error:
            raise Refused(str(error), retry=False) from error
        raise Refused("full", retry=True)

    def write(self, kind, payload, segments):
        for s in segments:
            seq, rank = self.reserved[s.handoff]
            blocks = seq.block_ids[s.first : s.first + s.count]
            self.devices[rank].pool[blocks] = payload.rows[s.row : s.row + s.count]

    def enqueue(self, handoff_id, state):
        seq, rank = self.reserved.pop(handoff_id)
        if not self.schedulers[rank].enqueue_prompted(seq, state.output_token_ids):
            self.schedulers[rank].cancel_reservation(seq)
            return False
        self.running[handoff_id] = (seq, rank)
        return True

    def release(self, handoff_id):
        seq, rank = self.reserved.pop(handoff_id)
        assert self.schedulers[rank].cancel_reservation(seq)

    def abort(self, handoff_id):
        if handoff_id in self.running:
            seq, rank = self.running[handoff_id]
            self.schedulers[rank].abort(seq.request_id)


def new_sequence(name: AttemptId | HandoffId, ids: list[int], params: SamplingParams) -> Sequence:
    return Sequence(
        name,
        ids,
        max_tokens=params.max_tokens,
        eos_token_ids=(EOS,),
        ignore_eos=params.ignore_eos,
    )


class FakeWorker:
    """A coordinator's EngineHandle."""

    def __init__(self, engine) -> None:
        self.engine, self.name = engine, engine.name
        self.stalled_until = 0.0
        self.commands: list = []

    def start(self, part, attempt) -> None:
        self.commands.append(lambda: self.engine.add_attempt(attempt, part))

    def cancel(self, attempt, reason) -> None:
        self.commands.append(lambda: self.engine.cancel_attempt(attempt, reason))

    def wake(self) -> None: ...


class World:
    """tick() moves time on by one second; timeouts are a few tens of them."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        prompt=2,
        completion=2,
        ce_blocks=40,
        **router,
    ) -> None:
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self.handoff = HandoffConfig(timeout=30.0, retry_delay=1.0, max_tries=3)
        self.serial = itertools.count()
        self.in_transit: list = []
        self.prompts: dict[str, FannedOutRequest] = {}
        self.streaming: dict[str, bool] = {}
        self.results: dict[str, RequestOutput] = {}
        self.links: dict[tuple[str, str], tuple[FakeLink, FakeLink]] = {}
        self.aborted: set[str] = set()
        self.ce_blocks = ce_blocks
        prefix = self.rng.random() < 0.5
        self.configs = {
            EngineType.PROMPT: SchedulerConfig(
                role=EngineType.PROMPT,
                block_size=4,
                num_blocks=48,
                max_model_len=48,
                max_num_batched_tokens=16,
                max_num_seqs=6,
                chunked_prefill=True,
                stop_preempted_request=False,
                enable_prefix_caching=prefix,
            ),
            EngineType.COMPLETION: SchedulerConfig(
                role=EngineType.COMPLETION,
                block_size=4,
                num_blocks=ce_blocks,
                max_model_len=48,
                max_num_batched_tokens=16,
                max_num_seqs=5,
                zos=self.rng.random() < 0.5,
            ),
        }
        names = [f"P{i}" for i in range(prompt)], [f"C{i}" for i in range(completion)]
        ranks = self.rng.choice([1, 2])
        self.ranks = ranks
        capacity = Capacity(ranks * 5, ranks * ce_blocks * 4, 48)
        config = RouterConfig(**{"max_held_requests": 5, "affinity_block": 4} | router)
        self.router = Router(config=config)
        self.coordinator = Coordinator(self.router)
        self.workers: dict[str, FakeWorker] = {}
        self.capacity = capacity
        for name in (*names[0], *names[1]):
            self._join(name)
        for p in names[0]:
            for c in names[1]:
                self._connect(p, c)

    def _engine(self, name):
        if name[0] == "P":
            return FakePrompt(self, name, self.configs[EngineType.PROMPT], self.ranks)
        return FakeCompletion(self, name, self.configs[EngineType.COMPLETION], self.ranks)

    def _join(self, name: str) -> None:
        self.workers[name] = worker = FakeWorker(self._engine(name))
        self.coordinator.join(worker, None if name[0] == "P" else self.capacity)

    def _connect(self, p: str, c: str) -> None:
        a, b = FakeLink(self, p, c), FakeLink(self, c, p)
        a.other, b.other = b, a
        self.links[p, c] = a, b
        self.workers[p].engine.sender.connect(a)
        self.workers[c].engine.receiver.connect(b)

    @property
    def requests(self) -> dict[str, FannedOutRequest]:
        return self.coordinator.requests

    def failed(self, name: str) -> bool:
        return name in self.coordinator.failed

    # ---- what happens

    def post(self, link: FakeLink, message: Message) -> None:
        f, rng = self.faults, self.rng
        if rng.random() < f.drop:
            return
        for _ in range(1 + (rng.random() < f.double)):
            delay = rng.choice([1.0, 4.0, 45.0]) if rng.random() < f.delay else 0.0
            heapq.heappush(self.in_transit, (self.now + delay, next(self.serial), link, message))

    def crash(self, name: str, reason: str = "killed") -> None:
        for pair, (a, b) in self.links.items():
            if name in pair:
                (a if pair[0] == name else b).close(f"{name} {reason}")
        self.coordinator.engine_failed(name, f"{name} {reason}")

    def revive(self, name: str) -> None:
        """A new process takes the dead one's place: nothing of its memory is left."""
        self._join(name)
        for pair in list(self.links):
            if name in pair and not any(map(self.failed, pair)):
                for end in self.links[pair]:
                    end.lost = end.lost or "replaced"
                other = pair[1] if pair[0] == name else pair[0]
                self._forget_link(other, name)
                self._connect(*pair)

    def _forget_link(self, name: str, peer: str) -> None:
        engine = self.workers[name].engine
        if peer in engine.hand_overs.links:
            engine.hand_overs.peer_lost(peer, "replaced")

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        ignore_eos=True,
        stream=False,
        n=1,
    ) -> None:
        kind = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, output_kind=kind, n=n)
        request = FannedOutRequest.make(request_id, None, prompt, params, lambda: 1, self.now)
        self.prompts[request_id] = request
        self.streaming[request.unique_id] = stream
        try:
            self.coordinator.submit(request, 48)
        except RuntimeError as error:
            output = request.parts[0].ended("error", str(error))
            output.request_id = request_id
            self.results[request_id] = output

    def streams(self, output_id: AttemptId | HandoffId) -> bool:
        return self.streaming[attempt_of(output_id).request]

    def output(
        self, engine, output_id: AttemptId | HandoffId, tokens: list[int], reason: str | None
    ) -> None:
        worker = self.workers[engine.name]
        if worker.engine is engine:
            metrics = RequestMetrics(0.0)
            self.coordinator.on_output(
                engine.name,
                RequestOutput(
                    str(output_id),
                    None,
                    [],
                    None,
                    [CompletionOutput(0, "", tokens, finish_reason=reason)],
                    reason is not None,
                    metrics,
                ),
            )

    def tick(self) -> None:
        self.now += 1.0
        while self.in_transit and self.in_transit[0][0] <= self.now:
            _, _, link, message = heapq.heappop(self.in_transit)
            if link.lost is None:
                link.inbox.append(message)
        for name, worker in list(self.workers.items()):
            if not self.failed(name) and worker.stalled_until <= self.now:
                while worker.commands:
                    worker.commands.pop(0)()
                worker.engine.pump()
                worker.engine.step()
                if (
                    worker.engine.policy.does_decode
                    and worker.engine.pending is not None
                    and worker.engine.pending[0][0].is_empty
                ):
                    worker.engine.flush()
        self._act()
        self.coordinator.dispatch()
        self.collect()

    def _act(self) -> None:
        f, rng = self.faults, self.rng
        for name, worker in list(self.workers.items()):
            if not self.failed(name) and rng.random() < f.crash:
                self.crash(name)
            elif self.failed(name) and rng.random() < 0.1:
                self.revive(name)
            elif rng.random() < f.stall:
                worker.stalled_until = self.now + rng.choice([5.0, 40.0])
        if self.requests and rng.random() < f.abort:
            request_id = rng.choice(list(self.requests))
            self.aborted.add(request_id)
            assert self.coordinator.abort_request(request_id) == [request_id]

    def collect(self) -> None:
        while not self.coordinator.outputs.empty():
            output = self.coordinator.outputs.get()
            assert output.request_id not in self.results, f"two results for {output.request_id}"
            if output.finished:
                self.results[output.request_id] = output

    # ---- the end

    def settle(self, limit: int = 3000) -> None:
        """No more faults: everything ends, and nothing is held anywhere."""
        self.faults = Faults()
        for name, worker in self.workers.items():
            worker.stalled_until = 0.0
            if self.failed(name):
                self.revive(name)
        for _ in range(limit):
            if not self.requests and not self.held():
                break
            self.tick()
        assert not self.requests, f"hanging: {list(self.requests)}"
        assert not self.held(), f"still held: {self.held()}"
        self.collect()
        self.check()

    def held(self) -> list:
        return [
            seq for w in self.workers.values() for s in w.engine.schedulers for seq in s.sequences
        ] + [
            i
            for w in self.workers.values()
            if w.engine.policy.does_prefill
            for i in w.engine.sender.outgoing
        ]

    def check(self) -> None:
        for worker in self.workers.values():
            for scheduler in worker.engine.schedulers:
                scheduler.check_integrity()
                assert (
                    scheduler.blocks.num_used == 0
                    and scheduler.slots.num_free == scheduler.config.max_num_seqs
                )
            if worker.engine.policy.does_decode:
                assert (
                    not worker.engine.receiver.incoming
                    and not worker.engine.reserved
                    and not worker.engine.running
                )
        self.router.check_integrity()
        assert not self.router.jobs and not self.coordinator.parts
        assert set(self.results) == set(self.prompts), "lost requests"
