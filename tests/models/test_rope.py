"""Rotary embedding against formulas written independently here, in float64."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.models.layers.rope import RopeConfig, apply_rope, inv_frequencies, rope_cos_sin
from deepinfer_jax.models.layers.rope_parameters import scaled_length


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_complex_pairs(interleaved: bool) -> None:
    """Pairs as complex numbers times e^(i m theta_j): RoFormer, eq. 14."""
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((5, 3, 8)), np.array([0, 1, 7, 100, 4000])
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.empty_like(x)
    if interleaved:
        expected[..., 0::2], expected[..., 1::2] = turned.real, turned.imag
    else:
        expected[..., :4], expected[..., 4:] = turned.real, turned.imag
    cos, sin = rope_cos_sin(RopeConfig(8), jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x, jnp.float32), cos, sin, interleaved), expected, atol=1e-3
    )


def test_channels_past_the_rotated_width_pass() -> None:
    x = jnp.arange(2 * 1 * 12, dtype=jnp.float32).reshape(2, 1, 12)
    cos, sin = rope_cos_sin(RopeConfig(8), jnp.array([3, 4]))
    np.testing.assert_array_equal(apply_rope(x, cos, sin)[..., 8:], x[..., 8:])


def test_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2))

    def score(a: int, b: int) -> float:
        ca, cb = (
            rope_cos_sin(RopeConfig(64), jnp.array([a])),
            rope_cos_sin(RopeConfig(64), jnp.array([b])),
        )
        return float(jnp.vdot(apply_rope(q, *ca), apply_rope(k, *cb)))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)


def test_yarn_scales_as_deepseek_v3_publishes_them() -> None:
    """factor 40, mscale = mscale_all_dim = 1: cos and sin unscaled, softmax scale times (0.1 ln 40
    + 1)^2 = 1.8738542."""
    rope = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    config = RopeConfig.from_hf({"rope_theta": 10000, "rope_scaling": rope}, dim=64)
    assert config.cos_sin_scale == 1.0
    assert config.softmax_scale_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert config.softmax_scale_factor == pytest.approx(1.8738542, abs=1e-6)
    ratio = inv_frequencies(RopeConfig(64)) / inv_frequencies(config)
    # 64 ln(4096 / (2 pi 32)) / (2 ln 10000) = 10.47 and 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51:
    # kept to 10, divided from 23.
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[23:], 40, rtol=1e-5)
    assert np.all(np.diff(ratio[10:24]) > 0)


def yarn_frequencies(dim: int, theta: float, factor: float, original: int) -> list[float]:
    """The YaRN paper's ramp (arXiv:2309.00071, section 3.2) a pair at a time, with beta_fast 32 and
    beta_slow 1; its ends are cut to [0, dim - 1] and kept apart, as the published code does."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i in range(dim // 2):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        plain = theta ** (-2 * i / dim)
        frequencies.append(plain / factor * ramp + plain * (1 - ramp))
    return frequencies


@pytest.mark.parametrize(
    ("original", "theta"),
    [
        (4096, 10000.0),
        (64, 10000.0),  # beta_fast's pair would lie below the first one
        (600, 10.0),  # beta_slow's pair would lie beyond dim - 1
        (6, 10000.0),  # both ends fall on pair 0
    ],
)
def test_yarn_ramp_stays_within_the_pairs(original: int, theta: float) -> None:
    config = RopeConfig(64, theta, rope_type="yarn", factor=4.0, original_max_position=original)
    want = yarn_frequencies(64, theta, 4.0, original)
    np.testing.assert_allclose(inv_frequencies(config), want, rtol=1e-5)


def test_yarn_without_mscale_scales_cos_and_sin() -> None:
    config = RopeConfig(64, rope_type="yarn", factor=4.0, original_max_position=1024)
    cos, _ = rope_cos_sin(config, jnp.array([0]))
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1, rtol=1e-6)
    assert config.softmax_scale_factor == 1.0


