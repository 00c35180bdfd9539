"""Which engines may join a deployment, and which requests a router takes: refused at the door, with
both values."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_jax.disagg.layout import Layout, check_layouts, differences
from deepinfer_jax.launch.cluster.members import EngineMember
from deepinfer_jax.rpc import messages as wire


def check_engine(hello: wire.Hello, members: Iterable[EngineMember]) -> Layout:
    """The newcomer's layout. Raises ValueError naming what differs from the engines that are
    here."""
    if hello.layout is None or hello.capacity is None or hello.model is None:
        raise ValueError(f"a {hello.kind} engine must say its layout, capacity and model")
    if hello.process >= hello.processes:
        raise ValueError(f"process {hello.process} of a job of {hello.processes} processes")
    layout = Layout.of_plain(hello.layout)
    for other in members:
        if (other.kind == "normal") != (hello.kind == "normal"):
            raise ValueError(
                f"a {hello.kind} engine cannot join a deployment of {other.kind} engines"
            )
        if other.name != hello.name:
            _check_job(hello, other)
        _check_layout(hello, layout, other)
    return layout


def _check_job(hello: wire.Hello, other: EngineMember) -> None:
    """Two living members of one job are two processes of it."""
    if hello.job != other.hello.job:
        return
    ours, theirs = (hello.kind, hello.processes), (other.kind, other.hello.processes)
    if ours != theirs:
        raise ValueError(
            f"job {hello.job!r} is {theirs[1]} {theirs[0]} processes (of {other.name}), not"
            f" {ours[1]} {ours[0]} ones"
        )
    if hello.process == other.hello.process:
        raise ValueError(f"process {hello.process} of job {hello.job!r} is here: {other.name}")


def _check_layout(hello: wire.Hello, layout: Layout, other: EngineMember) -> None:
    if other.kind == hello.kind:
        different = differences(layout, other.layout, "here", f"on {other.name}")
        if different or layout.role != other.layout.role:
            raise ValueError(f"engines of one deployment must agree: {'; '.join(different)}")
    else:
        prompt, completion = (layout, other.layout)
        if hello.kind == "completion":
            prompt, completion = completion, prompt
        check_layouts(prompt, completion)


def check_prompt(m: wire.Submit, model: wire.ModelInfo) -> None:
    """Raises ValueError for tokens that no engine can look up."""
    worst = max(m.prompt_token_ids)
    if worst >= model.vocab_size:
        raise ValueError(
            f"request {m.request_id!r}: token id {worst} is outside the vocabulary [0,"
            f" {model.vocab_size})"
        )
