"""A server over a tiny model, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Server, model_folder

from deepinfer_jax import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    with LLM(
        str(folder), prefill_buckets=(256,), decode_buckets=(8,), num_blocks=160, **sizes
    ) as llm:
        yield llm


@pytest.fixture
def server(llm: LLM) -> Iterator[Server]:
    made = Server(llm)
    with made.http:
        yield made
    assert llm.engine.num_unfinished_requests == 0
    while llm.engine.has_unfinished_requests():  # the last step's results, nobody's any more
        assert llm.engine.step() == []
    llm.engine.check_integrity()
