"""Every field of SamplingParams: its default, its limits, what a refusal says."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from deepinfer_jax.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

REFUSED = [
    ("n", 0),
    ("n", True),
    ("n", 1.5),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1]),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 3),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["2"]),
    ("stop_token_ids", 2),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1),
    ("top_logprobs", MAX_LOGPROBS + 1),
    ("ignore_eos", 1),
    ("detokenize", None),
    ("skip_special_tokens", "no"),
    ("output_kind", "DELTA"),
    ("priority", 0.5),
    ("user_id", 3),
    ("cache_salt", None),
    ("first_n_token_no_eos", -1),
    # beyond what the place can hold where the value ends up
    ("n", 16385),
    ("n", 10**7),
    ("temperature", 1e31),
    ("temperature", 1e308),
    ("top_p", 1e-31),
    ("top_p", 5e-324),
    ("repetition_penalty", 1e-7),
    ("repetition_penalty", 1e300),
    ("logit_bias", {3: 1e10}),
    ("logit_bias", {3: -3.4e38}),
    ("logit_bias", {2**31: 1.0}),
    ("max_tokens", 2**31),
    ("max_tokens", 2**70),
    ("first_n_token_no_eos", 2**31),
    ("priority", 2**53 + 1),
    ("priority", -(2**70)),
    ("seed", -(2**63) - 1),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", range(65537)),
    ("stop", ["x"] * 1025),
    ("stop", ["x" * 65537]),
    ("stop", ["\ud800"]),
    ("user_id", "u" * 65537),
    ("cache_salt", "s" * 10**6),
    ("cache_salt", "\ud800"),
    ("presence_penalty", 10**400),
    ("temperature", np.ones(2)),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_bad_value_is_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    assert not number or abs(value) > 10**300 or str(value) in str(error.value)


def test_messages_name_the_limit():
    with pytest.raises(ValueError, match=r"top_p must be >= 1e-30 and <= 1.0, got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"max_tokens must be >= 0 and <= 2147483647, got -3"):
        SamplingParams(max_tokens=-3)
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens=4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize("top_k", [0, -1, 2**31, 2**63, 10**30])
def test_a_top_k_that_no_vocabulary_reaches_keeps_all(top_k):
    assert SamplingParams(top_k=top_k).top_k == -1
    assert SamplingParams(top_k=2**31 - 1).top_k == 2**31 - 1


def test_defaults_are_the_reference_s():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (
        1,
        1.0,
        1.0,
        -1,
        0.0,
        16,
        0,
    )
    assert (p.stop, p.stop_token_ids, p.seed, p.logprobs, p.prompt_logprobs) == (
        (),
        (),
        None,
        None,
        None,
    )
    assert not p.greedy and not p.has_penalties


def test_values_are_normalised():
    assert SamplingParams(max_tokens=0).max_tokens == 1
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(top_k=0).top_k == -1
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams(prompt_logprobs=False).prompt_logprobs is None
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5)).max_tokens == 3


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1, False)]
)
def test_greedy_below_the_threshold(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_reference_aliases():
    p = SamplingParams(top_logprobs=3, seq_seed=0, first_n_token_no_eos=1)
    assert (p.logprobs, p.seed, p.min_tokens) == (3, 0, 1)
    assert (p.top_logprobs, p.seq_seed, p.first_n_token_no_eos) == (None, None, None)
    assert SamplingParams(top_logprobs=0, first_n_token_no_eos=0) == SamplingParams()
    assert SamplingParams(seed=4, seq_seed=4).seed == 4
    for clash in (
        {"logprobs": 1, "top_logprobs": 2},
        {"seed": 1, "seq_seed": 2},
        {"min_tokens": 2, "first_n_token_no_eos": 1},
    ):
        with pytest.raises(ValueError, match="is an alias of"):
            SamplingParams(**clash)


def test_frozen_and_replaceable():
    p = SamplingParams(seq_seed=7, stop="a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2
    assert p.replace(seed=8).seed == 8
    with pytest.raises(ValueError, match="temperature"):
        p.replace(temperature=-1)
    assert copy.deepcopy(p) == pickle.loads(pickle.dumps(p)) == p


def test_the_given_mapping_is_not_shared():
    bias = {1: 2.0}
    p = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert p.logit_bias == {1: 2.0}


def test_children_have_their_own_seeds():
    p = SamplingParams(n=3, seed=2**64 - 1)
    assert [(c.n, c.seed) for c in map(p.child, range(3))] == [(1, 2**64 - 1), (1, 0), (1, 1)]
    assert SamplingParams(n=2).child(1).seed is None


def test_from_dict_takes_json():
    values = json.loads(
        '{"temperature": 0, "stop": ["a"], "logit_bias": {"5": -1.5}, "output_kind": "delta"}'
    )
    p = SamplingParams.from_dict(values)
    assert (p.greedy, p.stop, p.logit_bias, p.output_kind) == (
        True,
        ("a",),
        {5: -1.5},
        RequestOutputKind.DELTA,
    )
    with pytest.raises(
        ValueError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'\?"
    ):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(ValueError, match="logit_bias key"):
        SamplingParams.from_dict({"logit_bias": {"x": 1}})
    with pytest.raises(ValueError, match="output_kind"):
        SamplingParams.from_dict({"output_kind": "sometimes"})
