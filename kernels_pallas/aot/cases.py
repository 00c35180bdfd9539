"""The programs that `make aot` compiles: every op at shapes of real models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels_pallas.grouped_matmul import grouped_matmul, moe_experts
from deepinfer_jax.kernels_pallas.kv_write import kv_write
from deepinfer_jax.kernels_pallas.matmul import matmul
from deepinfer_jax.kernels_pallas.paged_decode import paged_decode
from deepinfer_jax.kernels_pallas.ragged_prefill import ragged_prefill

_BF16, _FP8, _I32, _F32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.float32


def _struct(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `fn(*args)`; donate: the argument that must come back in place; inputs: what op
    and shapes are called."""

    op: str
    name: str
    fn: Callable
    args: tuple
    donate: int | None = None


def _attention_cases() -> Iterator[Case]:
    s, pages, blocks, t = 64, 128, 8192, 4096
    decode = (_struct((s, pages), _I32), _struct((s,), _I32))
    prefill = (
        _struct((16, pages), _I32),
        _struct((16,), _I32),
        _struct((17,), _I32),
        _struct((t,), _I32),
    )
    sinks = _struct((32,), _F32)
    for dtype, tag in ((_BF16, "bf16"), (_FP8, "e4m3")):
        for d in (64, 128):
            pool = _struct((blocks, 16, 8, d), dtype)
            call = functools.partial(paged_decode, scale=d**-0.5)
            yield Case(
                "paged_decode",
                f"gqa {d} {tag}",
                call,
                (_struct((s, 32, d), _BF16), pool, pool, *decode),
            )
            call = functools.partial(ragged_prefill, scale=d**-0.5)
            yield Case(
                "ragged_prefill",
                f"gqa {d} {tag}",
                call,
                (_struct((t, 32, d), _BF16), pool, pool, *prefill),
            )
        pool = _struct((blocks, 16, 8, 128), dtype)
        call = functools.partial(
            lambda *a, fn: fn(*a[:-1], scale=0.1, sinks=a[-1], sliding_window=128), fn=paged_decode
        )
        yield Case(
            "paged_decode",
            f"gqa 128 {tag} window sinks",
            call,
            (_struct((s, 32, 128), _BF16), pool, pool, *decode, sinks),
        )
        call = functools.partial(
            lambda *a, fn: fn(*a[:-1], scale=0.1, sinks=a[-1], sliding_window=128),
            fn=ragged_prefill,
        )
        yield Case(
            "ragged_prefill",
            f"gqa 128 {tag} window sinks",
            call,
            (_struct((t, 32, 128), _BF16), pool, pool, *prefill, sinks),
        )
        latent = _struct((blocks, 64, 1, 576), dtype)
        for heads in (16, 128):
            call = functools.partial(
                lambda q, k, *a, fn: fn(q, k, None, *a, scale=0.07, v_dim=512), fn=paged_decode
            )
            yield Case(
                "paged_decode",
                f"mla {heads} heads {tag}",
                call,
                (_struct((s, heads, 576), _BF16), latent, *decode),
            )
        call = functools.partial(
            lambda q, k, *a, fn: fn(q, k, None, *a, scale=0.07, v_dim=512), fn=ragged_prefill
        )
        yield Case(
            "ragged_prefill",
            f"mla absorbed {tag}",
            call,
            (_struct((256, 128, 576), _BF16), latent, *prefill[:3], _struct((256,), _I32)),
        )
    k, v = _struct((4096, 16, 16, 192), _BF16), _struct((4096, 16, 16, 128), _BF16)
    yield Case(
        "ragged_prefill",
        "mla expanded bf16",
        functools.partial(ragged_prefill, scale=0.07),
        (_struct((t, 16, 192), _BF16), k, v, *prefill),
    )


def _expert_cases() -> Iterator[Case]:
    e, n, k = 128, 768, 2048
    sizes = _struct((e,), _I32)
    for rows, label in ((512, "decode"), (32768, "prefill")):
        x = _struct((rows, k), _BF16)
        yield Case(
            "grouped_matmul", f"bf16 {label}", grouped_matmul, (x, _struct((e, n, k), _BF16), sizes)
        )
        call = functools.partial(
            lambda x, g, d, s, w, fn: fn(x, g, d, s, row_weights=w), fn=moe_experts
        )
        weights = (_struct((e, 2 * n, k), _BF16), _struct((e, k, n), _BF16))
        yield Case(
            "moe_experts", f"bf16 {label}", call, (x, *weights, sizes, _struct((rows,), _F32))
        )
        call = functools.partial(
            lambda x, g, d, s, gs, ds, fn: fn(x, g, d, s, scales=(gs, ds)), fn=moe_experts
        )
        weights = (_struct((e, 2 * n, k), _FP8), _struct((e, k, n), _FP8))
        scales = (
            _struct((e, 2 * n // 128, k // 128), _F32),
            _struct((e, k // 128, n // 128), _F32),
        )
        yield Case("moe_experts", f"e4m3 blocks {label}", call, (x, *weights, sizes, *scales))


def _dense_cases() -> Iterator[Case]:
    for rows, n, k in (
        (64, 7168, 16384),
        (256, 24576, 1536),
    ):  # DeepSeek-V3's attention output and query projections
        weights = (_struct((n, k), _FP8), _struct((n // 128, k // 128), _F32))
        yield Case("matmul", f"e4m3 {rows} rows", matmul, (_struct((rows, k), _BF16), weights))


def _write_cases() -> Iterator[Case]:
    for dtype, tag in ((_BF16, "bf16"), (_FP8, "e4m3")):
        pool, rows = _struct((8192, 16, 8, 128), dtype), _struct((4096, 8, 128), _BF16)
        yield Case("kv_write", tag, kv_write, (pool, rows, _struct((4096,), _I32)), donate=0)


def cases() -> list[Case]:
    return [*_attention_cases(), *_expert_cases(), *_dense_cases(), *_write_cases()]
