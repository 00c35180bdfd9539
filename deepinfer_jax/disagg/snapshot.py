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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from deepinfer_jax.disagg.protocol import RequestState
from deepinfer_jax.disagg.split_request import CompletionPart, FannedOutRequest, unique_id
from deepinfer_jax.engine.admission import new_detokenizer
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.request_state import logprob_entries
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams
from deepinfer_jax.snapshot import files as snapshot_files
from deepinfer_jax.snapshot import job as snapshot
from deepinfer_jax.snapshot import records as snapshot_state
from deepinfer_jax.snapshot import restore as snapshot_resume

if TYPE_CHECKING:
    from deepinfer_jax.disagg.deployment import DisaggregatedEngine


def take(pd: DisaggregatedEngine, folder: str | Path) -> snapshot.SnapshotJob:
    """See `LLMEngine.snapshot`."""
    job = snapshot.SnapshotJob(Path(folder).absolute())
    engines = _alive(pd)
    layout = snapshot_state.layout(engines[0])
    for engine in engines:
        engine.compile_copies()

    def timed() -> snapshot.Capture:
        start = time.perf_counter()
        with pd._lock:
            captured = _capture(pd, engines, layout)
        job.pause = time.perf_counter() - start
        return captured

    return snapshot.start_writing(job, _hold(engines, timed))


def _alive(pd: DisaggregatedEngine) -> list[LLMEngine]:
    return [w.engine for w in pd.workers.values() if w.failed is None]


def _hold(engines: list[LLMEngine], call: Callable[[], Any]) -> Any:
    """call() while every engine stands between two steps."""
    if not engines:
        return call()
    return engines[0].at_step_boundary(lambda: _hold(engines[1:], call))


# ---- out -----------------------------------------------------------------------------------------


def _capture(
    pd: DisaggregatedEngine, engines: list[LLMEngine], layout: dict[str, Any]
) -> snapshot.Capture:
    found: dict[str, tuple[int, dict[str, Any]]] = {}  # part -> (progress, completion record)
    prefix, copies, base = [], [], snapshot_state.Base()
    for engine in engines:
        captured = snapshot.capture(engine, layout)
        for request in captured.meta["requests"]:
            _take_part(pd, request, base, found)
        prefix += base.shift_prefix(captured.meta["prefix"])
        copies += captured.copies
        base = base.after(
            captured.meta["ranks"],
            {kind: len(rows) for kind, rows in captured.copies[0].rows.items()},
        )
    meta = {
        "layout": layout,
        "role": "DISAGGREGATED",
        "created": time.time(),
        "requests": [_record(pd, request, found) for request in pd._requests.values()],
        "outputs": [snapshot_state.record_output(o) for o in _undelivered(pd)],
        "prefix": prefix,
        "seeds": pd._seeds.bit_generator.state,
        "ranks": base.ranks,
    }
    return snapshot.Capture(meta, copies)


def _undelivered(pd: DisaggregatedEngine) -> list[RequestOutput]:
    outputs = []
    while not pd._outputs.empty():
        outputs.append(pd._outputs.get())
    for output in outputs:
        pd._outputs.put(output)
    return outputs


def _take_part(
    pd: DisaggregatedEngine,
    request: dict[str, Any],
    base: snapshot_state.Base,
    found: dict[str, tuple[int, dict[str, Any]]],
) -> None:
    """Keeps an engine's record of a part unless another engine's is further, or its attempt is
    over."""
    attempt, _, handoff = request["request_id"].partition("/")
    part = pd._current(attempt)
    (completion,) = request["completions"]
    if (
        part is None
        or completion["place"] is None
        or (handoff and part.answering not in (None, request["request_id"]))
    ):
        return
    base.shift_place(completion["place"])
    progress = 2 * len(completion["state"]["output_token_ids"]) + bool(handoff)
    if progress >= found.get(part.id, (0, None))[0]:
        found[part.id] = progress, completion


def _record(
    pd: DisaggregatedEngine, request: FannedOutRequest, found: dict[str, tuple[int, dict[str, Any]]]
) -> dict[str, Any]:
    completions = []
    for part in request.parts:
        if part.index in request.done:
            record = _record_done(pd, part, request.done[part.index])
        elif part.id in found:
            record = found[part.id][1]
        else:
            record = _record_queued(pd, part)
        completions.append(record | {"index": part.index})
    return {
        "request_id": request.request_id,
        "prompt": request.prompt,
        "params": request.params.to_dict(),
        "completions": completions,
    }


def _record_queued(pd: DisaggregatedEngine, part: CompletionPart) -> dict[str, Any]:
    """A part that no engine has."""
    ids, limit = part.prompt_token_ids, pd.config.max_model_len
    state = RequestState(
        part.id, ids, part.params.to_dict(), part.seed, metrics={"arrival_time": part.arrival_time}
    )
    if part.params.logprobs is not None:
        state.logprobs = []
    if part.params.prompt_logprobs is not None:
        state.prompt_logprobs = [None]
    want = limit if part.params.max_tokens is None else part.params.max_tokens
    place = {
        "rank": 0,
        "order": [2, 1 << 30],
        "decoding": False,
        "num_cached": 0,
        "rows": [],
        "state_row": None,
    }
    place["max_len"] = max(len(ids) + 1, min(len(ids) + want, limit))
    return {"state": state.to_dict(), "finish_reason": None, "stop_reason": None, "place": place}


