"""Drives a group of real schedulers with fake devices, the way an engine does, and checks what no
step may break."""

from __future__ import annotations

from sched_device import FakeDevice, continuation

from deepinfer_jax.scheduler import (
    LocalDPGroup,
    Scheduler,
    SchedulerConfig,
    SchedulerGroup,
    Sequence,
)


def small_config(**changes) -> SchedulerConfig:
    values = dict(
        block_size=4, num_blocks=64, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8
    )
    return SchedulerConfig(**(values | changes))


def make_seq(
    request_id, prompt_len: int = 5, *, max_tokens: int = 8, first: int = 2, **arguments
) -> Sequence:
    return Sequence(
        request_id,
        [(first + i) % 23 + 2 for i in range(prompt_len)],
        max_tokens=max_tokens,
        **arguments,
    )


class Driver:
    """step() = schedule, run, commit; with zos the results of a step are committed after the next
    one is scheduled."""

    def __init__(
        self, config: SchedulerConfig, ranks: int = 1, clock=None, check_every: int = 1, rng=None
    ) -> None:
        self.config = config
        self.schedulers = [
            Scheduler(config, **({"clock": clock} if clock else {})) for _ in range(ranks)
        ]
        self.group = SchedulerGroup(self.schedulers, LocalDPGroup(ranks))
        self.devices = [FakeDevice(config) for _ in range(ranks)]
        self.pending = None
        self.check_every = check_every
        self.num_steps = 0
        # given: finished sequences are sometimes freed a few steps late, as by a hook that saves
        # them first
        self.rng = rng
        self.unfreed: list[tuple[Scheduler, Sequence]] = []
        self.ended: list[Sequence] = []
        self.start_of: dict[int, int] = {}  # id(seq) -> first token the oracle answers for (forks)

    def step(self):
        outputs = self.group.schedule()
        self.num_steps += 1
        assert len({out.step_type for out in outputs}) == 1
        for s, out in zip(self.schedulers, outputs, strict=True):
            self._check_limits(s, out)
            for seq in out.ignored:
                self._end(seq)
        results = [device.run(out) for device, out in zip(self.devices, outputs, strict=True)]
        for s, out in zip(self.schedulers, outputs, strict=True):
            if self.config.policy.finalizes_finished:
                self.unfreed += [(s, seq) for seq in out.finished]
        self._free_finished()
        if self.config.zos:
            self._commit(self.pending)
            self.pending = (outputs, results)
        else:
            self._commit((outputs, results))
        if self.num_steps % self.check_every == 0:
            self.check()
        return outputs

    def _free_finished(self) -> None:
        late = [pair for pair in self.unfreed if self.rng is not None and self.rng.random() < 0.3]
        for s, seq in [pair for pair in self.unfreed if pair not in late]:
            self._end(seq)
            assert s.free_seq(seq)
        self.unfreed = late

    def flush(self) -> None:
        self._commit(self.pending)
        self.pending = None

    def _commit(self, pending) -> None:
        if pending is None:
            return
        for s, out, (tokens, counts) in zip(self.schedulers, *pending, strict=True):
            processed = s.process_outputs(out, tokens, counts)
            assert all(seq.is_finished for seq in processed.finished)
            assert (processed.num_accepted <= (counts if len(counts) else 0)).all()
            self.on_processed(s, out, processed)

    def on_processed(self, scheduler, out, processed) -> None:
        """For subclasses: a PROMPT engine hands over here."""

    def check(self) -> None:
        for s in self.schedulers:
            s.check_integrity()
            for device in (self.devices[self.schedulers.index(s)],):
                for seq in s.sequences:
                    if seq.slot >= 0 and not seq.is_finished:
                        assert (
                            s.block_tables[seq.slot, : seq.num_blocks].tolist()
                            == seq.block_ids.tolist()
                        )
                        if seq.status.name == "RUNNING":
                            assert (
                                device.table[seq.slot, : seq.num_blocks].tolist()
                                == seq.block_ids.tolist()
                            )

    def _check_limits(self, s: Scheduler, out) -> None:
        c = self.config
        if out.is_prefill:
            assert out.num_tokens <= c.max_num_batched_tokens
            assert sum(item.kv_len for item in out.prefill) <= c.prefill_max_sum_seqlen_k
            for item in out.prefill:
                assert item.q_len > 0 and item.is_last == (item.kv_len == item.seq.num_tokens)
                assert item.is_last or (
                    c.chunked_prefill and item.seq.image_around(item.kv_len) is None
                )
        else:
            assert (
                out.slots.size <= c.max_num_seqs and len(set(out.slots.tolist())) == out.slots.size
            )
            assert ((out.q_lens >= 1) & (out.q_lens <= 1 + c.num_speculative_tokens)).all()
        assert s.num_running <= c.max_num_seqs

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        steps = 0
        while any(s.has_unfinished() for s in self.schedulers) or self.pending is not None:
            if self.pending is not None and not any(s.has_unfinished() for s in self.schedulers):
                self.flush()
                continue
            self.step()
            steps += 1
            assert steps <= max_steps, [list(s.sequences) for s in self.schedulers]

    def _end(self, seq: Sequence) -> None:
        assert seq.is_finished and all(seq is not other for other in self.ended)
        self.ended.append(seq)
        check_result(self.config, seq, self.start_of.get(id(seq), seq.prompt_len))

    def assert_clean(self) -> None:
        self.rng = None
        self._free_finished()
        for s in self.schedulers:
            s.check_integrity()
            assert not s.has_unfinished() and not list(s.sequences)
            assert s.blocks.num_used == 0 and s.slots.num_free == self.config.max_num_seqs


def check_result(config: SchedulerConfig, seq: Sequence, start: int) -> None:
    """Tokens are exactly the model's, none lost, none doubled; the finish reason tells
    the truth."""
    tokens = seq.token_ids.tolist()
    assert tokens[start:] == continuation(tokens, start), seq
    stops = set(seq.stop_token_ids) | (set() if seq.ignore_eos else set(seq.eos_token_ids))
    first = max(start, seq.prompt_len + seq.min_tokens - 1)
    stopping = [i for i in range(first, len(tokens)) if tokens[i] in stops]
    if seq.finish_reason == "stop":
        assert stopping == [len(tokens) - 1], seq
        last = tokens[-1]
        assert seq.stop_reason == (
            None if last in seq.eos_token_ids and not seq.ignore_eos else last
        )
    else:
        assert not stopping, seq
    limit = max(seq.prompt_len + 1, min(seq.prompt_len + seq.max_tokens, config.max_model_len))
    assert len(tokens) <= max(limit, start)
    if seq.finish_reason == "length":
        assert len(tokens) >= limit
