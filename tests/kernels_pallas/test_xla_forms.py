"""Every op's XLA path against a float64 oracle, over the shapes that break kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import DECODE, GROUPED, PREFILL, assert_close, run_attention

from deepinfer_jax import kernels_pallas as kernels
from deepinfer_jax.kernels_pallas import testing


class TestPagedDecode:
    @pytest.mark.parametrize("name", DECODE)
    def test_matches_oracle(self, name):
        got, expected = run_attention(kernels.paged_decode, DECODE[name], implementation="xla")
        assert_close(got, expected, DECODE[name].dtype)

    def test_shape_mismatch_names_the_shapes(self):
        inputs = testing.attention_inputs(DECODE["one"])
        with pytest.raises(ValueError, match=r"k_pool.*\(1, 3, 16\)"):
            kernels.paged_decode(
                np.zeros((1, 3, 16)),
                inputs["k_pool"],
                inputs["v_pool"],
                inputs["block_tables"],
                inputs["kv_lens"],
                scale=1.0,
            )


class TestRaggedPrefill:
    @pytest.mark.parametrize("name", PREFILL)
    def test_matches_oracle(self, name):
        got, expected = run_attention(kernels.ragged_prefill, PREFILL[name], implementation="xla")
        assert_close(got, expected, PREFILL[name].dtype)

    def test_holds_no_score_matrix(self):
        case = dataclasses.replace(PREFILL["long"], kv_lens=(2048,), q_lens=(2048,))
        args = {
            n: v if v is None else jnp.asarray(v) for n, v in testing.attention_inputs(case).items()
        }
        compiled = jax.jit(lambda a: kernels.ragged_prefill(**a, scale=1.0)).lower(args).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < case.heads * 2048 * 2048 * 4 / 4


class TestGroupedMatmul:
    @pytest.mark.parametrize("name", GROUPED)
    def test_matches_oracle(self, name):
        case = GROUPED[name]
        inputs = testing.grouped_inputs(case)
        got = jax.jit(kernels.grouped_matmul)(**inputs)
        assert_close(np.asarray(got), testing.grouped_oracle(**inputs), case.dtype)

    @pytest.mark.parametrize("name", GROUPED)
    def test_experts_match_oracle(self, name):
        case = GROUPED[name]
        inputs = testing.experts_inputs(case)
        got = jax.jit(kernels.moe_experts)(**inputs)
        assert_close(np.asarray(got), testing.experts_oracle(**inputs), case.dtype)

    def test_combine_weights(self):
        inputs = testing.experts_inputs(GROUPED["uneven"])
        weights = np.linspace(0, 1, inputs["x"].shape[0], dtype=np.float32)
        got = jax.jit(kernels.moe_experts)(**inputs, row_weights=weights)
        assert_close(
            np.asarray(got), testing.experts_oracle(**inputs) * weights[:, None], "float32"
        )


class TestMatmul:
    @pytest.mark.parametrize("name", [n for n in GROUPED if "fp8 blocks" in n])
    def test_fp8_matches_oracle(self, name):
        case = dataclasses.replace(GROUPED[name], sizes=(17,))
        inputs = testing.grouped_inputs(case)
        got = jax.jit(kernels.matmul)(inputs["x"], (inputs["w"][0], inputs["w_scale"][0]))
        assert_close(np.asarray(got), testing.grouped_oracle(**inputs), case.dtype)

    def test_leading_dimensions_and_result_type(self):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((2, 3, 8)), rng.standard_normal((5, 8))
        x16, w32 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32)
        got = kernels.matmul(x16, (w32,))
        assert got.dtype == jnp.float32 and got.shape == (2, 3, 5)
        np.testing.assert_allclose(got, np.asarray(x16).astype(np.float64) @ w.T, rtol=1e-5)
        assert kernels.matmul(x16, (w32,), out_dtype=jnp.bfloat16).dtype == jnp.bfloat16

    def test_operands_that_do_not_fit_are_refused(self):
        x, scale = jnp.zeros((2, 64)), jnp.zeros(4)
        w8, w4, w16 = jnp.zeros((4, 64), jnp.int8), jnp.zeros((4, 16), jnp.uint8), jnp.zeros((4, 9))
        for weights, message in (
            ((w8,), "int8 weights .* do not fit"),
            ((w8, scale[:3]), "do not fit"),
            ((w8[:, :32], scale), "do not fit"),
            ((w8, jnp.zeros((4, 2), jnp.int8), scale), "do not fit"),
            ((w8, scale.astype(jnp.float16)), "do not fit"),
            ((w4, jnp.zeros((4, 2), jnp.int8), scale), "do not fit"),
            ((w16,), "float weights .* do not fit"),
            ((w8.astype(jnp.int32),), "no products with weights of int32"),
        ):
            with pytest.raises(ValueError, match=message):
                kernels.matmul(x, weights)
        with pytest.raises(ValueError, match="multiple of 64 inputs, got 32"):
            kernels.matmul(x[:, :32], (w4, jnp.zeros((4, 1), jnp.int8), scale))


class TestKvWrite:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    def test_rows_land_in_their_slots(self, dtype):
        rng = np.random.default_rng(0)
        pool = jnp.asarray(rng.standard_normal((5, 4, 2, 8))).astype(dtype)
        rows = jnp.asarray(rng.standard_normal((6, 2, 8)) * 100, jnp.float32)
        slots = np.array(
            [3, 19, 20, 0, 4000, 20], np.int32
        )  # the last block's last slot, then dropped ones
        expected = np.array(pool.astype(jnp.float32)).reshape(20, 2, 8)
        expected[[3, 19, 0]] = np.asarray(rows.astype(dtype).astype(jnp.float32))[[0, 1, 3]]
        got = np.asarray(kernels.kv_write(pool, rows, slots).astype(jnp.float32))
        np.testing.assert_array_equal(got.reshape(20, 2, 8), expected)

    def test_fp8_saturates(self):
        pool = jnp.zeros((1, 4, 1, 2), jnp.float8_e4m3fn)
        got = kernels.kv_write(
            pool, jnp.full((1, 1, 2), 1e4, jnp.bfloat16), jnp.zeros(1, jnp.int32)
        )
        assert np.asarray(got.astype(jnp.float32))[0, 0, 0].tolist() == [448.0, 448.0]

    def test_donated_pool_is_updated_in_place(self):
        pool = jnp.zeros((64, 16, 2, 8), jnp.float32)
        write = jax.jit(kernels.kv_write, donate_argnums=0)
        memory = write.lower(pool, jnp.ones((4, 2, 8)), jnp.arange(4)).compile().memory_analysis()
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes / 100
