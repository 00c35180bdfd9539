"""Descriptions of GPUs that are not there, and one architecture per process."""

from __future__ import annotations

import pytest

from deepinfer_jax.kernels_pallas.aot import check
from deepinfer_jax.kernels_pallas.aot.targets import TARGETS, find_target


def test_a_second_architecture_is_refused(monkeypatch):
    monkeypatch.setattr(check, "_architectures", set())
    check.claim_architecture(find_target("H200"))
    check.claim_architecture(find_target("h20"))
    with pytest.raises(RuntimeError, match="start another for NVIDIA B200"):
        check.claim_architecture(find_target("b200"))


def test_shared_memory_by_architecture():
    """CUDA C++ Programming Guide: maximum per block 163, 99, 227 and 227 KiB."""
    found = {name: TARGETS[name].shared_bytes_per_block // 1024 for name in TARGETS}
    assert [found[n] for n in ("a100", "rtx4090", "h200", "b200")] == [163, 99, 227, 227]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown GPU 'h300'; known: .*h200"):
        find_target("h300")