def test_llama3_bands() -> None:
    """Llama 3.1: wavelengths under 8192 / 4 kept, over 8192 / 1 divided by 8, between blended
    monotonically."""
    plain = inv_frequencies(RopeConfig(128, 500000.0))
    ratio = plain / inv_frequencies(
        RopeConfig(128, 500000.0, "llama3", factor=8.0, original_max_position=8192)
    )
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 2048], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8, rtol=1e-6)
    middle = ratio[(wavelength >= 2048) & (wavelength <= 8192)]
    assert len(middle) > 2 and np.all(np.diff(middle) > 0) and middle.min() > 1 and middle.max() < 8


def test_spellings_and_refusals() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    base = {"hidden_size": 64, "num_attention_heads": 4}
    old = RopeConfig.from_hf({**base, "rope_theta": 5.0, "rope_scaling": scaling})
    new = RopeConfig.from_hf(
        {**base, "rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}}
    )
    assert old == new and old.dim == 16
    assert RopeConfig.from_hf({**base, "partial_rotary_factor": 0.5}).dim == 8
    for bad, match in (
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"factor": 4.0}}, "no rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, r"\['alpha'\]"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor must be finite"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_theta": -1.0}, "rope_theta must be finite and positive"),
        ({"rope_parameters": {"main": {"rope_theta": 1.0}}}, r"\['main'\] are not known"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {}}},
            "differs between layer types",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"head_dim": 7}, "even"),
    ):
        with pytest.raises(ValueError, match=match):
            RopeConfig.from_hf({**base, **bad})


HEADS = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


def test_one_set_per_layer_type_is_read_where_all_layers_in_use_share_it() -> None:
    one = {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}
    other = {"rope_type": "default", "rope_theta": 7.0}
    flat = RopeConfig.from_hf({**HEADS, "rope_parameters": one})
    both = {"full_attention": one, "sliding_attention": dict(one)}
    assert RopeConfig.from_hf({**HEADS, "rope_parameters": both}) == flat
    mixed = {"full_attention": one, "sliding_attention": other}
    used = {"layer_types": ["full_attention"] * 2}
    assert RopeConfig.from_hf({**HEADS, **used, "rope_parameters": mixed}) == flat


def test_rope_scaling_beside_rope_parameters_wins_and_keeps_theta() -> None:
    config = {
        **HEADS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    assert RopeConfig.from_hf(config) == RopeConfig(16, 5.0, "linear", 4.0, 64)


def test_original_length_beside_the_parameters_wins() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**HEADS, "rope_scaling": scaling, "original_max_position_embeddings": 16}
    assert RopeConfig.from_hf(config).original_max_position == 16


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 2.0}, 128),
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
    ],
)
def test_scaled_length(scaling: dict | None, length: int) -> None:
    """As vLLM derives it: the length before scaling times the factor, llama3 excepted."""
    assert scaled_length({**HEADS, "rope_scaling": scaling}) == length


def test_longrope_divides_every_frequency_by_its_own_number() -> None:
    divisors = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 8.0]
    rope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
    config = {**HEADS, "rope_parameters": rope, "original_max_position_embeddings": 16}
    read = RopeConfig.from_hf(config)
    np.testing.assert_allclose(
        inv_frequencies(read), 10000.0 ** (-np.arange(8) / 8) / np.array(divisors), rtol=1e-6
    )
    # 64 / 16 = 4 times as long: sqrt(1 + ln 4 / ln 16) = sqrt(1.5), LongRoPE section 3
    assert read.cos_sin_scale == pytest.approx(math.sqrt(1.5))
    rope["attention_factor"] = 0.5
    assert RopeConfig.from_hf(config).cos_sin_scale == 0.5
    rope["long_factor"] = [2.0] * 8
    with pytest.raises(ValueError, match="short_factor equals long_factor"):
        RopeConfig.from_hf(config)
