"""One process of a job of two, run by test_snapshot_job.py: `snapshot_job.py PORT PROCESS MODEL
RANKS FOLDER snapshot|restore`.

snapshot: serves its requests, takes part in a snapshot, prints its number and goes on until it is
killed. restore: takes its share of the folder's newest snapshot over and prints {request: token
ids} as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from snapshot_cases import GOLDEN, PROMPTS, SAMPLED, TINY

from deepinfer_jax.launch.common import LaunchArgs, build_engine
from deepinfer_jax.launch.processes import join_job
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.snapshot.job import take
from deepinfer_jax.snapshot.restore import restore


def rounds(engine, group):
    """Outputs of one step after another, in step with the other process, until neither has anything
    to do."""
    while True:
        votes = [int(not engine.has_unfinished_requests())] * len(engine.schedulers)
        if group.all_reduce_min(votes):
            return
        yield engine.step()


def main(port: str, process: int, model: str, ranks: int, folder: str, what: str) -> None:
    launch = LaunchArgs(
        coordinator=f"127.0.0.1:{port}",
        num_processes=2,
        process_id=process,
        cpu_devices=ranks // 2,
        deadline=60.0,
    )
    job = join_job(launch)
    values = {
        **TINY,
        "model": str(GOLDEN / model),
        "data_parallel_size": ranks,
        "num_blocks": 40,
        "expert_parallel_size": 1,
    }
    engine = build_engine(EngineType.NORMAL, values, job)
    engine.ensure_mover()
    # snapshot() is called by the thread that steps: the other process would wait for the compiler
    engine.runner.compile_missing("gather")
    if what == "restore":
        ids = restore(engine, folder)
    else:
        for i, prompt in enumerate(PROMPTS[process::2]):
            engine.add_request(str(process + 2 * i), prompt, SAMPLED)
    done, saved = {}, None
    for step, outputs in enumerate(rounds(engine, job.group)):
        done |= {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
        if (
            what == "snapshot" and step == 3 + 4 * process
        ):  # not at the same time: the moment is agreed upon
            saved = take(engine, folder)
    if what == "restore":
        assert sorted(done) == sorted(ids)
        engine.check_integrity()
        print("answer", json.dumps(done), flush=True)
        job.group.wait_for_all()
        return
    print("answer", saved.wait(60), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
