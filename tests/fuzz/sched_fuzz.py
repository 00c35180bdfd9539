"""Random episodes over real schedulers and fake devices: arrivals, aborts, forks, hand-overs,
preemptions, drafts, images.

As a script: `python tests/fuzz/sched_fuzz.py --steps 5000000 [--seed N]`. A failing seed is
printed; `--seed N --steps 1` repeats it.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
from sched_device import EOS, STOP
from sched_driver import Driver

from deepinfer_jax.scheduler import EngineType, SchedulerConfig, Sequence, SequenceStatus


def random_config(rng: random.Random, role: EngineType, **fixed) -> SchedulerConfig:
    block_size = rng.choice([1, 2, 4, 4, 8])
    max_model_len = rng.randint(8, 40)
    chunked = rng.random() < 0.7
    cp = rng.choice([1, 1, 1, 2]) if role.policy.allows_context_parallel else 1
    budget = (
        rng.randint(max(block_size, 2 * cp, 6), 24)
        if chunked
        else max_model_len + 2 * cp + rng.randint(0, 30)
    )
    pages = -(-max_model_len // block_size)
    num_speculative_tokens = rng.choice([0, 0, 0, 1, 3])
    num_seqs = rng.randint(1, 9)
    stateful = num_speculative_tokens == 0 and rng.random() < 0.25
    values = dict(
        role=role,
        block_size=block_size,
        num_blocks=rng.randint(max(2, pages // 2), pages * 6),
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        chunked_prefill=chunked,
        stop_preempted_request=not role.policy.allows_recompute or rng.random() < 0.3,
        prefill_max_sum_seqlen_k=rng.choice([2**30, max_model_len * 2]),
        num_speculative_tokens=num_speculative_tokens if role.policy.has_draft_pool else 0,
        zos=rng.random() < 0.5 if role.policy.does_decode else False,
        context_parallel_size=cp,
        prefill_attempt_interval=rng.randint(1, 7),
        prefill_any_attempt_interval=rng.randint(1, 11),
        enable_prefix_caching=not stateful and rng.random() < 0.5,
        num_state_slots=num_seqs + 1 + rng.randint(0, 3) if stateful else 0,
        priority_scheduling=rng.random() < 0.2,
        fair_users=rng.random() < 0.2,
        max_waiting_time=rng.choice([None, None, 5.0]),
        expected_output_fraction=rng.choice([0.0, 0.0, 0.5, 1.0]),
    )
    return SchedulerConfig(**(values | fixed))


def random_request(rng: random.Random, config: SchedulerConfig, request_id: str) -> dict:
    longest = config.max_model_len + (2 if rng.random() < 0.05 else 0)
    prompt_len = rng.randint(1, longest if rng.random() < 0.2 else max(1, longest // 2))
    base = rng.randint(0, 3)  # few different prompts, so that prefixes repeat
    max_tokens = rng.randint(0, 24)
    spans, at = [], 0
    while rng.random() < 0.2 and at + 2 < prompt_len:
        start = rng.randint(at, prompt_len - 2)
        at = min(prompt_len, start + rng.randint(1, min(6, config.prefill_budget)))
        spans.append((start, at, rng.choice([b"", b"cat", b"dog"])))
    return dict(
        request_id=request_id,
        prompt_token_ids=[(base + i * (1 + base)) % 23 + 2 for i in range(prompt_len)],
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(3, max(1, max_tokens))]),
        eos_token_ids=(EOS,),
        stop_token_ids=rng.choice([(), (STOP,), (STOP, 2)]),
        ignore_eos=rng.random() < 0.3,
        priority=rng.randint(0, 2),
        user_id=rng.choice("ab"),
        cache_salt=rng.choice(["", "", "tenant"]),
        skip_prefix_cache=rng.random() < 0.1,
        image_spans=spans,
        chunk_checkpoints=(
            [rng.randint(1, prompt_len) for _ in range(2)]
            if config.chunked_prefill and rng.random() < 0.2
            else ()
        ),
    )


class Work:
    """What the arrivals may still cost: the bound on the steps in which everything must
    have ended."""

    def __init__(self) -> None:
        self.steps = 200

    def add(self, config: SchedulerConfig, seq: Sequence) -> None:
        points = config.prefill_any_attempt_interval + config.prefill_attempt_interval + 2
        self.steps += points * (
            seq.prompt_len // max(1, config.prefill_budget - 8) + 3 * (seq.max_tokens + 2) + 10
        )


class PromptDriver(Driver):
    """A PROMPT group that hands over to a COMPLETION group, with random delays, refusals and
    failures."""

    def __init__(self, config, ranks, ce: Driver, rng: random.Random, clock) -> None:
        super().__init__(config, ranks, clock, check_every=8, rng=rng)
        self.ce = ce
        self.arguments: dict[str, dict] = {}
        self.sending: list[tuple] = []

    def on_processed(self, scheduler, out, processed) -> None:
        for item in out.prefill:
            if item.is_last and item.seq.slot >= 0 and item.epoch == item.seq.epoch:
                scheduler.detach(item.seq)
                if item.seq.is_finished:
                    self._drop(scheduler, item.seq)
                else:
                    self.sending.append((scheduler, item.seq, None, None))

    def _drop(self, scheduler, seq) -> None:
        assert scheduler.release_detached(seq) and not scheduler.release_detached(seq)
        if seq.is_finished:
            self._end(seq)

    def pump(self) -> None:
        """Moves every hand-over one stage on: reserve, then copy and deliver."""
        still = []
        for scheduler, seq, rank, twin in self.sending:
            if rank is None:
                if seq.is_finished or self.rng.random() < 0.02:
                    self._drop(scheduler, seq)
                    continue
                rank = self.rng.randrange(len(self.ce.schedulers))
                twin = Sequence(**self.arguments[seq.request_id])
                reserved = self.ce.config.pages(
                    seq.num_tokens
                ) <= self.ce.config.num_blocks and self.ce.schedulers[rank].reserve(
                    twin, seq.num_tokens
                )
                if (
                    not reserved
                    and not self.ce.schedulers[rank].has_unfinished()
                    and self.rng.random() < 0.5
                ):
                    self._drop(scheduler, seq)
                    continue
                still.append((scheduler, seq, rank if reserved else None, twin))
            elif self.rng.random() < 0.5:
                still.append((scheduler, seq, rank, twin))
            else:
                self._deliver(scheduler, seq, rank, twin)
        self.sending = still

    def _deliver(self, scheduler, seq, rank, twin) -> None:
        receiver = self.ce.schedulers[rank]
        if (
            seq.is_finished
            or self.rng.random() < 0.05
            or not self._copy(scheduler, seq, rank, twin)
        ):
            assert receiver.cancel_reservation(twin) and not receiver.cancel_reservation(twin)
            self.ce._end(twin)
        self._drop(scheduler, seq)

    def _copy(self, scheduler, seq, rank, twin) -> bool:
        source, target = self.devices[self.schedulers.index(scheduler)], self.ce.devices[rank]
        rows = source.pool[seq.block_ids].reshape(-1)[: seq.num_cached]
        flat = target.pool[twin.block_ids].reshape(-1)
        flat[: rows.size] = rows
        target.pool[twin.block_ids] = flat.reshape(-1, self.ce.config.block_size)
        if twin.state_id >= 0:
            target.state[twin.state_id] = source.state[seq.state_id]
        return self.ce.schedulers[rank].enqueue_prompted(twin, seq.output_token_ids)


class Episode:
    """One random configuration and life. `run()` returns the number of scheduler steps (ranks x
    steps)."""

    def __init__(self, rng: random.Random, split: bool | None = None) -> None:
        self.rng = rng
        self.now = 0.0
        ranks = rng.choice([1, 1, 2, 3, 4])
        self.work = Work()
        self.split = rng.random() < 0.4 if split is None else split
        if self.split:
            pe = random_config(rng, EngineType.PROMPT)
            shared = dict(max_model_len=pe.max_model_len, num_state_slots=0)
            ce = random_config(
                rng, EngineType.COMPLETION, **shared, enable_prefix_caching=rng.random() < 0.5
            )
            if pe.num_state_slots:
                shared["num_state_slots"] = ce.max_num_seqs + 1
                ce = random_config(
                    rng,
                    EngineType.COMPLETION,
                    **shared,
                    enable_prefix_caching=False,
                    num_speculative_tokens=0,
                    max_num_seqs=ce.max_num_seqs,
                )
            self.decode = Driver(ce, rng.choice([1, 2]), lambda: self.now, check_every=8, rng=rng)
            self.entry: Driver = PromptDriver(pe, ranks, self.decode, rng, lambda: self.now)
            self.drivers = [self.entry, self.decode]
        else:
            self.entry = self.decode = Driver(
                random_config(rng, EngineType.NORMAL),
                ranks,
                lambda: self.now,
                check_every=8,
                rng=rng,
            )
            self.drivers = [self.entry]
        self.blocked: list[Sequence] = []
        self.count = 0

    def run(self, steps: int = 150) -> int:
        for _ in range(steps):
            self.act()
            self.step()
        self.drain()
        return sum(d.num_steps * len(d.schedulers) for d in self.drivers)

    def drain(self) -> None:
        """No more arrivals: everything ends within the computed bound, and nothing is left held."""
        for seq in self.blocked:
            seq.schedulable = True
        bound = self.work.steps
        while self.busy():
            self.step()
            bound -= 1
            assert bound > 0, (
                f"starved: {[list(s.sequences) for d in self.drivers for s in d.schedulers]}"
            )
        for driver in self.drivers:
            driver.flush()
            driver.assert_clean()

    def busy(self) -> bool:
        return any(list(s.sequences) for d in self.drivers for s in d.schedulers)

    def step(self) -> None:
        self.now += 1.0
        for driver in self.drivers:
            driver.step()
        if self.split:
            self.entry.pump()

    def act(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.35:
            for _ in range(rng.choice([1, 1, 1, 4])):
                self.add()
        elif roll < 0.42:
            self.abort()
        elif roll < 0.50:
            self.fork()
        elif roll < 0.53:
            self.fail_one()
        elif roll < 0.6:
            self.unblock()
        if rng.random() < 0.2:
            self.choose_drafts()

    def unblock(self) -> None:
        """The image features of a request have arrived."""
        if self.blocked:
            self.blocked.pop().schedulable = True

    def choose_drafts(self) -> None:
        config = self.decode.config
        slots = np.arange(config.max_num_seqs)
        drafts = [self.rng.randint(0, config.num_speculative_tokens) for _ in slots]
        self.rng.choice(self.decode.schedulers).set_num_drafts(slots, np.array(drafts))

    def add(self) -> None:
        arguments = random_request(self.rng, self.entry.config, f"r{self.count}")
        self.count += 1
        seq = Sequence(**arguments)
        s = self.rng.choice(self.entry.schedulers)
        s.add_request(seq)
        if self.split:
            self.entry.arguments[seq.request_id] = arguments
        if self.rng.random() < 0.05:
            seq.schedulable = False
            self.blocked.append(seq)
        self.work.add(self.entry.config, seq)

    def _any_sequence(self, computed: bool = False) -> tuple | None:
        held = [
            (d, s, seq)
            for d in self.drivers
            for s in d.schedulers
            for seq in s.sequences
            if seq.num_cached or not computed
        ]
        return self.rng.choice(held) if held else None

    def abort(self) -> None:
        found = self._any_sequence()
        assert not self.entry.schedulers[0].abort("nobody")
        if found is not None:
            driver, s, seq = found
            was = seq.is_finished
            assert s.abort(seq.request_id) == (not was)
            assert not s.abort(seq.request_id)
            if (
                not was and not self.split and self.rng.random() < 0.4
            ):  # freed at once, with steps in flight
                driver._end(seq)
                assert s.free_seq(seq) and not s.free_seq(seq)

    def fail_one(self) -> None:
        found = self._any_sequence()
        if found is not None and not found[2].is_finished:
            found[1].finish(found[2], SequenceStatus.FINISHED_ERROR, "ve_error")

    def fork(self) -> None:
        found = self._any_sequence(computed=True)
        if found is None or self.split:
            return
        driver, s, source = found
        keep = self.rng.choice([None, self.rng.randint(1, source.num_tokens)])
        try:
            fork = s.fork_seq(
                source,
                f"f{self.count}",
                num_tokens=keep,
                max_tokens=self.rng.randint(1, 12),
                min_tokens=0,
            )
        except ValueError as error:
            assert f"f{self.count}" in str(error)
            return
        self.count += 1
        driver.start_of[id(fork)] = max(fork.num_tokens, fork.prompt_len)
        self.work.add(driver.config, fork)


def fuzz(first_seed: int, min_steps: int, steps_per_episode: int = 150) -> tuple[int, int]:
    """Episodes from first_seed on until min_steps scheduler steps are done; (steps, episodes)."""
    steps, seed = 0, first_seed
    while steps < min_steps:
        try:
            steps += Episode(random.Random(seed)).run(steps_per_episode)
        except Exception as error:
            error.add_note(f"fuzz seed {seed}")
            raise
        seed += 1
    return steps, seed - first_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = int(time.time()) % 1_000_000 * 1000 if arguments.seed is None else arguments.seed
    start, done, episodes = time.time(), 0, 0
    while done < arguments.steps:
        steps, count = fuzz(seed + episodes, min(200_000, arguments.steps - done))
        done, episodes = done + steps, episodes + count
        print(
            f"{done} scheduler steps in {episodes} episodes from seed {seed}:"
            f" {time.time() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
