"""Statistics, the log line, the Prometheus endpoint, profiles: right numbers, and nothing of it
waits for the device."""

import logging
import urllib.request

import numpy as np
import pytest
from engine_cases import GREEDY, Golden, small_llm
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_jax.engine.stats.histogram import Histogram
from deepinfer_jax.engine.stats.metrics import share

LLAMA = Golden("llama")


@pytest.fixture(scope="module")
def llm():
    with small_llm(metrics_port=0, served_model_name="tiny", enable_penalties=False) as llm:
        yield llm


def scrape(llm):
    """{(sample name, labels but model and engine): value}; checks those two on every sample."""
    server = llm.engine.metrics_server
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = dict(s.labels)
            assert labels.pop("model_name") == "tiny" and labels.pop("engine") == "NORMAL_0"
            samples[s.name, *sorted(labels.values())] = s.value
    return samples


def generate(llm, lengths, **changes):
    prompts = [LLAMA.prompts[i % len(LLAMA.prompts)] for i in range(len(lengths))]
    params = [GREEDY.replace(max_tokens=n, **changes) for n in lengths]
    return prompts, llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def test_counters_and_histograms_of_the_endpoint_count_what_was_done(llm):
    before, records = scrape(llm), len(llm.engine.stats_log.records)
    lengths = [1, 5, 9, 20]
    prompts, _ = generate(llm, lengths)
    new = {k: v - before.get(k, 0) for k, v in scrape(llm).items()}
    assert new["deepinfer_prompt_tokens_total",] == sum(map(len, prompts))
    assert new["deepinfer_generation_tokens_total",] == sum(lengths)
    assert new["deepinfer_requests_finished_total", "length"] == 4
    assert new["deepinfer_time_to_first_token_seconds_count",] == 4
    assert new["deepinfer_inter_token_seconds_count",] == sum(n - 1 for n in lengths)
    steps = list(llm.engine.stats_log.records)[records:]
    for kind in ("prefill", "decode"):
        mine = [r for r in steps if r.step_type == kind]
        assert (
            new["deepinfer_steps_total", kind]
            == new["deepinfer_step_seconds_count", kind]
            == len(mine)
        )
        assert new["deepinfer_step_seconds_sum", kind] == pytest.approx(
            sum(r.duration for r in mine)
        )
        assert new["deepinfer_step_host_seconds_sum", kind] == pytest.approx(
            sum(r.host_time for r in mine)
        )
    assert new["deepinfer_padded_rows_total", "decode[8]"] == 8 * sum(
        r.step_type == "decode" for r in steps
    )
    now = scrape(llm)
    assert (
        now["deepinfer_requests_running",]
        == now["deepinfer_requests_waiting",]
        == now["deepinfer_cache_usage_ratio",]
        == 0
    )
    assert now["deepinfer_cache_blocks",] == 80


def test_gauges_show_a_busy_engine(llm):
    engine = llm.engine
    for i in range(12):
        engine.add_request(f"busy-{i}", LLAMA.prompts[1], GREEDY)
    assert scrape(llm)["deepinfer_requests_waiting",] == 12
    for _ in range(4):
        engine.step()
    now = scrape(llm)
    assert now["deepinfer_requests_running",] == 8 and now["deepinfer_requests_waiting",] == 4
    assert 0 < now["deepinfer_cache_usage_ratio",] <= 1
    engine.abort_request([f"busy-{i}" for i in range(12)])
    while engine.has_unfinished_requests():
        engine.step()


def test_the_gaps_between_tokens_add_up_to_the_requests_own_times(llm):
    before = llm.engine.stats_log.inter_token.sum
    _, (output,) = generate(llm, [30])
    m = output.metrics
    # zero-overhead scheduling reads tokens one step late, for both clocks alike
    assert llm.engine.stats_log.inter_token.sum - before == pytest.approx(
        m.last_token_time - m.first_token_time, abs=1e-6
    )


