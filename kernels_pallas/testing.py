"""Float64 NumPy oracles of every op and random inputs with the awkward parts in: for the tests and
benchmarks/gpu_kernels.py.

Inputs carry NaN wherever a kernel must not look: unowned pages, the tail of last pages, rows past
the last group.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of one attention problem. kv_lens: keys per sequence (0: padding sequence). q_lens:
    rows per sequence.

    v_dim: width of a value inside the key (one pool, MLA) or None. dv: width of a row of the value
    pool (default: d).
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    dv: int | None = None
    v_dim: int | None = None
    block_size: int = 4
    dtype: str = "float32"
    cache_dtype: str = "float32"
    sliding_window: int | None = None
    sinks: bool = False
    pad_rows: int = 0
    pad_pages: int = 0

    @property
    def scale(self) -> float:
        return self.d**-0.5


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(getattr(ml_dtypes, dtype) if dtype in ("bfloat16", "float8_e4m3fn") else dtype)


def attention_inputs(
    case: AttentionCase, seed: int = 0, spare_blocks: int = 3, poison: bool = True
) -> dict:
    """Random inputs of `case` under the argument names of `ragged_prefill` (decode: drop q_starts
    and seq_ids)."""
    rng = np.random.default_rng(seed)
    bs, s = case.block_size, len(case.kv_lens)
    need = [-(-n // bs) for n in case.kv_lens]
    pages = max([*need, 1]) + case.pad_pages
    blocks = sum(need) + spare_blocks
    ids = rng.permutation(blocks)
    tables = np.full((s, pages), ids[-1], np.int32)  # dead entries point at a poisoned block
    owned = np.zeros((blocks, bs), bool)
    for i, n in enumerate(need):
        tables[i, :n], ids = ids[:n], ids[n:]
        for j in range(case.kv_lens[i]):
            owned[tables[i, j // bs], j % bs] = True

    def pool(width: int) -> np.ndarray:
        x = rng.standard_normal((blocks, bs, case.kv_heads, width))
        x[~owned] = np.nan if poison else 0.0
        return _cast(x, case.cache_dtype)

    q_starts = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    t = int(q_starts[-1]) + case.pad_rows
    seq_ids = np.repeat(np.arange(s + 1), [*case.q_lens, case.pad_rows]).astype(np.int32)
    q = rng.standard_normal((t, case.heads, case.d))
    if poison:
        q[q_starts[-1] :] = np.nan
    return {
        "q": _cast(q, case.dtype),
        "k_pool": pool(case.d),
        "v_pool": None if case.v_dim else pool(case.dv or case.d),
        "block_tables": tables,
        "kv_lens": np.asarray(case.kv_lens, np.int32),
        "q_starts": q_starts,
        "seq_ids": seq_ids,
        "sinks": rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None,
    }


def attention_oracle(case: AttentionCase, inputs: dict) -> np.ndarray:
    """Float64 attention, one row and head at a time -> `[T, H, Dv]`."""
    q = inputs["q"].astype(np.float64)
    k_pool = inputs["k_pool"].astype(np.float64)
    v_pool = (
        k_pool[..., : case.v_dim]
        if inputs["v_pool"] is None
        else inputs["v_pool"].astype(np.float64)
    )
    out = np.zeros((q.shape[0], case.heads, v_pool.shape[-1]))
    group = case.heads // case.kv_heads
    for s, kv_len in enumerate(case.kv_lens):
        q_len, start = case.q_lens[s], inputs["q_starts"][s]
        pages = inputs["block_tables"][s]
        keys = k_pool[pages].reshape(-1, case.kv_heads, case.d)[:kv_len]
        values = v_pool[pages].reshape(-1, case.kv_heads, v_pool.shape[-1])[:kv_len]
        for j in range(q_len):
            position = kv_len - q_len + j
            low = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            for h in range(case.heads if position >= 0 else 0):
                k, v = keys[low : position + 1, h // group], values[low : position + 1, h // group]
                logits = k @ q[start + j, h] * case.scale
                if inputs["sinks"] is not None:
                    logits = np.append(logits, inputs["sinks"][h])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                out[start + j, h] = weights[: len(v)] @ v
    return out


@dataclass(frozen=True)
class GroupedCase:
    """Shapes of one grouped product: `sizes` rows per group, `pad` rows past the last group. scale:
    None, "block", "channel"."""

    sizes: tuple[int, ...]
    n: int
    k: int
    dtype: str = "float32"
    w_dtype: str = "float32"
    pad: int = 0
    scale: str | None = None


def _weights(
    rng: np.random.Generator, case: GroupedCase, n: int, k: int
) -> tuple[np.ndarray, np.ndarray | None]:
    e = len(case.sizes)
    w = rng.standard_normal((e, n, k)) * (
        30 if case.w_dtype == "int8" else k**-0.5 if case.scale is None else 1
    )
    shape = {None: None, "block": (e, -(-n // 128), -(-k // 128)), "channel": (e, n)}[case.scale]
    spread = k**-0.5 / (30 if case.w_dtype == "int8" else 1)
    return _cast(w, case.w_dtype), None if shape is None else rng.uniform(
        0.5 * spread, spread, shape
    ).astype(np.float32)


def grouped_inputs(case: GroupedCase, seed: int = 0) -> dict:
    """Random inputs of `grouped_matmul`; rows past the last group are NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(case.sizes) + case.pad, case.k))
    x[sum(case.sizes) :] = np.nan
    w, scale = _weights(rng, case, case.n, case.k)
    return {
        "x": _cast(x, case.dtype),
        "w": w,
        "group_sizes": np.asarray(case.sizes, np.int32),
        "w_scale": scale,
    }


def experts_inputs(case: GroupedCase, seed: int = 0) -> dict:
    """Random inputs of `moe_experts` with intermediate size n and hidden size k."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(case.sizes) + case.pad, case.k))
    x[sum(case.sizes) :] = np.nan
    (gate_up, s1), (down, s2) = (
        _weights(rng, case, 2 * case.n, case.k),
        _weights(rng, case, case.k, case.n),
    )
    sizes = np.asarray(case.sizes, np.int32)
    scales = None if s1 is None else (s1, s2)
    return {
        "x": _cast(x, case.dtype),
        "gate_up": gate_up,
        "down": down,
        "group_sizes": sizes,
        "scales": scales,
    }


def scaled_weights(w: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """float64 `[E, N, K]` weights with their scales applied."""
    w = w.astype(np.float64)
    if scale is None:
        return w
    if scale.ndim == 2:
        return w * scale[:, :, None]
    return w * np.repeat(np.repeat(scale, 128, 1)[:, : w.shape[1]], 128, 2)[:, :, : w.shape[2]]


def grouped_oracle(
    x: np.ndarray, w: np.ndarray, group_sizes: np.ndarray, w_scale: np.ndarray | None
) -> np.ndarray:
    full, start = scaled_weights(w, w_scale), 0
    out = np.zeros((x.shape[0], w.shape[1]))
    for e, size in enumerate(group_sizes):
        out[start : start + size] = x[start : start + size].astype(np.float64) @ full[e].T
        start += size
    return out


def experts_oracle(
    x: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    group_sizes: np.ndarray,
    scales: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    gate_up_scale, down_scale = scales or (None, None)
    gate, up = np.split(grouped_oracle(x, gate_up, group_sizes, gate_up_scale), 2, axis=-1)
    return grouped_oracle(gate / (1 + np.exp(-gate)) * up, down, group_sizes, down_scale)
