"""ModelRunner: turns scheduler outputs into dispatched programs. Owns parameters, caches and decode
state on the device."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.models.loading import LoadedModel
from deepinfer_jax.runner import huge_pages, kv_pools
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.decode_state import ResultRows
from deepinfer_jax.runner.layouts import CLONE_BUCKET, UPDATE_BUCKET, ProgramKey
from deepinfer_jax.runner.memory import profile_num_blocks
from deepinfer_jax.runner.mesh import RankPlacement
from deepinfer_jax.runner.packing import PackedLayout
from deepinfer_jax.runner.programs import ADMIT_BUCKETS, StepPrograms
from deepinfer_jax.scheduler.outputs import SchedulerOutputs

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(program, programs ready, programs in all)."""
RowFiller = Callable[[Any, dict[str, np.ndarray], int], None]
"""(sequence, writable views of the admit fields, row): writes one sequence's sampling parameters.
"""


@dataclass
class InFlight:
    """A dispatched step whose results have not been read."""

    key: ProgramKey
    substeps: list[list[SchedulerOutputs]]  # per step of the program, one output per local rank
    results: (
        jax.Array
    )  # i32 [ranks * rows * steps, 3 + 2N] on its way to the host; a row's steps are neighbours
    prompt_logprobs: jax.Array | None
    placement: RankPlacement
    plp_items: list[list[tuple[Any, int, int]]] = field(
        default_factory=list
    )  # per rank: (seq, first position, rows)
    dispatched: float = field(default_factory=time.perf_counter)

    def ready(self) -> bool:
        return self.results.is_ready()

    @property
    def is_prefill(self) -> bool:
        return self.key.kind == "prefill"

    def wait(self) -> list[list[ResultRows]]:
        """Per step of the program and local rank, the packed rows in that step's row order; waits
        for the device."""
        by_rank = self._split(self.results)
        if len(self.substeps) == 1:
            return [[ResultRows(r) for r in by_rank]]
        first = self.substeps[0]
        return [
            [
                ResultRows(
                    r.reshape(-1, self.key.steps, r.shape[-1])[rows_of(first[i].slots, o.slots), k]
                )
                for i, (r, o) in enumerate(zip(by_rank, step, strict=True))
            ]
            for k, step in enumerate(self.substeps)
        ]

    def wait_prompt_logprobs(self) -> list[ResultRows]:
        return [ResultRows(r) for r in self._split(self.prompt_logprobs)]

    def _split(self, array: jax.Array) -> np.ndarray:
        rows = self.placement.fetch(array)
        return rows.reshape(len(self.substeps[0]), -1, rows.shape[-1])


