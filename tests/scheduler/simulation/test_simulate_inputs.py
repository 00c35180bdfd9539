"""What the simulator is given: traces, step costs, deployments; and what it says when they are
wrong."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from deepinfer_jax.scheduler import EngineType
from deepinfer_jax.scheduler.simulation.result import weighted_percentile
from deepinfer_jax.scheduler.simulation.simulate import (
    AnalyticCosts,
    CostTable,
    Deployment,
    EngineSpec,
    TableCosts,
    limits_for,
    load_costs,
    load_trace,
    make_trace,
    parse_deployment,
    save_costs,
    synthetic_trace,
)

# ---- traces


def write(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_our_jsonl(tmp_path):
    lines = [
        {"timestamp": 2.5, "input_length": 600, "output_length": 3, "prefix_ids": [9, 4]},
        {
            "timestamp": 1,
            "input_length": 700,
            "output_length": 0,
            "max_tokens": 50,
            "prefix_ids": [9],
        },
        {"timestamp": 1.5, "input_length": 2, "output_length": 1},
    ]
    trace = load_trace(write(tmp_path, "t.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert trace.timestamps.tolist() == [0.0, 0.5, 1.5]  # sorted, from the first arrival
    assert trace.input_lengths.tolist() == [700, 2, 600]
    assert trace.output_lengths.tolist() == [1, 1, 3]
    assert trace.max_tokens.tolist() == [50, 1, 3]
    first, _, last = (trace.prompt(row) for row in range(3))
    assert (first[:512] == last[:512]).all() and not np.intersect1d(first[512:], last[512:]).size
    assert [len(trace.prompt(row)) for row in range(3)] == [700, 2, 600]


def test_mooncake(tmp_path):
    lines = [
        (
            '{"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47,'
            " 99999999999]}"
        ),
        '{"timestamp": 30535, "input_length": 600, "output_length": 26, "hash_ids": [46, 2000]}',
    ]
    trace = load_trace(write(tmp_path, "mooncake.jsonl", "\n".join(lines)))
    assert trace.timestamps.tolist() == [0.0, pytest.approx(3.053)]
    assert trace.output_lengths.tolist() == [52, 26]
    assert (trace.prompt(0)[:512] == trace.prompt(1)[:512]).all() and trace.prompt(0)[
        512
    ] != trace.prompt(1)[512]
    assert trace.prompt(0).size == 1200


def test_azure(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16"
        " 18:17:04.0319600,396,109\n"
    )
    trace = load_trace(write(tmp_path, "azure.csv", text))
    assert trace.timestamps.tolist() == [0.0, pytest.approx(0.052, abs=1e-6)]
    assert (trace.input_lengths.tolist(), trace.output_lengths.tolist()) == ([374, 396], [44, 109])
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10"
        " 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n"
    )
    assert load_trace(write(tmp_path, "azure24.csv", text)).timestamps[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "name, text, message",
    [
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 2}',
            r"a.jsonl, line 1: field 'output_length' is missing",
        ),
        (
            "a.jsonl",
            '\n{"timestamp": "x", "input_length": 2, "output_length": 1}',
            r"line 2: field 'timestamp' must be a finite number",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            r"line 1: field 'input_length' must be an integer >= 1, got 0",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": 1.5}',
            r"field 'output_length' must be an integer >= 0, got 1.5",
        ),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": 9, "max_tokens": 3}',
            r"'max_tokens' must be an integer >= 9, got 3",
        ),
        ("a.jsonl", "{oops", r"a.jsonl, line 1: not JSON: .* at column 2"),
        ("a.jsonl", "[1]", r"line 1: expected an object, got list"),
        ("a.jsonl", "", r"a.jsonl: the trace has no requests"),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": "x"}',
            r"line 1: field 'hash_ids' must be a list",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens\n", r"a.csv, line 1: column GeneratedTokens is missing"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\nsoon,2,3\n",
            r"line 3: field 'TIMESTAMP' must be seconds or a date",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,many,3\n",
            r"line 2: field 'ContextTokens' must be an integer >= 1, got 'many'",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n",
            r"line 2: field 'GeneratedTokens' is missing",
        ),
    ],
)
def test_bad_traces_name_line_and_field(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_trace(write(tmp_path, name, text))


def test_trace_limit_format_and_changes(tmp_path):
    path = write(
        tmp_path,
        "t.txt",
        "".join(f'{{"timestamp": {i}, "input_length": 5, "output_length": 5}}\n' for i in range(9)),
    )
    trace = load_trace(path, limit=3)
    assert len(trace) == 3 and trace.rate == 1.0
    assert trace.faster(4).rate == 4.0 and len(trace.head(2)) == 2
    assert (
        trace.asking_for(20).max_tokens.tolist() == [20] * 3 and trace.asking_for(20).longest == 25
    )
    assert load_trace(path, "mooncake").timestamps[-1] == pytest.approx(0.008)
    with pytest.raises(
        ValueError, match=r"unknown trace format 'xml'; known: auto, jsonl, mooncake, azure"
    ):
        load_trace(path, "xml")
    with pytest.raises(ValueError, match=r"speed of a trace must be > 0"):
        trace.faster(0)


def test_synthetic_traces_have_the_asked_for_moments():
    make = dict(rate=5.0, input_mean=1000, output_mean=100, input_cv=0.5, output_cv=2.0)
    trace = synthetic_trace(20_000, **make, seed=1)
    assert trace.rate == pytest.approx(5.0, rel=0.03)
    for values, mean, cv in ((trace.input_lengths, 1000, 0.5), (trace.output_lengths, 100, 2.0)):
        assert values.mean() == pytest.approx(
            mean, rel=0.05
        ) and values.std() / values.mean() == pytest.approx(cv, rel=0.15)
    np.testing.assert_array_equal(
        trace.timestamps, synthetic_trace(20_000, **make, seed=1).timestamps
    )
    assert (trace.timestamps != synthetic_trace(20_000, **make, seed=2).timestamps).any()
    gaps = np.diff(synthetic_trace(20_000, **make, arrivals="gamma", burstiness=3.0).timestamps)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)
    assert np.ptp(np.diff(synthetic_trace(50, **make, arrivals="constant").timestamps)) < 1e-9
    assert not synthetic_trace(5, **make | {"rate": math.inf}).timestamps.any()
    assert synthetic_trace(500, **make, max_length=1200).input_lengths.max() == 1200


def test_synthetic_groups_share_their_prefix():
    trace = synthetic_trace(
        40, rate=1, input_mean=100, output_mean=5, input_cv=0, shared_prefix=60, prefix_groups=2
    )
    heads = {tuple(trace.prompt(row)[:60]) for row in range(40)}
    assert len(heads) == 2 and len({tuple(trace.prompt(row)[60:]) for row in range(40)}) == 40


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rate": 0}, "rate must be > 0, got 0"),
        ({"input_mean": -1}, "input_mean must be > 0"),
        ({"output_cv": -1}, "output_cv must be >= 0"),
        ({"arrivals": "weekly"}, "unknown arrivals 'weekly'; known: poisson, gamma, constant"),
        ({"arrivals": "gamma", "burstiness": 0}, "burstiness must be > 0"),
    ],
)
def test_bad_synthetic_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        synthetic_trace(3, **{"rate": 1, "input_mean": 5, "output_mean": 5, **change})


def test_traces_check_their_arrays():
    with pytest.raises(ValueError, match=r"input_lengths\[1\] must be >= 1, got 0"):
        make_trace("t", [0, 1], [3, 0], [1, 1])
    with pytest.raises(ValueError, match=r"has no requests"):
        make_trace("t", [], [], [])


# ---- costs


def test_tables_interpolate_between_their_points():
    table = CostTable([100, 200, 400], [1.0, 3.0, 4.0])
    assert [table(x, 0) for x in (1, 100, 150, 200, 300, 400, 600)] == pytest.approx(
        [1, 1, 2, 3, 3.5, 4, 5]
    )
    assert [
        CostTable([100, 200], [1, 3], round_up=True)(x, 0) for x in (50, 100, 101, 200, 300)
    ] == [1, 1, 3, 3, 5]
    plane = CostTable([1, 3], [[1, 2, 4], [3, 4, 8]], [0, 10, 20])
    assert [plane(2, 5), plane(1, 20), plane(3, 15), plane(3, 30)] == pytest.approx([2.5, 4, 6, 12])
    assert CostTable([1, 4], [[1, 2], [1, 2]], [0, 100], total=True)(4, 12.5) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([2, 1], [1, 1]), "the tokens or rows axis must be non-negative, strictly ascending"),
        (([1, 2], [1]), r"seconds has shape \(1,\), its axes have 2 x 1 points"),
        (([1, 2], [1, -1]), "seconds must be finite and >= 0, got -1"),
        (([1], [[1, 2]], [5, 5]), "the context axis must be"),
    ],
)
def test_bad_tables(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostTable(*arguments)


def test_roofline():
    costs = AnalyticCosts(
        parameters=1e9,
        attention_flops_per_key=1000,
        kv_bytes_per_token=1000,
        peak_flops=1e12,
        bandwidth=1e11,
        compute_efficiency=1,
        memory_efficiency=1,
        step_overhead=0,
    )
    assert costs.prefill_seconds(1000, 500) == pytest.approx(
        1000 * (2e9 + 500 * 1000) / 1e12
    )  # computes
    assert costs.decode_seconds(1, 1e6) == pytest.approx((2e9 + 1e6 * 1000) / 1e11)  # reads
    experts = AnalyticCosts(
        parameters=1e9,
        active_parameters=1e8,
        kv_bytes_per_token=0,
        step_overhead=0,
        memory_efficiency=1,
    )
    assert experts.decode_seconds(1, 0) == pytest.approx(2e8 / 3.35e12)
    assert experts.decode_seconds(50, 0) == pytest.approx(2e9 * (1 - 0.9**50) / 3.35e12)
    uneven = dataclasses.replace(
        experts, shared_parameters=4e7, expert_imbalance=1.5, compute_efficiency=1
    )
    assert uneven.decode_seconds(50, 0) == pytest.approx(2e9 * (1 - 0.9**75) / 3.35e12)
    assert uneven.prefill_seconds(10**6, 0) == pytest.approx(2e6 * (4e7 + 1.5 * 6e7) / 989e12)
    for change, message in (
        ({"peak_flops": 0}, "peak_flops must be > 0"),
        ({"memory_efficiency": 2}, "memory_efficiency must lie in"),
        ({"expert_imbalance": 0.9}, "expert_imbalance must be at least 1"),
        ({"shared_parameters": 9e9}, "shared_parameters 9e.09 exceed the active"),
    ):
        with pytest.raises(ValueError, match=message):
            AnalyticCosts(**change)
    with pytest.raises(ValueError, match="active_parameters must lie in"):
        AnalyticCosts(active_parameters=1e12)


def test_cost_files_round_trip(tmp_path):
    plane = CostTable([1, 3], [[1, 2], [3, 4]], [0, 10], total=True)
    costs = {
        EngineType.PROMPT: TableCosts(
            prefill=CostTable([5, 6], [1, 2], round_up=True), kv_bytes_per_token=9.0
        ),
        EngineType.COMPLETION: TableCosts(decode=plane, host_seconds=0.5),
    }
    save_costs(tmp_path / "c.json", costs)
    read = load_costs(tmp_path / "c.json")
    assert (
        read[EngineType.PROMPT].prefill_seconds(5.5, 0) == 2
        and read[EngineType.PROMPT].kv_bytes_per_token == 9.0
    )
    assert (
        read[EngineType.COMPLETION].decode_seconds(2, 5) == plane(2, 5)
        and read[EngineType.COMPLETION].host_seconds == 0.5
    )
    with pytest.raises(ValueError, match=r"roles.prompt: no decode table"):
        read[EngineType.PROMPT].decode_seconds(1, 1)
    save_costs(
        tmp_path / "one.json", TableCosts(prefill=CostTable([1], [1]), decode=CostTable([1], [2]))
    )
    assert load_costs(tmp_path / "one.json").decode_seconds(1, 1) == 2


@pytest.mark.parametrize(
    "record, message",
    [
        ("{", r"c.json, line 1: not JSON"),
        ([], r"field 'format' must be 'deepinfer-step-costs/1', got 'list'"),
        ({"format": "x"}, r"field 'format' must be .*, got 'x'"),
        ({}, r"neither 'prefill' nor 'decode' is given"),
        ({"roles": {"boss": {}}}, r"unknown role 'boss'; known: normal, prompt, completion"),
        ({"prefill": {"tokens": [1]}}, r"prefill must be an object with 'tokens' and 'seconds'"),
        (
            {"decode": {"rows": [1], "seconds": [1], "context": [1]}},
            r"decode: unknown field 'context'",
        ),
        (
            {"decode": {"rows": [1], "seconds": ["fast"]}},
            r"c.json: decode: could not convert string",
        ),
        (
            {"decode": {"rows": [1], "seconds": [1], "rounding": "down"}},
            r"'rounding' must be 'linear' or 'up', got 'down'",
        ),
        (
            {"decode": {"rows": [1], "seconds": [[1]], "mean_context": [1], "total_context": [1]}},
            r"either 'mean_context' or 'total_context'",
        ),
        (
            {"decode": {"rows": [1], "seconds": [1]}, "host_seconds": "none"},
            r"host_seconds must be a finite number >= 0, got 'none'",
        ),
    ],
)
def test_bad_cost_files_name_the_field(tmp_path, record, message):
    text = (
        record
        if isinstance(record, str)
        else json.dumps(
            {"format": "deepinfer-step-costs/1", **record} if isinstance(record, dict) else []
        )
    )
    with pytest.raises(ValueError, match=message):
        load_costs(write(tmp_path, "c.json", text))


# ---- deployments

LIMITS = limits_for(make_trace("t", [0], [100], [10]))


def test_deployments_in_words():
    normal = parse_deployment(
        "normal:2:dp=4,blocks=99,chunked_prefill=off,tokens=512,name=four", LIMITS
    )
    (spec,) = normal.engines
    assert (normal.name, normal.num_ranks, normal.is_split, spec.count, spec.dp) == (
        "four",
        8,
        False,
        2,
        4,
    )
    assert (
        spec.config.num_blocks,
        spec.config.chunked_prefill,
        spec.config.max_model_len,
        spec.config.zos,
    ) == (99, False, 110, True)
    split = parse_deployment(
        "pd:2P:3D:dp=2,d.dp=8,p.tokens=1024,latency=0.5,bandwidth=1e9,"
        "reserve=0.25,max_held_requests=3",
        LIMITS,
    )
    prompt, completion = split.engines
    assert (prompt.role, prompt.count, prompt.dp, prompt.config.zos) == (
        EngineType.PROMPT,
        2,
        2,
        False,
    )
    assert (completion.role, completion.count, completion.dp, completion.config.zos) == (
        EngineType.COMPLETION,
        3,
        8,
        True,
    )
    assert (prompt.config.max_num_batched_tokens, completion.config.max_num_batched_tokens) == (
        1024,
        8192,
    )
    assert (
        split.link.latency,
        split.link.bandwidth,
        split.reserve,
        split.num_ranks,
        split.is_split,
    ) == (0.5, 1e9, 0.25, 28, True)
    assert split.router.max_held_requests == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("vllm:2", "unknown kind 'vllm'; known: normal, pd"),
        ("pd:1P", "no COMPLETION engines; write for example pd:1P:2D"),
        ("pd:0P:1D", "no PROMPT engines"),
        ("pd:1P:2P:1D", "the number of PROMPT engines is given twice"),
        ("pd:2:1D", "'2' is not a number of engines"),
        ("normal:2P", "'2P' is not a number of engines"),
        ("normal:dp", "'dp' is neither a number of engines nor name=value"),
        ("normal:dp=two", "option 'dp=two' needs a value of type int"),
        ("normal:zos=maybe", "option 'zos=maybe' needs a value of type bool"),
        ("normal:speed=3", "unknown option 'speed=3'; known: acceptance"),
        ("normal:p.dp=3", "unknown prefix in 'p.dp'"),
        ("pd:1P:1D:p.latency=3", "unknown option 'p.latency=3'"),
        ("normal:dp=0", "NORMAL engines: dp must be >= 1, got 0"),
        ("normal:num_blocks=0", "num_blocks must be >= 1, got 0"),
        ("normal:num_speculative_tokens=1,acceptance=2", r"acceptance must lie in \[0, 1\], got 2"),
        ("pd:1P:1D:bandwidth=0", "link bandwidth must be > 0"),
        ("pd:1P:1D:latency=-1", "link latency must be >= 0"),
        ("pd:1P:1D:reserve=2", r"reserve must lie in \[0, 1\]"),
        (
            "pd:1P:1D:d.context_parallel_size=2",
            "a COMPLETION engine cannot use context parallelism",
        ),
        (
            "pd:1P:1D:d.stop_preempted_request=0",
            "a COMPLETION engine cannot recompute preempted requests",
        ),
    ],
)
def test_bad_deployments_are_named(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_deployment(text, LIMITS)
    assert text in str(error.value)


def test_a_deployment_is_normal_or_split():
    normal, split = parse_deployment("normal", LIMITS), parse_deployment("pd:1P:1D", LIMITS)
    with pytest.raises(ValueError, match="it has COMPLETION, NORMAL, PROMPT"):
        Deployment(name="both", engines=normal.engines + split.engines)
    with pytest.raises(ValueError, match="count must be >= 1"):
        EngineSpec(config=normal.engines[0].config, count=0)


def test_weighted_percentiles():
    values, counts = np.array([3.0, 1.0, 2.0]), np.array([1, 98, 1])
    assert [weighted_percentile(values, counts, p) for p in (0, 50, 98, 98.5, 99, 100)] == [
        1,
        1,
        1,
        2,
        2,
        3,
    ]
    assert math.isnan(weighted_percentile(values[:0], counts[:0], 50))


ROW = '{"timestamp": 0, "input_length": 3, "output_length": 2}\n'


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path):
    for name, text in (
        ("t.jsonl", ROW),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,3,2\n"),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load_trace(tmp_path / name).input_lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"timestamp": 0, "x": "caf\xe9"}\n', "line 2: not UTF-8"),
        (b"[" * 200_000 + b"\n", "line 2: nested too deeply"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}\n", "line 2: .*4300"),
        (
            b'{"timestamp": ' + b"9" * 400 + b', "input_length": 1, "output_length": 1}\n',
            "line 2: field 'timestamp' must be a finite number",
        ),
        (
            b'{"timestamp": 0, "input_length": ' + b"9" * 400 + b', "output_length": 1}\n',
            "line 2: field 'input_length' must be an integer",
        ),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 2: .*finite"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, data, message):
    (tmp_path / "t.jsonl").write_bytes(ROW.encode() + data)
    with pytest.raises(ValueError, match=f"t.jsonl, {message}"):
        load_trace(tmp_path / "t.jsonl")


def test_a_csv_trace_that_is_not_utf8_is_named(tmp_path):
    data = b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,3,2\n" + b"1,\xff,2\n"
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.csv, line 3: not UTF-8"):
        load_trace(tmp_path / "t.csv")
