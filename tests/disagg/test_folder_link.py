"""Hand-over through a folder: the tokens of one engine, whatever the meshes; a lost or damaging
peer is noticed."""

from __future__ import annotations

import time

import pytest
from snapshot_cases import GOLDEN

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.disagg import folder_link as kv_store_link
from deepinfer_jax.disagg import mesh_link
from deepinfer_jax.disagg.folder_link import FolderHello, FolderLink
from deepinfer_jax.disagg.layout import Layout, LayoutMismatch
from deepinfer_jax.disagg.messages import Cancel, Message
from deepinfer_jax.disagg.protocol import PeerLost
from deepinfer_jax.scheduler.routing.ids import AttemptId

ARGS = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "block_size": 8,
    "num_blocks": 60,
    "chunked_prefill": True,
    "max_num_batched_tokens": 32,
    "prefill_buckets": (32,),
    "decode_buckets": (4,),
    "max_logprobs": 2,
}
PROMPTS = [[3 + (7 * i + 11 * k) % 490 for i in range(5 + 13 * k)] for k in range(5)]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.7, logprobs=2),
]


def generated(llm: LLM) -> list:
    return [
        [
            (
                o.outputs[0].token_ids,
                o.outputs[0].finish_reason,
                [list(x) for x in o.outputs[0].logprobs or ()],
            )
            for o in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        for params in PARAMS
    ]


@pytest.fixture(scope="module")
def expected():
    with LLM(str(GOLDEN / "llama"), **ARGS) as llm:
        return generated(llm)


@pytest.mark.parametrize(
    "meshes",
    [
        {},
        {"prompt_mesh": {"tensor_parallel_size": 2}, "completion_mesh": {"data_parallel_size": 2}},
    ],
)
def test_the_same_tokens_through_a_folder(meshes, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_link, "connect", lambda a, b: kv_store_link.connect(a, b, tmp_path))
    with LLM(str(GOLDEN / "llama"), disaggregate="1P:1D", **meshes, **ARGS) as llm:
        assert generated(llm) == expected
        llm.engine.wait_idle()
        llm.engine.check_integrity()
        stats = llm.stats()["handoff"]
        assert stats["COMPLETION_0"]["acked"] == 10
        for pair in llm.engine._links.values():
            for end in pair:
                end.close()
    assert not list(tmp_path.rglob("*.tmp")) and not list(
        tmp_path.rglob("*.msg")
    )  # everything was read, and removed


NO_LAYOUT = Layout(0, 0, {}, "", 1, {}, 1)


def cancel(number: int) -> Message:
    return Message(Cancel(AttemptId("a", 0, 1).handoff(number), "r"))


def pair(folder, lost_after=60.0) -> tuple[FolderLink, FolderLink]:
    ends = []
    for side in ("source", "target"):
        ends.append(
            FolderLink(
                folder,
                side,
                None,
                FolderHello(side, f"{side}-{time.monotonic_ns()}", NO_LAYOUT, 1),
                lost_after,
            )
        )
    for end in ends:
        end.start(end.meet())
    return ends[0], ends[1]


def poll(link, seconds=10.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        messages = link.poll()
        if messages:
            return messages
        time.sleep(0.001)
    raise AssertionError("nothing came")


def test_messages_keep_their_order_and_closing_comes_last(tmp_path):
    a, b = pair(tmp_path)
    for i in range(50):
        a.send(cancel(i))
    a.close("done")
    got = []
    while len(got) < 50:
        got += poll(b)
    assert got == [cancel(i) for i in range(50)]
    with pytest.raises(PeerLost, match="done"):
        poll(b)
    b.close()


def test_a_silent_peer_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_store_link, "SIGN_OF_LIFE", 100.0)
    _, b = pair(tmp_path, lost_after=0.3)
    with pytest.raises(PeerLost, match="no sign of life from source for 0.3 s"):
        poll(b)


def test_a_damaged_message_loses_the_peer_instead_of_being_believed(tmp_path, monkeypatch):
    real = kv_store_link.encode_tensors
    monkeypatch.setattr(
        kv_store_link, "encode_tensors", lambda meta, arrays: [*real(meta, arrays), b"x"]
    )
    a, b = pair(tmp_path)
    a.send(cancel(1))
    with pytest.raises(PeerLost, match="CorruptEntry"):
        poll(b)


def test_another_layout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_link, "connect", lambda a, b: kv_store_link.connect(a, b, tmp_path))
    with pytest.raises(
        LayoutMismatch, match="block_size: 8 on the prompt side, 4 on the completion side"
    ):
        LLM(str(GOLDEN / "llama"), disaggregate="1P:1D", completion_mesh={"block_size": 4}, **ARGS)
