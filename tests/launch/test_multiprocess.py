"""One role over several processes: votes and expert exchange across them, behind a router."""

import subprocess
import sys
import time
from pathlib import Path

import network
import pytest
from deployment import Deployment
from engine_cases import GREEDY, Golden
from equal_tokens import start_pd

from deepinfer_jax import LLM

HELPERS = Path(__file__).parent.parent / "helpers"
MOE = Golden("deepseek_v3")
EIGHT_RANKS = {
    "cpu_devices": 4,
    "data_parallel_size": 8,
    "expert_parallel_size": 8,
    "max_num_seqs": 4,
}
BLOCKS = {0: {"num_blocks": 80}, 1: {"num_blocks": 64}}


def generate(d, prompts):
    with LLM(router=d.address) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def test_a_job_of_two_processes_with_four_devices_each(tmp_path):
    with Deployment(tmp_path, deadline=3) as d:
        names = d.job("normal", "N", "deepseek_v3", own=BLOCKS, decode_buckets=4, **EIGHT_RANKS)
        d.joined(*names)
        d.wait_for_engines(*names)
        ranks_and_blocks_are_agreed(d)
        tokens_equal_the_reference_whatever_the_load(d)
        the_job_ends_with_one_of_its_processes_and_comes_back(d)


def ranks_and_blocks_are_agreed(d):
    first, second = d.processes["N.0"].text, d.processes["N.1"].text
    assert "ranks here: [0, 1, 2, 3]" in first and "ranks here: [4, 5, 6, 7]" in second
    assert "num_blocks: 80 here, 64 are used: the least among the processes of the job" in first
    assert all("cache 64 blocks of 16 per rank" in text for text in (first, second))


def tokens_equal_the_reference_whatever_the_load(d):
    assert generate(d, MOE.prompts) == MOE.greedy
    assert generate(d, MOE.prompts[:1]) == MOE.greedy[:1]  # seven ranks, and one process, are idle
    assert generate(d, MOE.prompts * 6) == MOE.greedy * 6
    d.wait_idle()
    by_process = {e["name"]: e["steps"] for e in d.status()["engines"]}
    assert by_process["N.0"] == by_process["N.1"] > 0  # every process took every step


def the_job_ends_with_one_of_its_processes_and_comes_back(d):
    d.processes["N.1"].kill()
    assert d.processes["N.0"].wait() in (1, 3)
    start = time.monotonic()
    with LLM(router=d.address) as llm:
        out = llm.generate(prompt_token_ids=MOE.prompts[0], sampling_params=GREEDY, use_tqdm=False)[
            0
        ].outputs[0]
    assert (
        out.stop_reason == "no normal engine has been there for 3.0 s"
        and time.monotonic() - start < 10
    )
    d.processes["N.0"].start(), d.processes["N.1"].start()
    d.wait_for_engines("N.0", "N.1", timeout=150)
    assert generate(d, MOE.prompts) == MOE.greedy
    for name in ("N.0", "N.1"):
        d.processes[name].signal(15)
    assert [d.processes[name].wait() for name in ("N.0", "N.1")] == [0, 0]


def test_jobs_of_one_and_two_processes_of_either_role_with_different_meshes(tmp_path):
    with Deployment(tmp_path) as d:
        names = start_pd(d, "deepseek_v3", moe=True)
        d.joined(*names)
        d.wait_for_engines(*names)
        assert generate(d, MOE.prompts * 6) == MOE.greedy * 6
        d.wait_idle()
        assert all(e["steps"] > 0 for e in d.status()["engines"])


@pytest.mark.skipif(
    network.why_not() is not None, reason="this machine does not allow network namespaces"
)
def test_a_network_that_drops_packets_under_load():
    options = [
        "--engines",
        "P0",
        "C0",
        "C1",
        "--faults",
        "cut:C0",
        "--seconds",
        "4",
        "--peer-timeout",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, HELPERS / "processes" / "process_faults.py", *options],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