def _record_done(
    pd: DisaggregatedEngine, part: CompletionPart, output: RequestOutput
) -> dict[str, Any]:
    """A part whose final output has been merged already."""
    (o,) = output.outputs
    state = RequestState(
        part.id, part.prompt_token_ids, part.params.to_dict(), part.seed, list(o.token_ids)
    )
    state.metrics = snapshot_state.record_output(output)["metrics"]
    state.logprobs = None if o.logprobs is None else [logprob_entries(e) for e in o.logprobs]
    state.cumulative_logprob = o.cumulative_logprob or 0.0
    state.consumed = state.reported = len(o.token_ids)
    detokenizer = new_detokenizer(pd, part.prompt_token_ids, part.params)
    if detokenizer is not None:
        state.detokenizer = detokenizer.state_dict() | {
            "text": o.text,
            "taken": len(o.text),
            "finished": True,
        }
    return {
        "state": state.to_dict(),
        "finish_reason": o.finish_reason,
        "stop_reason": o.stop_reason,
        "place": None,
    }


# ---- back ----------------------------------------------------------------------------------------


def restore(pd: DisaggregatedEngine, folder: str | Path, step: int | None = None) -> list[str]:
    """See `LLMEngine.restore`. Besides, ValueError for a request that has streamed tokens and lost
    its KV: they would come again."""
    if jax.process_count() > 1:
        raise ValueError("a snapshot covers one process")
    loaded = snapshot_files.load(folder, step)
    engine = pd.completion_engines[0]
    snapshot_state.check_layout(
        loaded.meta["layout"], snapshot_state.layout(engine), f"snapshot {folder}"
    )
    with pd._lock:
        taken = [r["request_id"] for r in loaded.meta["requests"] if pd.is_active(r["request_id"])]
        if taken:
            raise ValueError(f"requests {taken} of the snapshot are already running here")
        for record in loaded.meta["requests"]:
            _check(record)
        moved: dict[str, list[dict[str, Any]]] = {}
        try:
            for record in loaded.meta["requests"]:
                _adopt(pd, record, moved)
        except ValueError:
            for record in loaded.meta["requests"]:
                _forget(pd, record["request_id"])
            raise
        for output in loaded.meta["outputs"]:
            pd._outputs.put(snapshot_state.load_output(output))
        pd._dispatch()
    for (
        name,
        records,
    ) in moved.items():  # without the lock: an engine may be waiting for it to report an output
        meta = loaded.meta | {"requests": records, "outputs": [], "prefix": []}
        target = pd.workers[name].engine
        target.at_step_boundary(
            lambda e=target, m=meta: snapshot_resume.put(
                e, snapshot_files.Snapshot(m, loaded.arrays)
            )
        )
        pd.workers[name].wake()
    return [r["request_id"] for r in loaded.meta["requests"]]


def _check(record: dict[str, Any]) -> None:
    for c in record["completions"]:
        if c["place"] is not None and not c["place"]["decoding"]:
            _refuse_streamed(record, c, "it has no KV")


def _refuse_streamed(record: dict[str, Any], completion: dict[str, Any], why: str) -> None:
    """ValueError for a completion that would have to be prefilled again although its caller was
    given tokens one by one."""
    if (
        completion["state"]["reported"]
        and record["params"]["output_kind"] == RequestOutputKind.DELTA.name
    ):
        raise ValueError(
            f"request {record['request_id']!r} has streamed tokens and {why}: a PROMPT engine would"
            " send them again"
        )


def _adopt(
    pd: DisaggregatedEngine, record: dict[str, Any], moved: dict[str, list[dict[str, Any]]]
) -> None:
    first = record["completions"][0]["state"]
    request = FannedOutRequest(
        record["request_id"],
        record["prompt"],
        first["prompt_token_ids"],
        SamplingParams.from_dict(record["params"]),
    )
    request.unique_id = unique_id(request.request_id)
    pd._requests[request.request_id] = request
    loaded = snapshot_state.load_request(pd.completion_engines[0], record)
    for c, values in zip(loaded.completions, record["completions"], strict=True):
        part = CompletionPart(request, c.index, c.params, c.seed, loaded.metrics.arrival_time)
        request.parts.append(part)
        if values["place"] is None:
            delta = c.params.output_kind is RequestOutputKind.DELTA
            output = RequestOutput(
                part.id,
                None,
                request.prompt_token_ids,
                None,
                [c.output(delta)],
                True,
                loaded.metrics,
            )
            part.last = request.done[part.index] = output
            continue
        pd._parts[part.id] = part
        max_tokens = values["place"]["max_len"] - len(part.prompt_token_ids)
        if not values["place"]["decoding"]:
            pd.router.add(part.id, part.prompt_token_ids, max_tokens)
            continue
        resumed = pd.router.resume(part.id, part.prompt_token_ids, max_tokens)
        if resumed is None:
            _refuse_streamed(record, values, "no completion engine has room for it")
            pd.router.add(part.id, part.prompt_token_ids, max_tokens)
            continue
        attempt, name = resumed
        part.answering = f"{attempt}/0"
        renamed = {
            "request_id": part.answering,
            "prompt": None,
            "params": values["state"]["params"],
        }
        moved.setdefault(name, []).append(renamed | {"completions": [values | {"index": 0}]})


def _forget(pd: DisaggregatedEngine, request_id: str) -> None:
    """Takes back what `_adopt` has done for a request, if anything; no engine knows of it yet."""
    request = pd._requests.pop(request_id, None)
    for part in request.parts if request is not None else ():
        pd._parts.pop(part.id, None)
        pd.router.cancel(part.id)
