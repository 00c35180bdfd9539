"""One role over several processes: votes and expert exchange across them, behind a router."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from deployment import Deployment, free_port
from engine_cases import GREEDY, Golden

from deepinfer_jax import LLM

MOE = Golden("deepseek_v3")
FOUR_RANKS = {"cpu_devices": 2, "data_parallel_size": 4, "expert_parallel_size": 4, "max_num_seqs": 4}


def start_job(d, role, name, **flags):
    """Two processes of one job; returns the engines' names."""
    port = free_port()
    for i in range(2):
        own = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": i}
        d.engine(role, name, "deepseek_v3", log=f"{name}.{i}", **FOUR_RANKS, **own, **flags)
    return [f"{name}.{i}" for i in range(2)]


def generate(d, prompts):
    with LLM(router=d.address) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def normal(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("normal"), deadline=3) as d:
        names = start_job(d, "normal", "N", decode_buckets=4)
        d.joined(*names)
        d.wait_for_engines(*names)
        yield d


def test_tokens_equal_the_reference_whatever_the_load(normal):
    assert "ranks here: [0, 1]" in normal.processes["N.0"].text and "ranks here: [2, 3]" in normal.processes["N.1"].text
    assert generate(normal, MOE.prompts) == MOE.greedy
    assert generate(normal, MOE.prompts[:1]) == MOE.greedy[:1]  # three ranks, and one process, are idle
    assert generate(normal, MOE.prompts * 6) == MOE.greedy * 6
    normal.wait_idle()
    by_process = {e["name"]: e["steps"] for e in normal.status()["engines"]}
    assert by_process["N.0"] == by_process["N.1"] > 0  # every process took every step


def test_the_job_ends_with_one_of_its_processes_and_comes_back(normal):
    normal.processes["N.1"].kill()
    assert normal.processes["N.0"].wait() in (1, 3)
    start = time.monotonic()
    with LLM(router=normal.address) as llm:
        out = llm.generate(prompt_token_ids=MOE.prompts[0], sampling_params=GREEDY, use_tqdm=False)[0].outputs[0]
    assert out.stop_reason == "no normal engine has been there for 3.0 s" and time.monotonic() - start < 10
    normal.processes["N.0"].start(), normal.processes["N.1"].start()
    normal.wait_for_engines("N.0", "N.1", timeout=150)
    assert generate(normal, MOE.prompts) == MOE.greedy
    for name in ("N.0", "N.1"):
        normal.processes[name].signal(15)
    assert [normal.processes[name].wait() for name in ("N.0", "N.1")] == [0, 0]


def test_a_prompt_job_of_two_processes_hands_over_to_another_mesh(tmp_path):
    with Deployment(tmp_path) as d:
        names = start_job(d, "prompt", "P")
        smaller = {"cpu_devices": 2, "data_parallel_size": 2, "expert_parallel_size": 2, "decode_buckets": 8}
        d.engine("completion", "C", "deepseek_v3", **smaller)
        d.joined(*names, "C")
        d.wait_for_engines(*names, "C")
        assert generate(d, MOE.prompts * 4) == MOE.greedy * 4
        d.wait_idle()
        assert all(e["steps"] > 0 for e in d.status()["engines"])
