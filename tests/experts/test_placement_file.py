"""Placement files: there and back, and every way in which one can be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepinfer_jax.experts.placement_file import FORMAT, PlacementRecord
from deepinfer_jax.experts.policy import RankLayout, balance

LOADS = np.random.default_rng(0).integers(0, 9, (2, 3, 6)).astype(np.int32)
RECORD = PlacementRecord(4, 2, balance(LOADS, 8, RankLayout(2)), LOADS)


def test_there_and_back_replaces_the_old_file(tmp_path):
    path = tmp_path / "deep" / "placement"
    PlacementRecord(3, 2, RECORD.slots, LOADS[:, :0]).save(path)
    assert PlacementRecord.load(path).loads.shape == (2, 0, 6)
    RECORD.save(path)
    found = PlacementRecord.load(path)
    assert (found.version, found.ranks) == (4, 2)
    np.testing.assert_array_equal(found.slots, RECORD.slots)
    np.testing.assert_array_equal(found.loads, LOADS)
    assert [p.name for p in path.parent.iterdir()] == ["placement"]
    assert PlacementRecord.load_if_there(tmp_path / "none") is None


def test_slots_for_other_slots_come_from_the_loads():
    assert RECORD.slots_for(8, RankLayout(2)) is RECORD.slots
    for physical, ranks in ((10, 2), (8, 4)):
        layout = RankLayout(ranks)
        np.testing.assert_array_equal(
            RECORD.slots_for(physical, layout), balance(LOADS, physical, layout)
        )
    unread = PlacementRecord(0, 2, RECORD.slots, LOADS[:, :0])
    assert sorted(set(unread.slots_for(12, RankLayout(4))[0].tolist())) == list(range(6))


WRONG = {
    "format": ({"format": "other"}, {}, "format 'other', expected"),
    "tensor": ({}, {"more": np.zeros(1, np.int32)}, r"holds \['loads', 'more', 'slots'\]"),
    "version": ({"version": "-3"}, {}, "version -3"),
    "no number": ({"version": "x"}, {}, "invalid literal"),
    "ranks": ({"ranks": "3"}, {}, "8 slots on 3 ranks"),
    "layers": ({}, {"slots": RECORD.slots[:1]}, r"shape \(1, 8\) do not go with loads"),
    "dtype": ({}, {"loads": LOADS.astype(np.int64)}, "must be int32"),
    "negative": ({}, {"loads": LOADS - 99}, "loads at least 0"),
    "range": ({}, {"slots": RECORD.slots + 1}, r"outside 0\.\.5"),
    "missing": (
        {},
        {"slots": np.minimum(RECORD.slots, 4)},
        r"layer 0 has no slot for the .* \[5\]",
    ),
    "empty": ({}, {"slots": RECORD.slots[:, :0]}, "has no slot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_the_file(tmp_path, case):
    metadata, tensors, words = WRONG[case]
    path = tmp_path / "placement"
    good = {"format": FORMAT, "version": "4", "ranks": "2"}
    save_file(RECORD.tensors() | tensors, path, good | metadata)
    with pytest.raises(ValueError, match=f"expert placement {path}: .*{words}"):
        PlacementRecord.load(path)


def test_torn_and_foreign_files_are_refused(tmp_path):
    RECORD.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for i, wrong in enumerate((b"", b"{}", data[:-7], data[: len(data) // 2], b"\xff" * 64)):
        path = tmp_path / str(i)
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"expert placement {path}: "):
            PlacementRecord.load(path)
    with pytest.raises(ValueError, match="expert placement .*nowhere"):
        PlacementRecord.load(tmp_path / "nowhere")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "placement"
    RECORD.save(path)
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(OSError, match="no space"):
        PlacementRecord(5, 2, RECORD.slots, LOADS).save(path)
    assert PlacementRecord.load(path).version == 4
    assert [p.name for p in tmp_path.iterdir()] == ["placement"]
    assert load_file(path).keys() == {"slots", "loads"}
