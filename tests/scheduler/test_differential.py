"""The scheduler and a naive one written from the rules alone take the same decisions at
every step."""

import random

import numpy as np
import pytest
from sched_naive import Naive, NaiveScheduler

from deepinfer_jax.scheduler import Scheduler, SchedulerConfig, Sequence


def random_config(rng: random.Random) -> SchedulerConfig:
    max_model_len, chunked, block_size = (
        rng.randint(8, 60),
        rng.random() < 0.6,
        rng.choice([1, 3, 4, 8]),
    )
    pages = -(-max_model_len // block_size)
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=rng.randint(max(1, pages // 2), pages * 6),
        max_model_len=max_model_len,
        max_num_batched_tokens=(
            rng.randint(block_size, 40) if chunked else max_model_len + rng.randint(0, 40)
        ),
        max_num_seqs=rng.randint(1, 8),
        chunked_prefill=chunked,
        stop_preempted_request=rng.random() < 0.4,
        prefill_max_sum_seqlen_k=rng.choice([2**30, max_model_len, 2 * max_model_len]),
        num_speculative_tokens=rng.choice([0, 0, 2]),
        prefill_attempt_interval=rng.randint(1, 6),
        prefill_any_attempt_interval=rng.randint(1, 9),
    )


def compare_step(s: Scheduler, naive: NaiveScheduler, twins: dict, rng: random.Random) -> None:
    for seq in s.state.collect_ended():  # the naive one holds nothing beyond the end
        s.free_seq(seq)
    out = s.schedule()
    for seq in out.finished:  # stopped by preemption in this step
        s.free_seq(seq)
    kind, rows, ended, preempted = naive.schedule()
    assert out.step_type.value == kind
    assert [seq.request_id for seq in out.preempted] == [n.id for n in preempted]
    if kind == "prefill":
        assert [(item.seq.request_id, item.q_start, item.q_len) for item in out.prefill] == [
            (n.id, start, q) for n, start, q in rows
        ]
        assert [(seq.request_id, seq.finish_reason) for seq in out.ignored] == [
            (n.id, n.reason) for n in ended
        ]
    else:
        theirs = {n.id: (q, len(n) - 1 + q) for n, q in rows}
        ours = {
            seq.request_id: (q, k)
            for seq, q, k in zip(out.seqs, out.q_lens.tolist(), out.kv_lens.tolist(), strict=True)
        }
        assert ours == theirs
        assert [seq.num_tokens for seq in out.seqs] == [
            len(n) for n, _ in rows
        ]  # longest first; equal lengths in any order
    seqs = out.seqs
    counts = np.array(
        [rng.randint(1, q) for q in out.q_lens.tolist()] if kind == "decode" else [1] * len(seqs),
        np.int32,
    )
    tokens = np.array(
        [[rng.randint(0, 14) for _ in range(1 + s.config.num_speculative_tokens)] for _ in seqs],
        np.int32,
    ).reshape(len(seqs), 1 + s.config.num_speculative_tokens)
    if kind == "prefill":
        tokens = tokens[:, :1]
    s.process_outputs(out, tokens, counts)
    for row, seq in enumerate(seqs):
        if kind == "decode" or out.prefill[row].is_last:
            naive.commit(twins[seq.request_id], tokens[row, : counts[row]].tolist())
    for seq in seqs:
        twin = twins[seq.request_id]
        assert (seq.output_token_ids.tolist(), seq.num_cached, seq.finish_reason) == (
            twin.tokens,
            twin.kv,
            twin.reason,
        )


@pytest.mark.parametrize("first_seed", range(0, 200, 25))
def test_same_decisions_as_the_naive_scheduler(first_seed):
    for seed in range(first_seed, first_seed + 25):
        rng = random.Random(seed)
        config = random_config(rng)
        s, naive, twins = Scheduler(config), NaiveScheduler(config), {}
        for step in range(160):
            if step < 100 and rng.random() < 0.35:
                prompt, max_tokens, stops = (
                    rng.randint(1, config.max_model_len + 1),
                    rng.randint(1, 30),
                    rng.choice([(), (0,), (0, 3)]),
                )
                name = len(twins)
                s.add_request(
                    Sequence(
                        name,
                        [1] * prompt,
                        max_tokens=max_tokens,
                        eos_token_ids=stops[:1],
                        stop_token_ids=stops[1:],
                    )
                )
                twins[name] = Naive(name, prompt, max_tokens, stops)
                naive.add(twins[name])
            try:
                compare_step(s, naive, twins, rng)
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {step}, {config}")
                raise
            if step % 16 == 0:
                s.check_integrity()