class ModelRunner:
    """One role's device side."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        mesh: jax.sharding.Mesh,
        agree: Callable[[int], int] = lambda blocks: blocks,
    ) -> None:
        """agree: the number of blocks that all processes of the job can have, from this process's
        own."""
        self.config, self.mesh = config, mesh
        self.placement = RankPlacement(mesh, config.axes)
        cache_specs = loaded.model_class.cache_specs(loaded.config, config.axes, config.kv_dtype)
        self.programs = StepPrograms(
            config,
            loaded.config,
            loaded.graphdef,
            loaded.params,
            loaded.param_specs,
            cache_specs,
            mesh,
        )
        self.params = tuple(jax.tree.leaves(loaded.params))
        huge_pages.collapse(self.params)
        self.cache_specs = cache_specs
        self.model_config = loaded.config
        own = config.args.num_blocks or profile_num_blocks(self.programs)
        self.num_blocks = agree(own)
        if self.num_blocks != own:
            logger.warning(
                "num_blocks: %d here, %d are used: the least among the processes of the job",
                own,
                self.num_blocks,
            )
        self.programs.num_blocks = self.num_blocks
        self.caches = kv_pools.allocate(self.programs.abstract_caches(self.num_blocks))
        self.state = self.programs.allocate_state()
        self.ranks = len(self.placement.local_ranks)

    # ---- warm-up ---------------------------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None) -> float:
        """Compiles every program of the role in parallel threads, or fetches it from the persistent
        cache; returns seconds."""
        keys = [k for k in self.programs.warm_up_keys() if k not in self.programs._compiled]
        start, hits = time.perf_counter(), compile_watch().cache_hits
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            jobs = {pool.submit(lambda k=k: self.programs.lower(k).compile()): k for k in keys}
            for done, job in enumerate(as_completed(jobs), 1):
                self.programs.put(jobs[job], job.result())
                if progress is not None:
                    progress(str(jobs[job]), done, len(keys))
        self.programs.warm = True
        seconds, hits = time.perf_counter() - start, compile_watch().cache_hits - hits
        logger.info(
            "warm-up: %d programs in %.1f s, %d of them from the persistent cache",
            len(keys),
            seconds,
            hits,
        )
        return seconds

    def compile_missing(self, prefix: str = "") -> None:
        """Compiles registered programs that warm-up has not, so that no step has to wait for the
        compiler. prefix: of their kind."""
        with compile_watch().expected():
            for key in self.programs.missing(prefix):
                self.programs.put(key, self.programs.lower(key).compile())

    # ---- dispatch --------------------------------------------------------------------------------

    def _call(self, key: ProgramKey, rows: np.ndarray) -> tuple:
        program = self.programs.get(key)
        self.caches, self.state, results = program(
            self.params, self.caches, self.state, self.placement.put(rows)
        )
        return results

    def _rows(self, key: ProgramKey) -> tuple[Any, np.ndarray]:
        layout = self.programs.layout(key)
        return layout, np.zeros((self.ranks, layout.size), np.int32)

    def dispatch_prefill(
        self, outputs: Sequence[SchedulerOutputs], plp_wanted: Callable[[Any], bool], tokens: int
    ) -> InFlight:
        """Enqueues a prefill step; a rank whose output is empty takes part with zero rows. Waits
        for nothing.

        tokens: the most tokens any rank of the group has; all processes must pass the same.
        """
        key = ProgramKey("prefill", pick(self.config.prefill_buckets, tokens))
        layout, rows = self._rows(key)
        plp = [
            self._fill_prefill(layout, row, o, plp_wanted)
            for row, o in zip(rows, outputs, strict=True)
        ]
        results, prompt_logprobs = self._call(key, rows.reshape(-1))
        results.copy_to_host_async()
        if not any(plp):
            prompt_logprobs = None
        return InFlight(key, [list(outputs)], results, prompt_logprobs, self.placement, plp)

    def _fill_prefill(
        self,
        layout: PackedLayout,
        row: np.ndarray,
        o: SchedulerOutputs,
        plp_wanted: Callable[[Any], bool],
    ) -> list[tuple[Any, int, int]]:
        view = {name: layout.view(row, name) for name in layout.fields}
        at, samples, plp_rows, plp = 0, 0, 0, []
        for i, item in enumerate(o.prefill):
            seq, start, count = item.seq, item.q_start, item.q_len
            view["tokens"][at : at + count] = seq.token_ids[start : start + count]
            view["q_starts"][i] = at
            view["kv_lens"][i] = start + count
            view["state_slots"][i] = max(seq.state_id, 0)
            blocks = seq.block_ids
            view["block_tables"][i, : len(blocks)] = blocks
            if plp_wanted(seq):
                # row j predicts token start + j + 1, as long as that is a prompt token
                wanted = min(start + count, seq.prompt_len - 1) - start
                if wanted > 0:
                    view["logprob_rows"][plp_rows : plp_rows + wanted] = np.arange(at, at + wanted)
                    view["logprob_targets"][plp_rows : plp_rows + wanted] = seq.token_ids[
                        start + 1 : start + 1 + wanted
                    ]
                    plp.append((seq, start + 1, wanted))
                    plp_rows += wanted
            if item.is_last:
                view["sample_seqs"][samples] = i
                view["sample_slots"][samples] = seq.slot
                samples += 1
            at += count
        view["q_starts"][len(o.prefill) :] = at
        view["num_samples"][...] = samples
        view["num_prompt_logprobs"][...] = plp_rows
        return plp

    def dispatch_decode(
        self, substeps: Sequence[Sequence[SchedulerOutputs]], count: int
    ) -> InFlight:
        """Enqueues one decode program for one or several consecutive steps of the same slots. Waits
        for nothing.

        substeps: per step, one output per local rank; later steps' slots are a subset of the
        first's (a sequence may reach its length limit on the way and sits out the rest). count: the
        most slots any rank of the group has; all processes must pass the same.
        """
        key = ProgramKey("decode", pick(self.config.decode_buckets, count), len(substeps))
        layout, rows = self._rows(key)
        nowhere = self.config.max_num_seqs
        overflow = []
        for rank, row in enumerate(rows):
            outputs = [step[rank] for step in substeps]
            slots = outputs[0].slots
            view = {name: layout.view(row, name) for name in layout.fields}
            view["slots"][:] = nowhere
            view["slots"][: len(slots)] = slots
            view["row_steps"][: len(slots)] = len(outputs)
            for o in outputs[1:]:
                view["row_steps"][: len(slots)] -= ~np.isin(slots, o.slots)
            view["update_slots"][:] = nowhere
            updates = [
                np.concatenate(part)
                for part in zip(*(o.block_updates for o in outputs), strict=True)
            ]
            room = len(view["update_slots"])
            for name, values in zip(("slots", "pages", "blocks"), updates, strict=True):
                view[f"update_{name}"][: len(values[:room])] = values[:room]
            overflow.append(tuple(u[room:] for u in updates))
        if any(len(slots) for slots, _, _ in overflow):
            self.update_tables(overflow)
        (results,) = self._call(key, rows.reshape(-1))
        results.copy_to_host_async()
        return InFlight(key, [list(o) for o in substeps], results, None, self.placement)

    def update_tables(self, updates: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Per rank (slots, pages, blocks): new block-table entries outside a decode step."""
        key = ProgramKey("update")
        for at in range(0, max(len(u[0]) for u in updates), UPDATE_BUCKET):
            layout, rows = self._rows(key)
            for row, update in zip(rows, updates, strict=True):
                layout.view(row, "update_slots")[:] = self.config.max_num_seqs
                for name, values in zip(("slots", "pages", "blocks"), update, strict=True):
                    part = values[at : at + UPDATE_BUCKET]
                    layout.view(row, f"update_{name}")[: len(part)] = part
            self._call(key, rows.reshape(-1))

    def admit(
        self,
        sequences: Sequence[Sequence[Any]],
        block_tables: Sequence[np.ndarray],
        fill: RowFiller,
    ) -> None:
        """Fills the slots of newly running sequences, per rank. `fill` writes the sampling
        parameters of one row."""
        longest, at = max(len(s) for s in sequences), 0
        while at < longest:
            size = ADMIT_BUCKETS[
                min(bisect_left(ADMIT_BUCKETS, longest - at), len(ADMIT_BUCKETS) - 1)
            ]
            layout, rows = self._rows(ProgramKey("admit", size))
            for row, seqs, tables in zip(rows, sequences, block_tables, strict=True):
                view = {name: layout.view(row, name) for name in layout.fields}
                view["slots"][:] = self.config.max_num_seqs
                for i, seq in enumerate(seqs[at : at + size]):
                    view["slots"][i] = seq.slot
                    view["last_token"][i] = seq.token_ids[-1]
                    view["num_tokens"][i] = seq.num_tokens
                    view["state_slots"][i] = max(seq.state_id, 0)
                    view["block_tables"][i] = tables[seq.slot]
                    fill(seq, view, i)
            self._call(ProgramKey("admit", size), rows.reshape(-1))
            at += size

    def replace_params(self, arrays: dict[int, jax.Array]) -> None:
        """Steps dispatched from now on see these parameters, by their place in `params`."""
        self.params = tuple(arrays.get(i, old) for i, old in enumerate(self.params))

    def close(self) -> None:
        """Drops parameters, caches and programs."""
        self.params, self.caches, self.state = (), {}, None
        self.programs.clear()

    def fill_counts(self, rank: int, seq: Any) -> None:
        """Rebuilds the penalty tables of one slot of local rank `rank` from the
        sequence's tokens."""
        layout, rows = self._rows(ProgramKey("counts"))
        for r, row in enumerate(rows):
            layout.view(row, "slot")[...] = seq.slot if r == rank else self.config.max_num_seqs
            layout.view(row, "num_prompt")[...] = seq.prompt_len
            layout.view(row, "num_tokens")[...] = seq.num_tokens
            layout.view(row, "tokens")[: seq.num_tokens] = seq.token_ids
        self._call(ProgramKey("counts"), rows.reshape(-1))

    def clone(self, kind: str, pairs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copies blocks ("clone_blocks") or state slots ("clone_states"), per rank (source, target)
        pairs."""
        limit = self.num_blocks if kind == "clone_blocks" else self.programs.num_state_slots
        for at in range(0, max(len(p) for p in pairs), CLONE_BUCKET):
            layout, rows = self._rows(ProgramKey(kind))
            for row, rank_pairs in zip(rows, pairs, strict=True):
                layout.view(row, "targets")[:] = limit
                part = rank_pairs[at : at + CLONE_BUCKET]
                layout.view(row, "sources")[: len(part)] = [s for s, _ in part]
                layout.view(row, "targets")[: len(part)] = [t for _, t in part]
            self._call(ProgramKey(kind), rows.reshape(-1))


def rows_of(slots: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The position in `slots` of each entry of `wanted` (all distinct, all present)."""
    order = np.argsort(slots)
    return order[np.searchsorted(slots, wanted, sorter=order)]


def pick(buckets: Sequence[int], count: int) -> int:
    """The smallest bucket that holds `count`. ValueError if none does."""
    i = bisect_left(buckets, count)
    if i == len(buckets):
        raise ValueError(
            f"{count} rows exceed the largest bucket {buckets[-1] if buckets else None}"
        )
    return buckets[i]
