"""The decode state that lives on the device: one row ("slot") per running sequence.

A decode step needs nothing from the host but which slots take part: tokens, positions, block
tables, sampling parameters and random counters are here, so step N+1 can be dispatched before step
N's tokens have been read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.models.base import StepBatch
from deepinfer_jax.runner.expert_counts import ExpertCounts
from deepinfer_jax.runner.packing import Field, PackedLayout
from deepinfer_jax.runner.sampler import SampleResult
from deepinfer_jax.runner.sampling_state import (
    SamplingState,
    gather_rows,
    init_state,
    record_outputs,
    scatter_rows,
)

MAX_EOS_IDS = 8
"""Stop ids per request that min_tokens can ban on the device."""
MAX_BIAS = 64
"""logit_bias entries per request."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """S slots of one DP rank (P: pages per block table)."""

    last_token: jax.Array  # i32 [S]: the newest token, whose KV is not written yet
    num_tokens: (
        jax.Array
    )  # i32 [S]: tokens so far, last_token included; its position is num_tokens - 1
    block_tables: jax.Array  # i32 [S, P]
    state_slots: jax.Array  # i32 [S]: rows of the model's StateCaches
    sampling: SamplingState
    experts: ExpertCounts | None = None  # None: a model without experts, or nobody asks

    @classmethod
    def init(
        cls,
        num_slots: int,
        max_pages: int,
        vocab_size: int,
        enable_penalties: bool,
        experts: ExpertCounts | None = None,
    ) -> DecodeState:
        """All slots empty."""
        return cls(
            last_token=jnp.zeros(num_slots, jnp.int32),
            num_tokens=jnp.zeros(num_slots, jnp.int32),
            block_tables=jnp.zeros((num_slots, max_pages), jnp.int32),
            state_slots=jnp.zeros(num_slots, jnp.int32),
            sampling=init_state(
                num_slots,
                vocab_size,
                max_eos_ids=MAX_EOS_IDS,
                max_bias=MAX_BIAS,
                enable_penalties=enable_penalties,
            ),
            experts=experts,
        )

    @property
    def num_slots(self) -> int:
        return self.last_token.shape[0]

    def decode_batch(self, slots: jax.Array, block_size: int, num_blocks: int) -> StepBatch:
        """One row per entry of `slots` i32 [B]; entries >= num_slots are padding."""
        valid = slots < self.num_slots
        rows = jnp.minimum(slots, self.num_slots - 1)
        kv_lens = jnp.where(valid, self.num_tokens[rows], 0)
        positions = jnp.maximum(kv_lens - 1, 0)
        tables = self.block_tables[rows]
        block = jnp.take_along_axis(tables, positions[:, None] // block_size, axis=1)[:, 0]
        write = jnp.where(
            valid, block * block_size + positions % block_size, num_blocks * block_size
        )
        count = slots.shape[0]
        return StepBatch(
            tokens=jnp.maximum(self.last_token[rows], 0),
            positions=positions,
            write_slots=write,
            block_tables=tables,
            kv_lens=kv_lens,
            q_starts=jnp.arange(count + 1, dtype=jnp.int32),
            seq_ids=jnp.where(valid, jnp.arange(count, dtype=jnp.int32), count),
            state_slots=jnp.where(valid, self.state_slots[rows], 0),
            is_decode=True,
            block_size=block_size,
        )

    def append(self, slots: jax.Array, tokens: jax.Array, num_tokens: jax.Array) -> DecodeState:
        """Adds one sampled token per slot i32 [R] (out of range: dropped); num_tokens i32 [R]
        counts the new one."""
        return replace(
            self,
            last_token=self.last_token.at[slots].set(tokens, mode="drop"),
            num_tokens=self.num_tokens.at[slots].set(num_tokens, mode="drop"),
            sampling=record_outputs(self.sampling, slots, tokens),
        )

    def update_tables(self, slots: jax.Array, pages: jax.Array, blocks: jax.Array) -> DecodeState:
        """Sets block_tables[slots, pages] = blocks, each i32 [U]; out-of-range slots
        are dropped."""
        return replace(
            self, block_tables=self.block_tables.at[slots, pages].set(blocks, mode="drop")
        )

    def admit(self, rows: dict[str, jax.Array]) -> DecodeState:
        """Fills slots from the fields of `admit_layout`."""
        slots = rows["slots"]
        return replace(
            self,
            last_token=self.last_token.at[slots].set(rows["last_token"], mode="drop"),
            num_tokens=self.num_tokens.at[slots].set(rows["num_tokens"], mode="drop"),
            block_tables=self.block_tables.at[slots].set(rows["block_tables"], mode="drop"),
            state_slots=self.state_slots.at[slots].set(rows["state_slots"], mode="drop"),
            sampling=scatter_rows(
                self.sampling, slots, SamplingState(**{n: rows[n] for n in _SAMPLING_FIELDS})
            ),
        )

    def rows(self, slots: jax.Array) -> SamplingState:
        """Sampling parameters of `slots` i32 [R] (clipped)."""
        return gather_rows(self.sampling, slots)


_SAMPLING_FIELDS: dict[str, Field] = {
    "temperature": ((), np.float32),
    "top_p": ((), np.float32),
    "top_k": ((), np.int32),
    "min_p": ((), np.float32),
    "repetition_penalty": ((), np.float32),
    "presence_penalty": ((), np.float32),
    "frequency_penalty": ((), np.float32),
    "seed": ((2,), np.uint32),
    "min_len": ((), np.int32),
    "eos_ids": ((MAX_EOS_IDS,), np.int32),
    "bias_ids": ((MAX_BIAS,), np.int32),
    "bias_vals": ((MAX_BIAS,), np.float32),
    "num_logprobs": ((), np.int32),
    "prompt_len": ((), np.int32),
}


def admit_layout(count: int, max_pages: int) -> PackedLayout:
    """Host input that fills `count` slots: identity, length, block table and sampling
    parameters."""
    fields: dict[str, Field] = {
        "slots": ((count,), np.int32),
        "last_token": ((count,), np.int32),
        "num_tokens": ((count,), np.int32),
        "state_slots": ((count,), np.int32),
        "block_tables": ((count, max_pages), np.int32),
    }
    fields |= {name: ((count, *shape), dtype) for name, (shape, dtype) in _SAMPLING_FIELDS.items()}
    return PackedLayout(fields)


def pack_result(result: SampleResult) -> jax.Array:
    """SampleResult of R rows -> i32 [R, 3 + 2N]: token, log-probability bits, rank, N ids, N
    log-probability bits."""
    bits = lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)  # noqa: E731
    head = jnp.stack([result.tokens, bits(result.logprobs), result.ranks], axis=1)
    return jnp.concatenate([head, result.top_ids, bits(result.top_logprobs)], axis=1)


@dataclass(frozen=True)
class ResultRows:
    """`pack_result` read back on the host: NumPy views, R rows."""

    packed: np.ndarray  # i32 [R, 3 + 2N]

    @property
    def tokens(self) -> np.ndarray:
        return self.packed[:, 0]

    def logprobs(self, row: int) -> tuple[float, int, np.ndarray, np.ndarray]:
        """(log-probability, rank, top ids i32 [N], top log-probabilities f32 [N]) of one row."""
        values = self.packed[row]
        n = (len(values) - 3) // 2
        return (
            float(values[1:2].view(np.float32)[0]),
            int(values[2]),
            values[3 : 3 + n],
            values[3 + n :].view(np.float32),
        )
