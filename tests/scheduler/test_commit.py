"""process_outputs: stop rules, drafts, KV counter, argument checks."""

import numpy as np
import pytest
from sched_driver import Driver, make_seq, small_config

from deepinfer_jax.scheduler import Scheduler, SequenceStatus, slots


def start(seq, **changes) -> tuple[Scheduler, object]:
    s = Scheduler(small_config(**changes))
    s.add_request(seq)
    return s, s.schedule()


def feed(s, out, *tokens):
    return s.process_outputs(out, np.array([tokens], np.int32), np.array([len(tokens)]))


def generate(seq, tokens, **changes):
    """Feeds tokens one by one until the sequence ends."""
    s, out = start(seq, **changes)
    for token in tokens:
        feed(s, out, token)
        s.check_integrity()
        if seq.is_finished:
            break
        out = s.schedule_decode()
    return seq


def test_eos_stops_without_a_stop_reason():
    seq = generate(make_seq("a", eos_token_ids=(7, 8)), [5, 8, 6])
    assert (seq.output_token_ids.tolist(), seq.finish_reason, seq.stop_reason) == (
        [5, 8],
        "stop",
        None,
    )
    assert seq.status is SequenceStatus.FINISHED_STOPPED


def test_stop_token_is_the_stop_reason():
    seq = generate(make_seq("a", eos_token_ids=(7,), stop_token_ids=(3, 0)), [5, 0, 6])
    assert (seq.output_token_ids.tolist(), seq.finish_reason, seq.stop_reason) == (
        [5, 0],
        "stop",
        0,
    )


def test_ignore_eos_ignores_eos_ids_but_not_stop_ids():
    seq = generate(
        make_seq("a", eos_token_ids=(7,), stop_token_ids=(3,), ignore_eos=True), [7, 7, 3]
    )
    assert seq.output_token_ids.tolist() == [7, 7, 3] and seq.stop_reason == 3


def test_stop_ids_count_only_from_min_tokens_on():
    seq = generate(make_seq("a", eos_token_ids=(7,), min_tokens=3), [7, 7, 7, 7])
    assert seq.output_token_ids.tolist() == [7, 7, 7] and seq.finish_reason == "stop"


def test_max_tokens_ends_by_length():
    seq = generate(make_seq("a", max_tokens=3), [5] * 9)
    assert (
        seq.num_output_tokens == 3
        and seq.finish_reason == "length"
        and seq.status is SequenceStatus.FINISHED_LENGTH
    )


def test_eos_at_the_length_limit_counts_as_stop():
    assert generate(make_seq("a", max_tokens=2, eos_token_ids=(7,)), [5, 7]).finish_reason == "stop"


@pytest.mark.parametrize(("prompt_len", "outputs"), [(60, 4), (63, 1), (64, 1)])
def test_max_model_len_ends_by_length(prompt_len, outputs):
    seq = generate(make_seq("a", prompt_len, max_tokens=100), [5] * 9)
    assert seq.num_output_tokens == outputs and seq.finish_reason == "length"


def test_kv_counter_is_one_behind_the_tokens_while_decoding():
    seq = make_seq("a", 5)
    s, out = start(seq)
    assert seq.num_cached == 0
    feed(s, out, 9)
    for _ in range(3):
        assert seq.num_cached == seq.num_tokens - 1
        feed(s, s.schedule_decode(), 9)


def test_accepted_drafts_are_appended_one_by_one():
    seq = make_seq("a", 5, max_tokens=20)
    s, out = start(seq, num_speculative_tokens=3)
    feed(s, out, 9)
    processed = feed(s, s.schedule_decode(), 1, 2, 3)
    assert processed.num_accepted.tolist() == [3] and seq.output_token_ids.tolist() == [9, 1, 2, 3]
    assert seq.num_cached == 8
    out = s.schedule_decode()
    assert out.kv_lens.tolist() == [12] and out.q_lens.tolist() == [4]
    s.check_integrity()


def test_tokens_behind_a_stop_are_dropped():
    seq = make_seq("a", 5, max_tokens=20, eos_token_ids=(2,))
    s, out = start(seq, num_speculative_tokens=3)
    feed(s, out, 9)
    processed = feed(s, s.schedule_decode(), 1, 2, 3, 4)
    assert (
        processed.num_accepted.tolist() == [2]
        and processed.finished == [seq]
        and seq.output_token_ids.tolist() == [9, 1, 2]
    )


