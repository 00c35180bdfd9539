"""Which processes make up this job, and how they vote. Importing this starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.launch.args import LaunchArgs
from deepinfer_jax.launch.votes import SocketDPGroup, connect_votes


@dataclass(frozen=True)
class Job:
    """group: votes between the processes; None for one process."""

    process: int = 0
    processes: int = 1
    group: SocketDPGroup | None = None


def detect(launch: LaunchArgs, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments for jax.distributed.initialize; {} leaves the detection to JAX (SLURM, Open MPI);
    None: one process.

    In order: flags; LeaderWorkerSet's and Indexed Jobs' variables; what JAX detects. ValueError for
    half a set of flags.
    """
    given = {
        "coordinator": launch.coordinator,
        "num_processes": launch.num_processes,
        "process_id": launch.process_id,
    }
    if any(v is not None for v in given.values()):
        if launch.num_processes == 1:
            return None
        missing = [f"--{k.replace('_', '-')}" for k, v in given.items() if v is None]
        if missing:
            raise ValueError(
                "one job of several processes needs --coordinator, --num-processes and"
                f" --process-id; missing {missing}"
            )
        return _arguments(launch.coordinator, launch.num_processes, launch.process_id)
    if int(env.get("LWS_GROUP_SIZE", 1)) > 1:
        port = env.get("DEEPINFER_COORDINATOR_PORT", "9521")
        return _arguments(
            f"{env['LWS_LEADER_ADDRESS']}:{port}",
            int(env["LWS_GROUP_SIZE"]),
            int(env["LWS_WORKER_INDEX"]),
        )
    if "JOB_COMPLETION_INDEX" in env and int(env.get("DEEPINFER_NUM_PROCESSES", 1)) > 1:
        return _arguments(
            env["DEEPINFER_COORDINATOR"],
            int(env["DEEPINFER_NUM_PROCESSES"]),
            int(env["JOB_COMPLETION_INDEX"]),
        )
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_ID" in env:
        return {}
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return {}
    return None


def _arguments(coordinator: str, count: int, index: int) -> dict[str, Any]:
    if not 0 <= index < count:
        raise ValueError(f"process {index} of a job of {count} processes")
    return {"coordinator_address": coordinator, "num_processes": count, "process_id": index}


def join_job(launch: LaunchArgs) -> Job:
    """Sets up devices and, for several processes, jax.distributed and the vote group. Before JAX's
    backend starts."""
    import jax

    if launch.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", launch.cpu_devices)
    arguments = detect(launch, os.environ)
    if arguments is None:
        return Job()
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    if launch.local_devices:
        arguments["local_device_ids"] = list(launch.local_devices)
    jax.distributed.initialize(**arguments)
    group = connect_votes(
        jax.process_index(),
        jax.process_count(),
        launch.deadline,
        arguments.get("coordinator_address"),
    )
    return Job(jax.process_index(), jax.process_count(), group)
