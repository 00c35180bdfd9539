"""Names of compiled programs, and what the host packs for each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.runner.decode_state import admit_layout
from deepinfer_jax.runner.packing import PackedLayout

UPDATE_BUCKET = 256
CLONE_BUCKET = 16


@dataclass(frozen=True)
class ProgramKey:
    """kind: a name of `StepPrograms.function`; size: its bucket; steps: decode steps
    per dispatch."""

    kind: str
    size: int = 0
    steps: int = 1

    def __str__(self) -> str:
        return f"{self.kind}[{self.size}]" + (f"x{self.steps}" if self.steps > 1 else "")


def prefill_layout(tokens: int, max_seqs: int, max_pages: int) -> PackedLayout:
    """Inputs of a prefill step of up to `tokens` packed rows of up to `max_seqs` sequences."""
    i32 = np.int32
    return PackedLayout(
        {
            "tokens": ((tokens,), i32),
            "q_starts": ((max_seqs + 1,), i32),
            "kv_lens": ((max_seqs,), i32),
            "state_slots": ((max_seqs,), i32),
            "block_tables": ((max_seqs, max_pages), i32),
            "num_samples": ((), i32),  # sequences whose last chunk this is: they sample a token
            "sample_seqs": ((max_seqs,), i32),
            "sample_slots": ((max_seqs,), i32),
            "num_prompt_logprobs": ((), i32),
            "logprob_rows": ((tokens,), i32),
            "logprob_targets": ((tokens,), i32),
        }
    )


def decode_layout(rows: int) -> PackedLayout:
    """Inputs of a decode step: the slots that take part (num_slots: padding), in how many of the
    program's steps each takes part, and new block-table entries."""
    updates = max(rows, 8)
    fields = {"slots": ((rows,), np.int32), "row_steps": ((rows,), np.int32)}
    fields |= {f"update_{name}": ((updates,), np.int32) for name in ("slots", "pages", "blocks")}
    return PackedLayout(fields)


def update_layout() -> PackedLayout:
    return PackedLayout(
        {f"update_{name}": ((UPDATE_BUCKET,), np.int32) for name in ("slots", "pages", "blocks")}
    )


def counts_layout(max_tokens: int) -> PackedLayout:
    """Inputs that fill the penalty tables of one slot: its tokens, how many of them are prompt, how
    many in all."""
    return PackedLayout(
        {
            "slot": ((), np.int32),
            "num_prompt": ((), np.int32),
            "num_tokens": ((), np.int32),
            "tokens": ((max_tokens,), np.int32),
        }
    )


def clone_layout() -> PackedLayout:
    return PackedLayout(
        {"sources": ((CLONE_BUCKET,), np.int32), "targets": ((CLONE_BUCKET,), np.int32)}
    )


def prefill_seqs(config: EngineConfig, tokens: int) -> int:
    """Most sequences a prefill bucket of `tokens` rows can hold."""
    return min(tokens, config.max_num_seqs)


def layout_of(key: ProgramKey, config: EngineConfig) -> PackedLayout:
    """The packed inputs of a program, per rank. ValueError for an unknown one."""
    match key.kind:
        case "prefill":
            return prefill_layout(key.size, prefill_seqs(config, key.size), config.max_pages)
        case "decode":
            return decode_layout(key.size)
        case "admit":
            return admit_layout(key.size, config.max_pages)
        case "update":
            return update_layout()
        case "counts":
            return counts_layout(config.runtime_max_model_len)
        case "clone_blocks" | "clone_states" | "zero_states":
            return clone_layout()
    raise ValueError(f"unknown program {key}")
