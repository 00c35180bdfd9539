"""Drives a model directly through a paged cache with hand-built batches: no scheduler, no engine.

Blocks are handed out in a shuffled order and the batch carries padding rows and sequences, as the
engine's batches do.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepinfer_jax.models.base import CacheSpec, ParallelAxes, StateCache, StepBatch
from deepinfer_jax.models.loading import LoadedModel, load_model

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_SLOTS = 16


class PagedDriver:
    """Sequences of one model on one rank; `prefill` and `decode` return float32 logits of the rows
    they ran."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        pages: int = 32,
        cache_dtype="float32",
    ) -> None:
        self.model, self.block_size, self.num_blocks, self.pages = (
            model,
            block_size,
            num_blocks,
            pages,
        )
        specs = model.model_class.cache_specs(model.config, ParallelAxes(), jnp.dtype(cache_dtype))
        # NaN in unwritten places: whatever reads past a sequence's keys shows.
        self.caches = {
            s.name: (jnp.full(self._pool_shape(s), jnp.nan, s.dtype),) * s.layers for s in specs
        }
        self.slots: dict[int, int] = {}  # rows of per-sequence caches; row 0 belongs to padding
        self.free = list(np.random.default_rng(7).permutation(num_blocks))
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._step = jax.jit(self._run)

    def _pool_shape(self, spec: CacheSpec) -> tuple[int, ...]:
        if isinstance(spec, StateCache):
            return (NUM_SLOTS, *spec.shape)
        return (self.num_blocks, spec.entries_per_block(self.block_size), *spec.entry_shape)

    def _run(self, params, caches, batch):
        module = nnx.merge(self.model.graphdef, params)
        hidden, caches = module(caches, batch)
        return module.compute_logits(hidden), caches

    def _slots(self, seq: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, write slots) of the sequence's next `count` tokens, taking blocks
        as needed."""
        start = self.lengths.setdefault(seq, 0)
        self.slots.setdefault(seq, len(self.slots) + 1)
        blocks = self.blocks.setdefault(seq, [])
        while len(blocks) * self.block_size < start + count:
            blocks.append(int(self.free.pop()))
        self.lengths[seq] = start + count
        positions = np.arange(start, start + count, dtype=np.int32)
        return (
            positions,
            np.asarray(blocks, np.int32)[positions // self.block_size] * self.block_size
            + positions % self.block_size,
        )

    def _batch(
        self, rows: dict[int, np.ndarray], padded_rows: int, padded_seqs: int, is_decode: bool
    ) -> StepBatch:
        drop = self.num_blocks * self.block_size
        tokens, positions = np.zeros(padded_rows, np.int32), np.zeros(padded_rows, np.int32)
        slots, seq_ids = (
            np.full(padded_rows, drop, np.int32),
            np.full(padded_rows, padded_seqs, np.int32),
        )
        tables, kv_lens = (
            np.zeros((padded_seqs, self.pages), np.int32),
            np.zeros(padded_seqs, np.int32),
        )
        q_starts, state_slots = np.zeros(padded_seqs + 1, np.int32), np.zeros(padded_seqs, np.int32)
        row = 0
        for i, (seq, ids) in enumerate(rows.items()):
            span = slice(row, row + len(ids))
            positions[span], slots[span] = self._slots(seq, len(ids))
            tokens[span], seq_ids[span] = ids, i
            row += len(ids)
            state_slots[i] = self.slots[seq]
            tables[i, : len(self.blocks[seq])], kv_lens[i], q_starts[i + 1 :] = (
                self.blocks[seq],
                self.lengths[seq],
                row,
            )
        arrays = (
            tokens,
            positions,
            slots,
            tables,
            kv_lens,
            q_starts,
            seq_ids,
            state_slots,
        )
        return StepBatch(*map(jnp.asarray, arrays), is_decode=is_decode, block_size=self.block_size)

    def prefill(self, rows: dict[int, np.ndarray], least: int = 0) -> dict[int, np.ndarray]:
        """seq -> its next prompt tokens; returns seq -> logits [len, vocab]. least: rows of the
        batch at least, so that steps of several sizes share a program."""
        total = sum(map(len, rows.values()))
        padded = max(least, -(-(total + 3) // 16) * 16)
        batch = self._batch(rows, padded, len(rows) + 1, is_decode=False)
        logits, self.caches = self._step(self.model.params, self.caches, batch)
        ends = np.cumsum([len(ids) for ids in rows.values()])
        return dict(zip(rows, np.split(np.asarray(logits)[:total], ends[:-1]), strict=True))

    def decode(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """seq -> its next token; returns seq -> logits [vocab]."""
        n = len(tokens)
        batch = self._batch(
            {s: np.asarray([t]) for s, t in tokens.items()}, n + 1, n + 1, is_decode=True
        )
        logits, self.caches = self._step(self.model.params, self.caches, batch)
        return dict(zip(tokens, np.asarray(logits), strict=False))


def golden_prompts(name: str) -> list[dict[str, np.ndarray]]:
    """The fixture's cases: prompt, logits (teacher-forced), greedy, margin."""
    data = np.load(GOLDEN / name / "golden.npz")
    count = sum(key.startswith("prompt_") for key in data)
    return [
        {key: data[f"{key}_{i}"] for key in ("prompt", "logits", "greedy", "margin")}
        for i in range(count)
    ]


def check_against_golden(
    name: str, *, tolerance: float = 2e-4, chunk: int | None = None, block_size: int = 4, **load
) -> None:
    """All prompts of a fixture in one batch: prefill (whole or in chunks), then greedy decode
    steps, against the reference."""
    cases = golden_prompts(name)
    driver = PagedDriver(
        load_model(GOLDEN / name, dtype="float32", **load),
        block_size=block_size,
        num_blocks=512 // block_size,
        pages=-(-96 // block_size),
    )
    logits = {i: [] for i in range(len(cases))}
    longest = max(len(c["prompt"]) for c in cases)
    for start in range(0, longest, chunk or longest):
        rows = {
            i: c["prompt"][start : start + (chunk or longest)]
            for i, c in enumerate(cases)
            if len(c["prompt"]) > start
        }
        for i, part in driver.prefill(rows).items():
            logits[i].append(part)
    for i, case in enumerate(cases):
        np.testing.assert_allclose(
            np.concatenate(logits[i]), case["logits"], atol=tolerance, rtol=0
        )
    tokens = {i: int(np.argmax(parts[-1][-1])) for i, parts in logits.items()}
    for step in range(len(cases[0]["greedy"])):
        for i, case in enumerate(cases):
            assert tokens[i] == case["greedy"][step] or case["margin"][step] < 2 * tolerance, (
                name,
                i,
                step,
            )
            tokens[i] = int(case["greedy"][step])
        tokens = {i: int(np.argmax(row)) for i, row in driver.decode(tokens).items()}
