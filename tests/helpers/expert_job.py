"""One process of a job of two, run by tests/experts/test_job.py: `expert_job.py PORT PROCESS FILE`.

Serves its share of the golden prompts of a small model whose experts are spread over both
processes and rearranged all the time, and prints {"tokens", "slots", "version", "compiles"}.
"""

from __future__ import annotations

import json
import sys

from engine_cases import GREEDY, SMALL, Golden

from deepinfer_jax.launch.common import LaunchArgs, build_engine
from deepinfer_jax.launch.processes import join_job
from deepinfer_jax.scheduler.roles import EngineType


def main(port: str, process: int, path: str) -> None:
    launch = LaunchArgs(
        coordinator=f"127.0.0.1:{port}",
        num_processes=2,
        process_id=process,
        cpu_devices=1,
        deadline=120.0,
    )
    job, golden = join_job(launch), Golden("deepseek_v3")
    values = SMALL | {
        "model": golden.path,
        "expert_parallel_size": 2,
        "num_redundant_experts": 2,
        "expert_rearrangement_interval": 5,
        "expert_placement": path,
    }
    engine = build_engine(EngineType.NORMAL, values, job)
    for i in range(process, len(golden.prompts), 2):
        engine.add_request(str(i), golden.prompts[i], GREEDY)
    tokens = {}
    while True:
        idle = [int(not engine.has_unfinished_requests())] * len(engine.schedulers)
        if job.group.all_reduce_min(idle):
            break
        tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    stats = engine.stats()
    found = {
        "tokens": tokens,
        "slots": engine.experts.arrays.slots.tolist(),
        "version": stats["experts"]["placement_version"],
        "compiles": stats["xla_compiles_after_warm_up"],
    }
    engine.close()
    print("answer", json.dumps(found), flush=True)
    job.group.wait_for_all()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
