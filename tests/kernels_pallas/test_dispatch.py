"""The dispatch table: choice by target, refusals with reasons, overrides, and what
`explain` says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import dispatch
from deepinfer_jax.kernels_pallas.cpu import native as cpu_native

H200 = ("cuda", (9, 0))


def decode_args(d=128, dtype=jnp.bfloat16, block_size=16, shared=False):
    shapes = [(2, 8, d), (4, block_size, 1 if shared else 2, d), (4, block_size, 2, d)]
    q, k, v = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
    return (
        q,
        k,
        None if shared else v,
        jax.ShapeDtypeStruct((2, 3), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )


def chosen(op, args, target, **kwargs) -> dispatch.Choice:
    with kernels.use_target(*target):
        return dispatch.select(op, args, kwargs)[1]


@pytest.mark.parametrize(
    ("target", "args", "name", "reason"),
    [
        (H200, decode_args(), "mosaic", None),
        (
            H200,
            decode_args(576, block_size=64, shared=True),
            "mosaic_mla",
            "keys and values in one pool",
        ),
        (H200, decode_args(dtype=jnp.float32), "xla", "queries in float32"),
        (H200, decode_args(80), "xla", "head width 80"),
        (H200, decode_args(block_size=4), "xla", "block size 4"),
        (("cuda", (10, 0)), decode_args(), "xla", "needs compute capability 9.x"),
        (("cuda", (8, 0)), decode_args(), "xla", "needs compute capability 9.x"),
        (
            ("cpu",),
            decode_args(),
            "native" if cpu_native.status("paged_decode").native else "xla",
            "needs cuda",
        ),
        (("cpu",), decode_args(8), "xla", "multiples of 16"),
    ],
)
def test_choice_by_target_and_shape(target, args, name, reason):
    v_dim = 512 if args[2] is None else None
    choice = chosen("paged_decode", args, target, scale=1.0, v_dim=v_dim)
    assert choice.name == name
    assert reason is None or any(reason in why for _, why in choice.refused)


@pytest.mark.parametrize(
    ("rows", "n", "reason"),
    [(256, 7168, None), (2048, 7168, "more than 1024"), (256, 576, "multiples of 128")],
)
def test_dense_fp8_products_take_the_kernel_for_few_rows(rows, n, reason):
    shapes = (
        ((rows, 1024), jnp.bfloat16),
        ((n, 1024), jnp.float8_e4m3fn),
        ((-(-n // 128), 8), jnp.float32),
    )
    x, *weights = (jax.ShapeDtypeStruct(*s) for s in shapes)
    choice = chosen("matmul", (x, tuple(weights)), H200, out_dtype=x.dtype)
    assert choice.name == ("mosaic" if reason is None else "xla")
    assert reason is None or reason in choice.refused[0][1]


def test_environment_overrides_and_is_overridden_by_the_argument(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "paged_decode=xla, kv_write=xla")
    assert chosen("paged_decode", decode_args(), H200, scale=1.0).name == "xla"
    with kernels.use_target(*H200):
        assert (
            dispatch.select("paged_decode", decode_args(), {"scale": 1.0}, "mosaic")[1].name
            == "mosaic"
        )


@pytest.mark.parametrize("text", ["paged_decode=fast", "attention=xla", "paged_decode"])
def test_bad_environment_names_what_is_known(monkeypatch, text):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, text)
    with pytest.raises(ValueError, match=r"paged_decode=mosaic\|mosaic_mla\|native\|xla"):
        chosen("paged_decode", decode_args(), H200, scale=1.0)


def test_an_override_that_cannot_run_is_an_error():
    with (
        kernels.use_target("cuda", (10, 0)),
        pytest.raises(ValueError, match="needs compute capability 9.x"),
    ):
        dispatch.select("paged_decode", decode_args(), {"scale": 1.0}, "mosaic")
    with pytest.raises(
        ValueError, match="unknown implementation 'fast'; known: mosaic, mosaic_mla, native, xla"
    ):
        dispatch.select("paged_decode", decode_args(), {}, "fast")


def test_explain_says_what_runs_and_why():
    dispatch.reset_explain()
    chosen("paged_decode", decode_args(), ("cuda", (10, 0)), scale=1.0)
    chosen("paged_decode", decode_args(), ("cuda", (10, 0)), scale=1.0)
    assert (
        kernels.explain()
        == "paged_decode on cuda sm_100: xla (first that fits; mosaic refused: needs compute"
        " capability 9.x; mosaic_mla refused: needs compute capability 9.x; native refused:"
        " needs cpu)"
    )


def test_target_is_restored():
    before = kernels.current_target()
    with kernels.use_target(*H200):
        assert str(kernels.current_target()) == "cuda sm_90"
    assert kernels.current_target() == before == dispatch.Target("cpu")


def test_a_kernel_is_traced_once_for_all_layers():
    """Two layers with the same shapes call one program; another target has its own."""

    def inner(cores: int) -> list:
        def layers(q, *rest):  # a new function: JAX keeps what a function was traced to
            for _ in range(2):
                q = kernels.paged_decode(q, *rest, scale=0.1)
            return q

        with kernels.use_target("cuda", (9, 0), cores):
            jaxpr = jax.make_jaxpr(layers)(*decode_args())
        return [e.params["jaxpr"] for e in jaxpr.eqns if "jaxpr" in e.params]

    first, second = inner(132)
    assert first is second
    assert first is not inner(78)[0]


def test_kernels_refuse_a_target_of_unknown_size():
    with kernels.use_target(*H200), pytest.raises(ValueError, match="how many multiprocessors"):
        jax.make_jaxpr(lambda *a: kernels.paged_decode(*a, scale=0.1))(*decode_args())
