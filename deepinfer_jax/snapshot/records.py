"""Requests of an engine as plain values, and back: everything a snapshot holds beside the blocks'
bytes.

A sequence's place is recorded, not its slot or block ids: whether it decodes or waits, how many of
its tokens have KV, and which rows of the snapshot's block array hold it. Rows may be shared by
sequences, as blocks are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.disagg.protocol import RequestState
from deepinfer_jax.engine.admission import new_detokenizer, new_sequence
from deepinfer_jax.engine.request_state import load_state, request_state
from deepinfer_jax.engine.requests import Completion, Request
from deepinfer_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.scheduler import resume
from deepinfer_jax.scheduler.sequence import SequenceStatus
from deepinfer_jax.snapshot.copy import Rows

if TYPE_CHECKING:
    from deepinfer_jax.engine.llm_engine import LLMEngine

FORMAT = 2


class SnapshotMismatch(ValueError):
    """A snapshot of another model, layout or format; the message names both values."""


@dataclasses.dataclass(frozen=True)
class Base:
    """How many ranks and rows the parts of a snapshot before this one have: its own numbers are
    shifted by them."""

    ranks: int = 0
    blocks: int = 0
    states: int = 0

    def after(self, ranks: int, rows: Mapping[str, int]) -> Base:
        """The next part's, where this one has so many ranks and rows of each kind."""
        return Base(
            self.ranks + ranks,
            self.blocks + rows.get("blocks", 0),
            self.states + rows.get("states", 0),
        )

    def shift_place(self, place: dict[str, Any]) -> None:
        place["rank"] += self.ranks
        place["rows"] = [row + self.blocks for row in place["rows"]]
        if place["state_row"] is not None:
            place["state_row"] += self.states

    def shift_prefix(self, entries: list[list[Any]]) -> list[list[Any]]:
        return [[rank + self.ranks, row + self.blocks, *rest] for rank, row, *rest in entries]


