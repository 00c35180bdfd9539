"""Layouts: what differs is named with both values, and what is no layout is refused."""

from __future__ import annotations

import pytest

from deepinfer_jax.disagg.layout import (
    Layout,
    LayoutMismatch,
    check_layouts,
    make_layout,
)
from deepinfer_jax.engine.kv_identity import model_fingerprint
from deepinfer_jax.scheduler import EngineType

BLOCKS = {
    "block_size": 16,
    "caches": [
        {"name": "k", "kind": "blocks", "layers": 2, "entry": [16, 2, 8], "dtype": "float32"}
    ],
}


def layouts():
    return make_layout(EngineType.PROMPT, "m1", BLOCKS, 128), make_layout(
        EngineType.COMPLETION, "m1", BLOCKS, 128
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(block_size=32),
            "block_size: 16 on the prompt side, 32 on the completion side",
        ),
        (
            lambda t: t.update(model="m2"),
            "model: 'm1' on the prompt side, 'm2' on the completion side",
        ),
        (
            lambda t: t["caches"]["k"].update(dtype="bfloat16"),
            "cache 'k' dtype: 'float32' on the prompt side, 'bfloat16' on",
        ),
        (
            lambda t: t["caches"]["k"].update(layers=3),
            "cache 'k' layers: 2 on the prompt side, 3 on the completion side",
        ),
        (
            lambda t: t["caches"].update(v=t["caches"].pop("k")),
            "cache 'k': .* on the prompt side, None on the completion side",
        ),
        (
            lambda t: t["roles"].update(COMPLETION=7),
            r"roles: \{'NORMAL': 0, 'PROMPT': 1, 'COMPLETION': 2\} on the prompt side",
        ),
        (lambda t: t.update(role=1), "role of the completion side: 1, expected COMPLETION=2"),
        (
            lambda t: t.update(protocol=9),
            "protocol: 2 on the prompt side, 9 on the completion side",
        ),
        (
            lambda t: t.update(max_model_len=64),
            "max_model_len: 128 on the prompt side, 64 on the completion side",
        ),
    ],
)
def test_a_layout_mismatch_names_both_values(change, message):
    source, target = layouts()
    check_layouts(source, target)
    values = target.to_plain()
    change(values)
    target = Layout.of_plain(values)
    with pytest.raises(LayoutMismatch, match=message):
        check_layouts(source, target)


def test_fingerprints_tell_weights_and_configs_apart(tmp_path):
    cases = {
        "a": (b"x" * 100_000, "{}"),
        "b": (b"y" + b"x" * 99_999, "{}"),
        "c": (b"x" * 100_000, "{}"),
        "d": (b"x" * 100_000, "{1}"),
    }
    for name, (content, config) in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        (tmp_path / name / "config.json").write_text(config)
    a, b, c, d = (model_fingerprint(tmp_path / n) for n in "abcd")
    assert a == c and len({a, b, d}) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda v: [],
        lambda v: None,
        lambda v: {**v, "caches": [1, 2]},
        lambda v: {**v, "caches": {"k": 1}},
        lambda v: {**v, "caches": {"k": {**v["caches"]["k"], "layers": 0}}},
        lambda v: {**v, "caches": {"k": {**v["caches"]["k"], "entry": [16, -2]}}},
        lambda v: {**v, "block_size": 0},
        lambda v: {**v, "block_size": "16"},
        lambda v: {**v, "max_model_len": 1 << 63},
        lambda v: {k: x for k, x in v.items() if k != "model"},
        lambda v: {**v, "roles": {"NORMAL": None}},
    ],
)
def test_what_is_no_layout_is_refused(change):
    values = layouts()[0].to_plain()
    assert Layout.of_plain(values) == layouts()[0]
    with pytest.raises(LayoutMismatch, match="this is no layout of an engine's caches"):
        Layout.of_plain(change(values))
