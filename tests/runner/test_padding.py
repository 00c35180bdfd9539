"""The default buckets keep padding within a quarter on a mixed workload, whatever the load."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "padding.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("padding_benchmark", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rate", [0.05, 0.3, math.inf], ids=["trickle", "busy", "all at once"])
def test_mixed_workload_wastes_at_most_a_quarter(bench, rate):
    used = bench.run(200, rate, max_num_seqs=64, max_tokens=4096)
    assert sum(used.prefill) > 200 * 100 and len(used.decode) > 200
    assert bench.padding(used.prefill, bench.bucket_sizes(16, 4096)) <= 0.25
    assert bench.padding(used.decode, bench.bucket_sizes(1, 64)) <= 0.25


def test_padding_counts_the_rows_that_hold_nothing(bench):
    assert bench.padding([3, 4], (4, 8)) == 1 / 8 and bench.padding([], (4,)) == 0.0
