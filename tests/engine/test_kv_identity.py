"""What makes the KV of two engines the same: each part of it is compared, and named with both
values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest

from deepinfer_jax.engine.kv_identity import CacheIdentity, KVIdentity


def identity(**changes: Any) -> KVIdentity:
    """Of a made-up engine with one cache."""
    values = {
        "model": "m",
        "dtype": jnp.float32,
        "quantization": None,
        "load_format": "auto",
        "block_size": 8,
        "cache": {"name": "k", "kind": "blocks", "layers": 2, "entry": [4, 16], "dtype": "float32"},
        **changes,
    }
    config = SimpleNamespace(
        dtype=values["dtype"],
        quantization=values["quantization"],
        args=SimpleNamespace(load_format=values["load_format"]),
    )
    described = {"block_size": values["block_size"], "caches": [values["cache"]]}
    return KVIdentity.of(values["model"], config, SimpleNamespace(describe=lambda: described))


def test_it_holds_what_the_engine_is():
    found = identity(quantization="int8", load_format="dummy")
    cache = CacheIdentity("blocks", 2, [4, 16], "float32")
    assert found == KVIdentity("m", "float32", "int8", "dummy", 8, {"k": cache})
    assert found.differences(identity(quantization="int8", load_format="dummy")) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "other"}, "model: 'other' there, 'm' here"),
        ({"dtype": jnp.bfloat16}, "dtype: 'bfloat16' there, 'float32' here"),
        ({"quantization": "int4"}, "quantization: 'int4' there, None here"),
        ({"load_format": "dummy"}, "load_format: 'dummy' there, 'auto' here"),
        ({"block_size": 16}, "block_size: 16 there, 8 here"),
    ],
)
def test_every_difference_is_named_with_both_values(change, text):
    assert identity().differences(identity(**change)) == [text]


@pytest.mark.parametrize(
    "change", [{"kind": "states"}, {"layers": 3}, {"entry": [4, 8]}, {"dtype": "bfloat16"}]
)
def test_every_property_of_a_cache_counts(change):
    own = {"name": "k", "kind": "blocks", "layers": 2, "entry": [4, 16], "dtype": "float32"}
    (difference,) = identity().differences(identity(cache=own | change))
    assert difference.startswith("caches: ")


def test_another_format_of_the_files_is_a_difference():
    newer = msgspec.structs.replace(identity(), format=99)
    (difference,) = identity().differences(newer)
    assert difference.startswith("format: 99 there")
