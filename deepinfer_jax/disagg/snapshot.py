"""Snapshots of a disaggregated deployment, in the form every engine reads: requests as the caller
sees them, whoever holds them.

A cut through all engines at once: each stands between two steps while the others are looked at. A
request that both sides hold (delivered, not acknowledged) counts once, as its completion engine has
it; one that is being prefilled is taken with the KV that its prompt engine has; one that waits in
the router has none. Restored into another deployment, requests that decode go to completion engines
with their KV, as long as there is room; the others are prefilled again from the start, which gives
the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import msgspec

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.coordinator import Coordinator
from deepinfer_jax.disagg.split_request import CompletionPart, FannedOutRequest, unique_id
from deepinfer_jax.disagg.worker import EngineWorker
from deepinfer_jax.engine.admission import Admission
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.request_state import RequestState, logprob_entries
from deepinfer_jax.engine.seeds import SeedSource
from deepinfer_jax.outputs import RequestMetrics, RequestOutput
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
from deepinfer_jax.scheduler.routing.ids import AttemptId, HandoffId, PartId, attempt_of, parse_id
from deepinfer_jax.snapshot import files, job, records
from deepinfer_jax.snapshot import restore as snapshot_restore
from deepinfer_jax.snapshot.check import check
from deepinfer_jax.snapshot.records import (
    Base,
    CompletionRecord,
    Place,
    RequestRecord,
    SnapshotRecord,
)

Found = dict[PartId, tuple[int, CompletionRecord]]
"""Part's id -> (progress, its record on the engine that is further)."""


class Deployment(Protocol):
    """What a snapshot needs of a DisaggregatedEngine."""

    coordinator: Coordinator
    workers: dict[str, EngineWorker]
    completion_engines: list[CompletionEngine]
    config: EngineConfig
    admission: Admission
    seeds: SeedSource


def take(pd: Deployment, folder: str | Path) -> job.SnapshotJob:
    """See `snapshot.job.take`."""
    taken = job.SnapshotJob(Path(folder).absolute())
    engines = _alive(pd)
    for engine in engines:
        engine.ensure_mover()
        engine.runner.compile_missing("gather")

    def timed() -> job.Capture:
        start = time.perf_counter()
        with pd.coordinator.lock:
            captured = _capture(pd, engines)
        taken.pause = time.perf_counter() - start
        return captured

    return job.start_writing(taken, _hold(engines, timed))


def _alive(pd: Deployment) -> list[LLMEngine]:
    return [w.engine for w in pd.workers.values() if w.failed is None]


def _hold[T](engines: list[LLMEngine], call: Callable[[], T]) -> T:
    """call() while every engine stands between two steps."""
    if not engines:
        return call()
    return engines[0].boundary.run(lambda: _hold(engines[1:], call))


# ---- out -----------------------------------------------------------------------------------------


def _capture(pd: Deployment, engines: list[LLMEngine]) -> job.Capture:
    found: Found = {}
    prefix, copies, base, experts = [], [], Base(), None
    for engine in engines:
        captured = job.capture(engine)
        for request in captured.record.requests:
            _take_part(pd, request, base, found)
        prefix += base.shifted(captured.record.prefix)
        if engine.policy.does_decode:  # its loads are those that most steps have
            experts = captured.record.experts
        copies += captured.copies
        rows = {kind: len(rows) for kind, rows in captured.copies[0].rows.items()}
        base = base.after(captured.record.ranks, rows)
    record = SnapshotRecord(
        identity=engines[0].kv_identity(),
        role="DISAGGREGATED",
        created=time.time(),
        requests=[_record(pd, request, found) for request in pd.coordinator.requests.values()],
        outputs=[records.record_output(o) for o in _undelivered(pd)],
        prefix=prefix,
        seeds=pd.seeds.state,
        ranks=base.ranks,
        experts=experts,
    )
    return job.Capture(record, copies)


def _undelivered(pd: Deployment) -> list[RequestOutput]:
    outputs = []
    while not pd.coordinator.outputs.empty():
        outputs.append(pd.coordinator.outputs.get())
    for output in outputs:
        pd.coordinator.outputs.put(output)
    return outputs


