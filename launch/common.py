"""What the role scripts share: their flags, processes and devices, the engine, what is printed at
start."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from deepinfer_jax.config import EngineArgs
from deepinfer_jax.disagg.config import ROLE_FIELDS
from deepinfer_jax.disagg.layout import Layout
from deepinfer_jax.disagg.protocol import HandoffConfig
from deepinfer_jax.flags import add_dataclass_flags, add_model_flag, dataclass_values
from deepinfer_jax.launch.args import LaunchArgs
from deepinfer_jax.launch.logs import set_up_logging
from deepinfer_jax.launch.processes import Job
from deepinfer_jax.rpc.channel import HubConfig
from deepinfer_jax.rpc.endpoint import as_endpoint, host_of, is_loopback
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.scheduler.roles import EngineType

if TYPE_CHECKING:  # JAX must not start before the job is joined
    from deepinfer_jax.disagg.engines import ServedEngine

MAY_DIFFER = (
    *(
        "model",
        "tokenizer",
        "served_model_name",
        "seed",
        "disable_log_stats",
        "metrics_port",
        "metrics_host",
    ),
    *(
        "num_blocks",
        "gpu_memory_utilization",
        "device_memory_bytes",
        "compilation_cache",
        "strict_compiles",
    ),
    *("kv_store", "kv_store_bytes", "kv_host_bytes", "kv_store_write"),
)
"""EngineArgs that processes of one job may set differently: paths and memory of their own (of the
model, the content is compared)."""


def add_role_flags(parser: argparse.ArgumentParser, role: EngineType) -> None:
    add_model_flag(parser)
    add_dataclass_flags(parser, LaunchArgs, "process")
    add_dataclass_flags(parser, EngineArgs, "engine", skip=("model", "engine_type"))


def role_main(role: EngineType, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Parses flags, builds the role's engine, serves until drained. The exit code: 0 drained, 1
    crashed, 2 bad input or refused by the router, 3 the job has lost a process."""
    parser = argparse.ArgumentParser(
        prog=f"deepinfer-jax launch {role.name.lower()}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_role_flags(parser, role)
    args = parser.parse_args(argv)
    set_up_logging()
    try:
        launch = LaunchArgs(**dataclass_values(args, LaunchArgs))
        values = {
            **ROLE_FIELDS.get(role, {}),
            **dataclass_values(args, EngineArgs),
            "engine_type": role,
        }
        return serve(role, launch, values)
    except (ValueError, OSError) as error:
        print(f"deepinfer-jax: error: {error}", file=sys.stderr, flush=True)
        return 2


def serve(role: EngineType, launch: LaunchArgs, engine_values: dict[str, Any]) -> int:
    from deepinfer_jax.launch.processes import join_job

    job = join_job(launch)  # before anything touches a device
    from deepinfer_jax.launch.node import EngineServer, NodeConfig

    if launch.transport not in ("host", "device"):
        raise ValueError(f"--transport must be host or device, got {launch.transport!r}")
    security = Security.from_file(launch.secret_file)
    as_endpoint(launch.router)
    name = launch.name or f"{role.name.lower()}-{socket.gethostname()}"
    config = NodeConfig(
        router=as_endpoint(launch.router),
        name=name if job.processes == 1 else f"{name}.{job.process}",
        job=name,
        process=job.process,
        processes=job.processes,
        data=as_endpoint(launch.data),
        advertise=_advertised(launch),
        transport=launch.transport,
        security=security,
        hub=HubConfig(
            heartbeat=launch.heartbeat,
            peer_timeout=launch.peer_timeout,
            connect_timeout=launch.deadline,
        ),
        handoff=HandoffConfig(timeout=launch.deadline, retry_delay=0.002),
        reserve_fraction=launch.reserve_fraction,
        drain_timeout=launch.drain_timeout,
        snapshot_on_sigterm=engine_values.get("snapshot_on_sigterm"),
    )
    if role is EngineType.COMPLETION:
        security.check_bind(config.data)
    try:
        engine = build_engine(role, engine_values, job)
    except Exception as error:
        if job.group is not None:
            _leave_job(error)
        raise
    layout = engine.layout()
    print_banner(config.name, engine, layout, job)
    return EngineServer(engine, config, layout, job.group).run()


def _leave_job(error: Exception) -> NoReturn:
    """At once: jax.distributed would wait for the others, and they wait for this process's vote."""
    bad_input = isinstance(error, ValueError | OSError)
    if bad_input:
        print(f"deepinfer-jax: error: {error}", file=sys.stderr, flush=True)
    else:
        logging.getLogger(__name__).error("cannot start", exc_info=error)
    os._exit(2 if bad_input else 1)


def _advertised(launch: LaunchArgs) -> str | None:
    host = host_of(as_endpoint(launch.data))
    if launch.advertise is None and host in ("0.0.0.0", "*", "::"):
        return socket.gethostname()
    if launch.advertise is None and not is_loopback(host):
        return None
    return launch.advertise


def build_engine(role: EngineType, values: dict[str, Any], job: Job) -> ServedEngine:
    from deepinfer_jax.config import EngineConfig
    from deepinfer_jax.disagg.completion_engine import CompletionEngine
    from deepinfer_jax.disagg.engines import ServedEngine
    from deepinfer_jax.disagg.prompt_engine import PromptEngine
    from deepinfer_jax.engine.kv_identity import model_fingerprint
    from deepinfer_jax.models.resolve import resolve_model_path
    from deepinfer_jax.runner.mesh import RankPlacement, make_mesh
    from deepinfer_jax.runner.model_source import ModelSource

    roles = {EngineType.PROMPT: PromptEngine, EngineType.COMPLETION: CompletionEngine}
    cls = roles.get(role, ServedEngine)
    args = EngineArgs(**values)
    if job.group is None:
        return cls(args)
    for field in dataclasses.fields(args):
        if field.name not in MAY_DIFFER:
            job.group.must_agree(field.name, getattr(args, field.name))
    job.group.must_agree("model", model_fingerprint(resolve_model_path(args.model)))
    axes = EngineConfig.resolve(args, ModelSource.find(args).config).axes
    job.group.bind(axes.dp, RankPlacement(make_mesh(axes), axes).local_ranks)
    engine = cls(args, dp_group=job.group)
    job.group.wait_for_all()
    return engine


def print_banner(name: str, engine: ServedEngine, layout: Layout, job: Job) -> None:
    """Role, mesh, model fingerprint and cache layout, one line each."""
    axes, mesh = engine.config.axes, engine.mesh
    caches = {n: msgspec.to_builtins(c) for n, c in layout.caches.items()}
    lines = [
        (
            f"role {engine.config.role.name} ({int(engine.config.role)}), process {job.process} of"
            f" {job.processes}"
        ),
        (
            f"mesh dp={axes.dp} ep={axes.ep} tp={axes.tp} over {mesh.devices.size}"
            f" {mesh.devices.flat[0].platform} devices, ranks here:"
            f" {list(engine.runner.placement.local_ranks)}"
        ),
        (
            f"model {Path(str(engine.args.model)).name}, fingerprint {layout.model}, dtype"
            f" {json.dumps(str(engine.config.dtype.__name__))}"
        ),
        (
            f"cache {engine.runner.num_blocks} blocks of {layout.block_size} per rank,"
            f" max_model_len {layout.max_model_len}"
        ),
        *(f"cache {n}: {' '.join(f'{k}={v}' for k, v in c.items())}" for n, c in caches.items()),
    ]
    for line in lines:
        print(f"{name}: {line}", flush=True)
