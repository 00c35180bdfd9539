"""Prefix reuse inside the scheduler: chunking, forks, preemption, hand-over, images, tenants."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import EngineType, Scheduler, Sequence


def config(**changes):
    return small_config(enable_prefix_caching=True, **changes)


def run(driver, *seqs):
    for seq in seqs:
        driver.schedulers[0].add_request(seq)
    driver.run()
    driver.assert_clean()
    return seqs


def test_second_request_reuses_whole_blocks_of_the_first():
    d = Driver(config())
    a, b = run(d, make_seq("a", 14)) + run(d, make_seq("b", 14))
    assert (a.hit_tokens, b.hit_tokens) == (0, 12)
    assert a.output_token_ids.tolist() == b.output_token_ids.tolist()


@pytest.mark.parametrize(("prompt_len", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_prompt_token_is_always_recomputed(prompt_len, hit):
    d = Driver(config())
    run(d, make_seq("a", prompt_len))
    (b,) = run(d, make_seq("b", prompt_len))
    assert b.hit_tokens == hit


def test_generated_tokens_are_reused_by_the_next_turn():
    d = Driver(config())
    (a,) = run(d, make_seq("a", 6, max_tokens=10))
    (b,) = run(d, Sequence("b", [*a.token_ids.tolist(), 3, 4], max_tokens=4))
    assert b.hit_tokens == 12  # 15 tokens with KV: three whole blocks


def test_blocks_are_found_only_after_the_step_that_writes_them_is_processed():
    s = Scheduler(config(zos=True))
    s.add_request(make_seq("a", 9))
    first = s.schedule()
    s.add_request(make_seq("b", 9))
    assert s.prefix.find(s.get("b")).blocks.size == 0  # in flight
    s.process_outputs(first, np.array([5]))
    assert s.prefix.find(s.get("b")).blocks.size == 2


def test_aborted_in_flight_leaves_nothing_in_the_cache():
    s = Scheduler(config(zos=True))
    s.add_request(make_seq("a", 9))
    s.schedule()
    s.abort("a")
    s.free_seq(s.get("a"))
    assert s.blocks.num_cached == 0 and s.blocks.num_free == 64


def test_two_equal_prompts_in_one_step_do_not_read_each_others_unwritten_blocks():
    d = Driver(config())
    a, b = run(d, make_seq("a", 14), make_seq("b", 14))
    assert (a.hit_tokens, b.hit_tokens) == (
        0,
        0,
    ) and a.output_token_ids.tolist() == b.output_token_ids.tolist()


def test_tenants_do_not_share():
    d = Driver(config())
    run(d, make_seq("a", 14, cache_salt="one"))
    assert run(d, make_seq("b", 14, cache_salt="two"))[0].hit_tokens == 0
    assert run(d, make_seq("c", 14))[0].hit_tokens == 0
    assert run(d, make_seq("d", 14, cache_salt="one"))[0].hit_tokens == 12


def test_skip_prefix_cache_reads_nothing_but_may_be_read():
    d = Driver(config())
    run(d, make_seq("a", 14, skip_prefix_cache=True))
    assert run(d, make_seq("b", 14, skip_prefix_cache=True))[0].hit_tokens == 0
    assert run(d, make_seq("c", 14))[0].hit_tokens == 12


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        ([(4, 9, b"cat")], [(4, 9, b"cat")], 12),
        ([(4, 9, b"cat")], [(4, 9, b"dog")], 4),
        ([(4, 9)], [(4, 9)], 4),  # unknown pixels are never equal
        ([(4, 9, b"cat")], [], 4),
        (
            [(6, 14, b"cat")],
            [(6, 14, b"cat")],
            4,
        ),  # 12 is inside the image: back to a boundary outside
    ],
)
def test_images_are_compared_by_their_digest_and_never_entered_halfway(first, second, hit):
    s = Scheduler(config(chunked_prefill=True))
    for name, spans in (("a", first), ("b", second)):
        seq = make_seq(name, 15, image_spans=spans, max_tokens=1)
        s.add_request(seq)
        s.process_outputs(s.schedule(), np.array([3]))
        s.free_seq(seq)
    assert seq.hit_tokens == hit


def test_hits_shorten_chunked_prefill():
    d = Driver(config(chunked_prefill=True, max_num_batched_tokens=8))
    run(d, make_seq("a", 30))
    before = d.num_steps
    (b,) = run(d, make_seq("b", 30, max_tokens=1))
    assert b.hit_tokens == 28 and d.num_steps - before <= 2


def test_preempted_sequence_finds_its_own_blocks_again():
    d = Driver(config(num_blocks=8, stop_preempted_request=False))
    seqs = [make_seq(i, 6, max_tokens=14, first=i, ignore_eos=True) for i in range(3)]
    run(d, *seqs)
    preempted = [seq for seq in seqs if seq.num_preemptions]
    assert preempted and any(seq.hit_tokens for seq in preempted)


def test_full_pool_evicts_instead_of_refusing():
    d = Driver(config(num_blocks=8))
    for i in range(6):
        run(d, make_seq(i, 14, first=3 * i))
    assert d.schedulers[0].blocks.num_free == 8
    (again,) = run(d, make_seq("first", 14, first=0))
    assert again.hit_tokens == 0  # evicted for the later ones


def test_fork_pages_are_shared_and_its_own_pages_are_cached_under_the_same_chain():
    d = Driver(config(max_model_len=64))
    s = d.schedulers[0]
    s.add_request(make_seq("a", 10, max_tokens=12, ignore_eos=True))
    d.step()
    fork = s.fork_seq(s.get("a"), "fork", max_tokens=12)
    d.start_of[id(fork)] = fork.num_tokens
    d.run()
    d.assert_clean()
    (b,) = run(d, Sequence("b", [*fork.token_ids.tolist(), 2], max_tokens=1))
    assert b.hit_tokens == 20


def test_fork_that_overwrites_a_cached_block_uncaches_it_first():
    d = Driver(config())
    s = d.schedulers[0]
    a = make_seq("a", 8, max_tokens=1)
    s.add_request(a)
    d.step()
    fork = s.fork_seq(a, "fork", num_tokens=7, replace_last_token_id=20, max_tokens=6)
    d.start_of[id(fork)] = 7
    assert s.state.collect_ended() == [a] and s.free_seq(
        a
    )  # the fork is now the only holder: it writes in place
    d.run()
    d.assert_clean()
    (b,) = run(d, make_seq("b", 9, max_tokens=3))
    assert b.hit_tokens == 4


def test_completion_caches_what_was_handed_over():
    s = Scheduler(config(role=EngineType.COMPLETION))
    seq = make_seq("a", 9, max_tokens=2)
    assert s.reserve(seq, 10)
    s.enqueue_prompted(seq, [5])
    out = s.schedule()
    s.process_outputs(out, np.array([6]))
    s.schedule()
    s.free_seq(seq)
    assert s.blocks.num_cached == 2
    s.check_integrity()