def _take_part(pd: Deployment, request: RequestRecord, base: Base, found: Found) -> None:
    """Keeps an engine's record of a part unless another engine's is further, or its attempt is
    over."""
    output_of = parse_id(request.request_id)
    is_handoff, part = (
        isinstance(output_of, HandoffId),
        pd.coordinator.current(attempt_of(output_of)),
    )
    (completion,) = request.completions
    if part is None or completion.place is None:
        return
    if is_handoff and part.answering not in (None, output_of):
        return
    base.shift(completion.place)
    progress = 2 * len(completion.state.output_token_ids) + is_handoff
    if part.id not in found or progress >= found[part.id][0]:
        found[part.id] = progress, completion


def _record(pd: Deployment, request: FannedOutRequest, found: Found) -> RequestRecord:
    completions = []
    for part in request.parts:
        if part.index in request.done:
            record = _record_done(pd, part, request.done[part.index])
        elif part.id in found:
            record = found[part.id][1]
        else:
            record = _record_queued(pd, part)
        record.index = part.index
        completions.append(record)
    return RequestRecord(
        request_id=request.request_id,
        prompt=request.prompt,
        params=request.params.to_dict(),
        completions=completions,
    )


def _record_queued(pd: Deployment, part: CompletionPart) -> CompletionRecord:
    """A part that no engine has."""
    ids, limit = part.prompt_token_ids, pd.config.max_model_len
    state = RequestState(
        request_id=str(part.id),
        prompt_token_ids=ids,
        params=part.params.to_dict(),
        seed=part.seed,
        logprobs=None if part.params.logprobs is None else [],
        prompt_logprobs=None if part.params.prompt_logprobs is None else [None],
        metrics=RequestMetrics(part.arrival_time),
    )
    want = limit if part.params.max_tokens is None else part.params.max_tokens
    longest = max(len(ids) + 1, min(len(ids) + want, limit))
    place = Place(order=(2, 1 << 30), max_len=longest)
    return CompletionRecord(index=part.index, state=state, place=place)


def _record_done(pd: Deployment, part: CompletionPart, output: RequestOutput) -> CompletionRecord:
    """A part whose final output has been merged already."""
    (o,) = output.outputs
    detokenizer = pd.admission.new_detokenizer(part.prompt_token_ids, part.params)
    text = {"text": o.text, "taken": len(o.text), "finished": True}
    state = RequestState(
        request_id=str(part.id),
        prompt_token_ids=part.prompt_token_ids,
        params=part.params.to_dict(),
        seed=part.seed,
        output_token_ids=list(o.token_ids),
        logprobs=None if o.logprobs is None else [logprob_entries(e) for e in o.logprobs],
        cumulative_logprob=o.cumulative_logprob or 0.0,
        detokenizer=None if detokenizer is None else detokenizer.state_dict() | text,
        consumed=len(o.token_ids),
        reported=len(o.token_ids),
        metrics=records.record_output(output).metrics,
    )
    return CompletionRecord(
        index=part.index, state=state, finish_reason=o.finish_reason, stop_reason=o.stop_reason
    )


# ---- back ----------------------------------------------------------------------------------------