def test_tokens_behind_the_length_limit_are_dropped():
    seq = make_seq("a", 5, max_tokens=3)
    s, out = start(seq, num_speculative_tokens=3, zos=True)
    second = s.schedule_decode()  # drafts in flight: optimistic
    feed(s, out, 9)
    processed = feed(s, second, 1, 2)
    assert (
        processed.num_accepted.tolist() == [2]
        and seq.num_output_tokens == 3
        and seq.finish_reason == "length"
    )


def test_rows_vary_in_number_of_drafts():
    s = Scheduler(small_config(num_speculative_tokens=2))
    for name in "ab":
        s.add_request(make_seq(name, 5, max_tokens=20))
    s.process_outputs(s.schedule(), np.array([9, 9]))
    out = s.schedule_decode()
    names = [seq.request_id for seq in out.seqs]
    s.process_outputs(out, np.array([[1, 2, 3], [4, -1, -1]]), np.array([3, 1]))
    assert s.get(names[0]).output_token_ids.tolist() == [9, 1, 2, 3] and s.get(
        names[1]
    ).output_token_ids.tolist() == [9, 4]


@pytest.mark.parametrize("num_new", [[0], [5], [[1]]])
def test_impossible_counts_are_refused(num_new):
    s, out = start(make_seq("a"), num_speculative_tokens=3)
    feed(s, out, 9)
    out = s.schedule_decode()
    with pytest.raises(ValueError, match="num_new"):
        s.process_outputs(out, np.zeros((1, 4), np.int32), np.array(num_new))


def test_wrong_shape_is_refused():
    s, out = start(make_seq("a"))
    with pytest.raises(ValueError, match=r"token_ids must be \[1"):
        s.process_outputs(out, np.zeros((2, 1), np.int32))


def test_rows_of_unfinished_chunks_are_ignored():
    s, out = start(make_seq("a", 20), chunked_prefill=True, max_num_batched_tokens=8)
    processed = feed(s, out, 9)
    assert (
        processed.num_accepted.tolist() == [0]
        and s.get("a").num_tokens == 20
        and s.get("a").num_cached == 8
    )


def test_finish_by_stop_string_and_abort_are_well_defined():
    seq = make_seq("a")
    s, out = start(seq)
    feed(s, out, 9)
    assert (
        s.finish(seq, SequenceStatus.FINISHED_STOPPED, "stop", "</end>")
        and seq.stop_reason == "</end>"
    )
    assert not s.finish(seq, SequenceStatus.FINISHED_ABORTED) and seq.finish_reason == "stop"
    assert not s.abort("a") and not s.abort("unknown") and not s.abort(0)
    assert s.has_unfinished()  # still to be collected
    assert s.state.collect_ended() == [seq] and not s.has_unfinished()
    assert s.free_seq(seq) and not s.free_seq(seq)
    s.add_request(make_seq("a"))  # the id may be used again
    with pytest.raises(ValueError, match=r"'a'.*WAITING"):
        s.free_seq(s.get("a"))
    with pytest.raises(ValueError, match="RUNNING"):
        s.finish(s.get("a"), SequenceStatus.RUNNING)
    with pytest.raises(ValueError, match="not in this scheduler"):
        s.finish(make_seq("stranger"), SequenceStatus.FINISHED_ABORTED)


def test_long_outputs_survive_the_slot_rows():
    seq = make_seq("a", 3, max_tokens=300)
    s, out = start(seq, max_model_len=400, num_blocks=200, max_num_batched_tokens=400)
    for i in range(300):
        feed(s, out, i % 20 + 2)
        out = s.schedule_decode()
    assert (
        seq.output_token_ids.tolist() == [i % 20 + 2 for i in range(300)]
        and seq.finish_reason == "length"
    )


def test_token_rows_of_any_length_and_offset_lose_nothing(monkeypatch):
    monkeypatch.setattr(
        slots, "RECENT_TOKENS", 3
    )  # rows fill every third step, at different steps per slot
    d = Driver(small_config(zos=True, num_speculative_tokens=2, num_blocks=100))
    for i in range(8):
        d.schedulers[0].add_request(make_seq(i, 4, max_tokens=30, first=i, ignore_eos=True))
    d.run()  # compares every token
    d.assert_clean()
    assert all(seq.num_output_tokens == 30 for seq in d.ended)