def places(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every completion that has not ended."""
    return [
        c["place"] for r in meta["requests"] for c in r["completions"] if c["place"] is not None
    ]


def merge(metas: list[dict[str, Any]], rows: list[dict[str, int]]) -> dict[str, Any]:
    """What the processes of a job have recorded at the same step, as one meta; rows: of each kind
    in each one's arrays."""
    base, requests, outputs, prefix = Base(), [], [], []
    for meta, count in zip(metas, rows, strict=True):
        for place in places(meta):
            base.shift_place(place)
        requests += meta["requests"]
        outputs += meta["outputs"]
        prefix += base.shift_prefix(meta["prefix"])
        base = base.after(meta["ranks"], count)
    requests.sort(key=lambda r: r["completions"][0]["state"]["metrics"]["arrival_time"])
    return metas[0] | {
        "requests": requests,
        "outputs": outputs,
        "prefix": prefix,
        "ranks": base.ranks,
    }


def used_rows(meta: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """i64 rows of each kind's arrays that requests and prefixes refer to."""
    blocks = [row for place in places(meta) for row in place["rows"]] + [
        row for _, row, *_ in meta["prefix"]
    ]
    states = [place["state_row"] for place in places(meta) if place["state_row"] is not None]
    return {"blocks": np.array(blocks, np.int64), "states": np.array(states, np.int64)}


def share_of(meta: dict[str, Any], ranks: int, owners: list[int], process: int) -> dict[str, Any]:
    """The part of a snapshot that one process of a job goes on with, ranks renumbered to its own
    `ranks`.

    owners: the process of each of the job's ranks, a process's ranks following each other. Requests
    go to the rank they came from, counted round; from fewer ranks than there are here, round robin.
    Every process sees the same whole and takes another part of it.
    """
    kept, total, at = [], len(owners), owners.index(process)
    spread = meta["ranks"] < total
    for i, request in enumerate(meta["requests"]):
        own = [c["place"] for c in request["completions"] if c["place"] is not None]
        rank = i if spread or not own else own[0]["rank"]
        if owners[rank % total] == process:
            kept.append(request)
            for place in own:
                place["rank"] = 0 if spread else (place["rank"] - at) % total % ranks
    ids = {r["request_id"] for r in kept}
    all_ids = {r["request_id"] for r in meta["requests"]}
    outputs = [
        o
        for o in meta["outputs"]
        if o["request_id"] in ids or (o["request_id"] not in all_ids and owners[0] == process)
    ]
    prefix = [
        [(r // total) * ranks + r % total - at, *rest]
        for r, *rest in meta["prefix"]
        if owners[r % total] == process
    ]
    return meta | {
        "requests": kept,
        "outputs": outputs,
        "prefix": prefix,
        "ranks": 0 if spread else ranks,
    }


def layout(engine: LLMEngine) -> dict[str, Any]:
    """What must be equal for KV to be exchanged, as plain values: model, number formats, block
    size, caches. Not: mesh, pool size."""
    described = engine.ensure_mover().describe()
    return {
        "format": FORMAT,
        "model": engine.fingerprint(),
        "dtype": np.dtype(engine.config.dtype).name,
        "quantization": engine.config.quantization,
        "load_format": engine.args.load_format,
        "block_size": described["block_size"],
        "caches": {
            c["name"]: {k: v for k, v in c.items() if k != "name"} for c in described["caches"]
        },
    }


def check_layout(found: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Raises SnapshotMismatch naming every difference with both values."""
    names = dict.fromkeys((*own, *found))
    problems = [
        f"{n}: {found.get(n)!r} there, {own.get(n)!r} here"
        for n in names
        if found.get(n) != own.get(n)
    ]
    if problems:
        raise SnapshotMismatch(f"{what} does not fit this engine: " + "; ".join(problems))


# ---- out -----------------------------------------------------------------------------------------


def record_request(
    engine: LLMEngine, request: Request, blocks: Rows, states: Rows
) -> dict[str, Any]:
    """One request; its blocks and state rows are added to the two lists."""
    return {
        "request_id": request.request_id,
        "prompt": request.prompt,
        "params": request.params.to_dict(),
        "completions": [_record_completion(engine, c, blocks, states) for c in request.completions],
    }


def _record_completion(
    engine: LLMEngine, c: Completion, blocks: Rows, states: Rows
) -> dict[str, Any]:
    return {
        "index": c.index,
        "state": request_state(c).to_dict(),
        "finish_reason": c.finish_reason,
        "stop_reason": c.stop_reason,
        "place": None if c.finished else _record_place(engine, c, blocks, states),
    }


def _record_place(engine: LLMEngine, c: Completion, blocks: Rows, states: Rows) -> dict[str, Any]:
    seq, s = c.seq, engine.schedulers[c.rank]
    held = resume.held_blocks(s, seq).tolist()
    full = seq.num_cached // engine.config.block_size
    return {
        "rank": c.rank,
        "order": list(resume.order_key(s, seq)),
        "decoding": seq.status in resume.DECODING,
        "num_cached": seq.num_cached if held else 0,
        "rows": [blocks.add(c.rank, b, changing=i >= full) for i, b in enumerate(held)],
        "state_row": (
            states.add(c.rank, seq.state_id, changing=True) if seq.state_id >= 0 and held else None
        ),
        "max_len": s.max_len_of(seq),
    }


def record_output(output: RequestOutput) -> dict[str, Any]:
    """A RequestOutput nobody has been given yet."""
    return dataclasses.asdict(output)


# ---- back ----------------------------------------------------------------------------------------


def load_output(values: Mapping[str, Any]) -> RequestOutput:
    values = dict(values)
    values["metrics"] = values["metrics"] and RequestMetrics(**values["metrics"])
    values["prompt_logprobs"] = values["prompt_logprobs"] and [
        e and _logprobs(e) for e in values["prompt_logprobs"]
    ]
    values["outputs"] = [_load_completion_output(o) for o in values["outputs"]]
    return RequestOutput(**values)


def _load_completion_output(values: Mapping[str, Any]) -> CompletionOutput:
    return CompletionOutput(
        **{**values, "logprobs": values["logprobs"] and [_logprobs(e) for e in values["logprobs"]]}
    )


def _logprobs(entry: Mapping[str, Any]) -> dict[int, Logprob]:
    return {int(token): Logprob(**value) for token, value in entry.items()}


def load_request(engine: LLMEngine, record: Mapping[str, Any]) -> Request:
    """The request with its completions; their sequences have all tokens and nothing cached, and
    belong to no scheduler yet.

    Raises ValueError naming the request when it needs more tokens than this engine allows.
    """
    first = record["completions"][0]["state"]
    request = Request(
        record["request_id"],
        record["prompt"],
        first["prompt_token_ids"],
        SamplingParams.from_dict(record["params"]),
    )
    for values in record["completions"]:
        request.completions.append(_load_completion(engine, request, values))
    return request


def _load_completion(engine: LLMEngine, request: Request, values: Mapping[str, Any]) -> Completion:
    state = RequestState.from_dict(values["state"])
    params = SamplingParams.from_dict(state.params)
    seq = new_sequence(engine, request, params, np.asarray(state.prompt_token_ids, np.int32))
    seq.load_prefix(state.output_token_ids, 0)
    c = Completion(
        request=request,
        seq=seq,
        rank=0,
        index=values["index"],
        params=params,
        detokenizer=new_detokenizer(engine, state.prompt_token_ids, params),
        logprobs=None if params.logprobs is None else [],
        seed=state.seed,
    )
    load_state(engine, c, state)
    c.finish_reason, c.stop_reason = values["finish_reason"], values["stop_reason"]
    if values["place"] is None:
        seq.status = SequenceStatus.FINISHED_STOPPED
        seq.finish_reason, seq.stop_reason = c.finish_reason, c.stop_reason
        return c
    limit = values["place"]["max_len"]
    most = engine.config.max_model_len
    if limit > max(most, seq.prompt_len + 1):
        raise ValueError(
            f"request {request.request_id!r}: may reach {limit} tokens, this engine's max_model_len"
            f" is {most}"
        )
    seq.max_tokens = (
        limit - seq.prompt_len
    )  # where it would have ended, also if this engine allows more
    return c


def rewind_prefill(engine: LLMEngine, c: Completion) -> None:
    """Takes a prefilled sequence's first token back, so that a PROMPT engine computes it again
    (draws are keyed by position) and hands the request over as if it had just come."""
    state = request_state(c)
    metrics, tokens = c.request.metrics, np.asarray(state.prompt_token_ids, np.int32)
    max_tokens = c.seq.max_tokens
    c.seq = new_sequence(engine, c.request, c.params, tokens)
    c.seq.max_tokens = max_tokens
    c.detokenizer = new_detokenizer(engine, state.prompt_token_ids, c.params)
    c.logprobs = None if c.params.logprobs is None else []
    c.cumulative_logprob, c.consumed, c.reported = 0.0, 0, 0
    c.request.metrics = metrics