def restore(pd: Deployment, folder: str | Path, step: int | None = None) -> list[str]:
    """See `snapshot.restore.restore`. Besides, ValueError for a request that has streamed tokens
    and lost its KV: they would come again."""
    if jax.process_count() > 1:
        raise ValueError("a snapshot covers one process")
    loaded = files.load(folder, step)
    requests = loaded.record.requests
    engine = pd.completion_engines[0]
    loaded.record.check_identity(engine.kv_identity(), f"snapshot {folder}")
    check(loaded, engine.model_config.vocab_size)
    with pd.coordinator.lock:
        taken = [r.request_id for r in requests if pd.coordinator.is_active(r.request_id)]
        if taken:
            raise ValueError(f"requests {taken} of the snapshot are already running here")
        for record in requests:
            _check(record)
        moved: dict[str, list[RequestRecord]] = {}
        try:
            for record in requests:
                _adopt(pd, record, moved)
        except ValueError:
            for record in requests:
                _forget(pd, record.request_id)
            raise
        for output in loaded.record.outputs:
            pd.coordinator.outputs.put(output)
        pd.coordinator.dispatch()
    # without the lock: an engine may be waiting for it to report an output
    for name, mine in moved.items():
        part = msgspec.structs.replace(loaded.record, requests=mine, outputs=[], prefix=[])
        target = pd.workers[name].engine
        snapshot = files.Snapshot(part, loaded.arrays)
        target.boundary.run(partial(snapshot_restore.put, target, snapshot))
        pd.workers[name].wake()
    return [r.request_id for r in requests]


def _check(record: RequestRecord) -> None:
    for c in record.completions:
        if c.place is not None and not c.place.decoding:
            _refuse_streamed(record, c, "it has no KV")


def _refuse_streamed(record: RequestRecord, completion: CompletionRecord, why: str) -> None:
    """ValueError for a completion that would have to be prefilled again although its caller was
    given tokens one by one."""
    if completion.state.reported and record.params["output_kind"] == RequestOutputKind.DELTA.name:
        raise ValueError(
            f"request {record.request_id!r} has streamed tokens and {why}: a PROMPT engine would"
            " send them again"
        )


def _adopt(pd: Deployment, record: RequestRecord, moved: dict[str, list[RequestRecord]]) -> None:
    request = FannedOutRequest(
        record.request_id,
        record.prompt,
        record.completions[0].state.prompt_token_ids,
        SamplingParams.from_dict(record.params),
    )
    request.unique_id = unique_id(request.request_id)
    pd.coordinator.requests[request.request_id] = request
    loaded = records.load_request(pd.completion_engines[0], record)
    for c, saved in zip(loaded.completions, record.completions, strict=True):
        part = CompletionPart(request, c.index, c.params, c.seed, loaded.metrics.arrival_time)
        request.parts.append(part)
        if saved.place is None:
            delta = c.params.output_kind is RequestOutputKind.DELTA
            ids, metrics = request.prompt_token_ids, loaded.metrics
            output = RequestOutput(str(part.id), None, ids, None, [c.output(delta)], True, metrics)
            part.last = request.done[part.index] = output
            continue
        pd.coordinator.parts[part.id] = part
        attempt = _route(pd, record, saved, part)
        if attempt is not None:
            part.answering, part.answerer = attempt.id.handoff(0), attempt.engine
            renamed = msgspec.structs.replace(saved, index=0)
            moved.setdefault(attempt.engine, []).append(
                RequestRecord(
                    request_id=str(part.answering),
                    prompt=None,
                    params=saved.state.params,
                    completions=[renamed],
                )
            )


@dataclass(frozen=True)
class _Resumed:
    id: AttemptId
    engine: str  # the completion engine that goes on with it


def _route(
    pd: Deployment, record: RequestRecord, saved: CompletionRecord, part: CompletionPart
) -> _Resumed | None:
    """Gives a part to the router: to a completion engine that goes on with its KV, or, None, to be
    prefilled again."""
    assert saved.place is not None  # its request has not ended
    max_tokens = saved.place.max_len - len(part.prompt_token_ids)
    if saved.place.decoding:
        resumed = pd.coordinator.router.adopt(part.id, part.prompt_token_ids, max_tokens)
        if resumed is not None:
            return _Resumed(*resumed)
        _refuse_streamed(record, saved, "no completion engine has room for it")
    pd.coordinator.router.add(part.id, part.prompt_token_ids, max_tokens)
    return None


def _forget(pd: Deployment, request_id: str) -> None:
    """Takes back what `_adopt` has done for a request, if anything; no engine knows of it yet."""
    request = pd.coordinator.requests.pop(request_id, None)
    for part in request.parts if request is not None else ():
        pd.coordinator.parts.pop(part.id, None)
        pd.coordinator.router.cancel(part.id)