def test_endpoint_is_opt_in_and_local_and_a_taken_port_is_named(llm):
    assert llm.engine.metrics_server.host == "127.0.0.1"
    with small_llm() as silent:
        assert silent.engine.metrics_server is None
    with pytest.raises(
        OSError, match=f"metrics_port {llm.engine.metrics_server.port} on 127.0.0.1"
    ):
        small_llm(metrics_port=llm.engine.metrics_server.port)


def test_closing_an_engine_closes_its_endpoint():
    llm = small_llm(metrics_port=0)
    port = llm.engine.metrics_server.port
    llm.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)


def test_padding_is_reported_per_program(llm):
    generate(llm, [12] * 3)
    stats = llm.stats()
    decode = stats["padding"]["decode[8]"]
    assert decode["padded_rows"] == 8 * decode["steps"] and decode["padding"] == share(
        decode["rows"], decode["padded_rows"]
    )
    assert (
        sum(p["rows"] for name, p in stats["padding"].items() if name.startswith("prefill"))
        == stats["prompt_tokens"]
    )
    assert (
        sum(p["rows"] for name, p in stats["padding"].items() if name.startswith("decode"))
        == stats["decode_rows"]
    )
    assert stats["model"] == "tiny"


@pytest.mark.parametrize(
    ("text", "disabled", "role", "lines"),
    [
        ("4", False, "NORMAL", 5),
        ("4", True, "NORMAL", 0),
        ("0", False, "NORMAL", 0),
        ("-1", False, "NORMAL", 0),
        ("5", False, "PROMPT", 3),
    ],
)
def test_log_line_every_so_many_steps(monkeypatch, caplog, text, disabled, role, lines):
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", text)
    with (
        small_llm(disable_log_stats=disabled, engine_type=role) as llm,
        caplog.at_level(logging.INFO, logger="deepinfer_jax.engine.stats.metrics"),
    ):
        if role == "PROMPT":
            for _ in range(3):  # a prefill step each
                generate(llm, [1])
        else:
            generate(llm, [20])
        assert llm.stats()["steps"] == {"NORMAL": 20, "PROMPT": 3}[role]
    found = [
        r.getMessage() for r in caplog.records if r.name == "deepinfer_jax.engine.stats.metrics"
    ]
    assert len(found) == lines
    assert all("tok/s" in m and "waiting" in m and "cache" in m for m in found)


def test_llm_is_silent_by_default_and_an_engine_is_not(llm):
    from deepinfer_jax import EngineArgs

    assert (
        llm.engine.args.disable_log_stats is True
        and EngineArgs(LLAMA.path).disable_log_stats is False
    )


def test_a_profile_covers_the_steps_asked_for(llm, tmp_path):
    engine = llm.engine
    engine.start_profile(tmp_path, num_steps=3)
    with pytest.raises(RuntimeError, match="already"):
        engine.start_profile(tmp_path)
    generate(llm, [10])
    assert not engine.profiler.active
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(ValueError, match="num_steps"):
        engine.start_profile(tmp_path, num_steps=0)
    engine.stop_profile()  # none is running: no error


def test_histogram_counts_sums_and_quantiles():
    h, values = Histogram((1.0, 2.0, 4.0)), np.array([0.5, 1.0, 1.5, 3.0, 9.0])
    h.observe_many(values[:3])
    h.observe(3.0)
    h.observe(9.0)
    assert h.counts.tolist() == [2, 1, 1, 1] and h.sum == values.sum() and h.count == 5
    h.observe_many(values[:0])
    same = Histogram((1.0, 2.0, 4.0))
    same.observe_many(np.array([1.5, 2.0, 1.1]))
    assert same.counts.tolist() == [0, 3, 0, 0]
    assert h.cumulative() == [("1", 2), ("2", 3), ("4", 4), ("+Inf", 5)]
    assert (
        h.quantile(0.2) == 0.5
        and h.quantile(0.6) == 2.0
        and h.quantile(0.7) == 3.0
        and h.quantile(1.0) == 4.0
    )
    assert Histogram().summary() == {"count": 0}
