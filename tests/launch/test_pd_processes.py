"""Two prompt jobs (one of two processes), two completion engines and a router with a shared secret;
then each of them is hurt."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from deployment import Deployment
from engine_cases import GREEDY, Golden

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.rpc.messages import PROTOCOL

LLAMA = Golden("llama")
ALL = ("P0", "P1.0", "P1.1", "C0", "C1")
HELPERS = Path(__file__).parent.parent / "helpers"
LONG = GREEDY.replace(max_tokens=150)
MESHES = {
    "P0": {"transport": "device"},
    "C0": {"transport": "device"},
    "C1": {"transport": "device", "data_parallel_size": 2, "max_num_seqs": 4, "decode_buckets": 4},
}
"""C1's mesh is another one than the prompt engines'. P0's KV travels from device to device, P1's
through host memory."""


def client(cluster):
    return LLM(router=cluster.address, router_options={"secret": cluster.secret})


def long_answers(llm):
    """What the deployment answers to LONG while all is well; its beginning is the reference's
    answer."""
    out = tokens(llm.generate(prompt_token_ids=LLAMA.prompts, sampling_params=LONG, use_tqdm=False))
    assert [o[:24] for o in out] == LLAMA.greedy
    return out


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


class Load:
    """Requests in a thread, while the test hurts somebody."""

    def __init__(self, cluster, prompts, params):
        self.outputs, self.seconds = None, None
        self._args = (cluster, prompts, params)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        limit = time.monotonic() + 10
        while cluster.status()["requests"] < len(prompts) and time.monotonic() < limit:
            time.sleep(0.005)

    def _run(self):
        cluster, prompts, params = self._args
        with client(cluster) as llm:
            start = time.monotonic()
            self.outputs = llm.generate(
                prompt_token_ids=prompts, sampling_params=params, use_tqdm=False
            )
            self.seconds = time.monotonic() - start
            print(f"load: {len(prompts)} requests in {self.seconds:.2f} s")

    def result(self, timeout=60):
        self._thread.join(timeout)
        assert self.outputs is not None, "the client is still waiting"
        return self.outputs


def check_answers(outputs, expected, count):
    """Everybody has exactly one answer: the right one, or a reason."""
    assert len(outputs) == count
    failed = [o for o in outputs if o.outputs[0].finish_reason == "error"]
    assert all(o.outputs[0].stop_reason for o in failed)
    for i, o in enumerate(outputs):
        if o not in failed:
            assert o.outputs[0].token_ids == expected[i % len(expected)]
    return len(failed)


def start_up_says_what_each_process_is(cluster):
    text = cluster.processes["C1"].text
    assert (
        "role COMPLETION (2), process 0 of 1" in text
        and "mesh dp=2 ep=1 tp=1 over 2 cpu devices" in text
    )
    assert "P0: hands over to C1 by the device transport" in cluster.processes["P0"].text
    assert "P1.1: hands over to C1 by the host transport" in cluster.processes["P1.1"].text
    assert "fingerprint " in text and "cache k: kind=blocks layers=3" in text


def tokens_equal_the_reference(llm, cluster):
    assert (
        tokens(
            llm.generate(prompt_token_ids=LLAMA.prompts * 4, sampling_params=GREEDY, use_tqdm=False)
        )
        == LLAMA.greedy * 4
    )
    cluster.wait_idle()


def stream_gives_every_token_once(llm):
    got = {str(i): [] for i in range(len(LLAMA.prompts))}
    for out in llm.stream(prompt_token_ids=LLAMA.prompts, sampling_params=GREEDY):
        got[out.request_id] += out.outputs[0].token_ids
    assert list(got.values()) == LLAMA.greedy


def several_completions_equal_single_ones_with_their_seeds(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
    together = llm.generate(
        prompt_token_ids=LLAMA.prompts[0], sampling_params=params, use_tqdm=False
    )[0].outputs
    singles = [params.replace(n=1, seed=7 + i) for i in range(3)]
    alone = [
        o.outputs[0]
        for o in llm.generate(
            prompt_token_ids=[LLAMA.prompts[0]] * 3, sampling_params=singles, use_tqdm=False
        )
    ]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] and [
        c.index for c in together
    ] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in together}) == 3
    assert all(
        len(c.logprobs) == 12 and t in e
        for c in together
        for t, e in zip(c.token_ids, c.logprobs, strict=True)
    )


def bad_requests_are_refused_and_others_go_on(llm):
    with pytest.raises(ValueError, match=r"token id 99999 at position 0 is outside the vocabulary"):
        llm.generate(prompt_token_ids=[[99999]], use_tqdm=False)
    too_long = llm.generate(
        prompt_token_ids=[[1] * 300, LLAMA.prompts[0]], sampling_params=GREEDY, use_tqdm=False
    )
    assert too_long[0].outputs[0].finish_reason == "prompt_length_exceeded"
    assert too_long[1].outputs[0].token_ids == LLAMA.greedy[0]


def bad_peers_are_refused_with_both_values_and_hurt_nobody(cluster, llm):
    other = cluster.folder / "other"
    other.touch(mode=0o600)
    other.write_bytes(b"a secret of somebody else")
    bad = {
        "blocks": (
            {"block_size": 32},
            (
                r"block_size: 32 here, 16 on P0|block_size: 32 on the prompt side, 16 on the"
                r" completion side"
            ),
        ),
        "model": (
            {"model": "llama_bias"},
            (
                r"model: '\w+' here, '\w+' on P0|model: '\w+' on the prompt side, '\w+' on the"
                r" completion"
            ),
        ),
        "secret": ({"secret_file": other}, r"the shared secrets? "),
    }
    for name, (flags, _) in bad.items():
        cluster.engine("prompt", name, **{"no_warm_up": True} | flags)
    peer = [str(HELPERS / "processes" / "bad_peer.py"), "--secret-file", str(cluster.secret)]
    data = cluster.processes["C0"].wait_for(r"takes hand-overs at (\S+)").group(1)
    strangers = [
        cluster.command(
            "stranger",
            "stranger",
            [*peer, f"tcp://{cluster.address}", "--oversized", str(65 << 20)],
        ),
        cluster.command("intruder", "stranger", [*peer, data]),
    ]
    for stranger in strangers:
        told = json.loads(stranger.wait_for(r"\{.*\}").group())
        assert told["newer"] == f"protocol version {PROTOCOL + 98}, this side speaks {PROTOCOL}"
        assert (
            "are no message" in told["garbage"]
            and told["no secret"] == "nothing"
            and stranger.wait() == 0
        )
    assert "sent garbage" in json.loads(strangers[0].wait_for(r"\{.*\}").group())["late garbage"]
    assert "takes hand-overs from prompt engines, not from a client" in told["late garbage"]
    for name, (_, message) in bad.items():
        cluster.processes[name].wait_for(message)
    assert [cluster.processes[name].wait() for name in ("blocks", "model")] == [2, 2]
    cluster.processes[
        "secret"
    ].kill()  # it would ask again: a handshake fails in the same way where a router is just leaving
    cluster.wait_for_engines(*ALL)
    assert (
        tokens(
            llm.generate(prompt_token_ids=LLAMA.prompts * 4, sampling_params=GREEDY, use_tqdm=False)
        )
        == LLAMA.greedy * 4
    )
    cluster.wait_idle()


def closing_a_stream_frees_everything(llm, cluster):
    stream = llm.stream(prompt_token_ids=LLAMA.prompts, sampling_params=LONG)
    next(stream)
    stream.close()
    cluster.wait_idle()


def kill_9_under_load_and_rejoin(cluster, expected, victim):
    print(f"kill -9 {victim}")
    job = [n for n in ALL if n.partition(".")[0] == victim.partition(".")[0]]
    load = Load(cluster, LLAMA.prompts * 6, LONG)
    cluster.processes[victim].kill()
    check_answers(load.result(), expected, 24)
    assert load.seconds < 30
    cluster.wait_for_engines(*(set(ALL) - set(job)))
    cluster.wait_idle()
    for name in job:
        assert name == victim or cluster.processes[name].wait() in (1, 3)
        cluster.processes[name].start()
    cluster.wait_for_engines(*ALL, timeout=100)
    with client(cluster) as llm:
        assert (
            tokens(
                llm.generate(
                    prompt_token_ids=LLAMA.prompts * 4, sampling_params=GREEDY, use_tqdm=False
                )
            )
            == LLAMA.greedy * 4
        )


def a_stopped_process_is_given_up_and_comes_back(cluster, expected, victim):
    print(f"SIGSTOP {victim}")
    load = Load(cluster, LLAMA.prompts * 6, LONG)
    cluster.processes[victim].signal(signal.SIGSTOP)
    try:
        check_answers(load.result(), expected, 24)
        cluster.wait_for_engines(*(set(ALL) - {victim}))
    finally:
        cluster.processes[victim].signal(signal.SIGCONT)
    cluster.wait_for_engines(*ALL)
    cluster.wait_idle()
    with client(cluster) as llm:
        assert (
            tokens(
                llm.generate(
                    prompt_token_ids=LLAMA.prompts * 4, sampling_params=GREEDY, use_tqdm=False
                )
            )
            == LLAMA.greedy * 4
        )


def a_client_that_dies_leaves_nothing_behind(cluster):
    llm = client(cluster)
    for i, prompt in enumerate(LLAMA.prompts):
        llm.engine.add_request(str(i), prompt, LONG)
    llm.engine.connection.hub.stop(0)
    cluster.wait_idle()


def drain_lets_requests_finish(cluster, expected):
    load = Load(cluster, LLAMA.prompts * 4, LONG)
    cluster.processes["P0"].signal(signal.SIGTERM)
    cluster.processes["C0"].signal(signal.SIGTERM)
    assert check_answers(load.result(), expected, 16) == 0
    assert cluster.processes["P0"].wait() == 0 and cluster.processes["C0"].wait() == 0
    assert (
        "P0: 0 of 80 blocks are held" in cluster.processes["P0"].text
        and "C0: 0 of 80" in cluster.processes["C0"].text
    )
    cluster.wait_for_engines("P1.0", "P1.1", "C1")
    assert cluster.get("/healthz")[0] == 200


def without_a_role_requests_end_with_a_reason(cluster, llm):
    cluster.processes["C1"].kill()
    start = time.monotonic()
    out = llm.generate(prompt_token_ids=LLAMA.prompts, sampling_params=GREEDY, use_tqdm=False)
    assert time.monotonic() - start < 15
    assert {o.outputs[0].stop_reason for o in out} == {
        "no completion engine has been there for 4.0 s"
    }
    code, body = cluster.get("/healthz")
    assert code == 503 and "no completion engine" in body


def a_lost_router_ends_requests_with_a_reason(cluster, llm):
    llm.engine.add_request("x", LLAMA.prompts[0], LONG)
    cluster.router.kill()
    start, outputs = time.monotonic(), []
    while not outputs and time.monotonic() - start < 10:
        outputs = llm.engine.step()
    assert outputs[0].finished and "the router is lost" in outputs[0].outputs[0].stop_reason
    with pytest.raises(RuntimeError, match="the router is lost"):
        llm.generate(prompt_token_ids=LLAMA.prompts, use_tqdm=False)
    cluster.router.start()  # engines find their way back without being restarted
    cluster.router.wait_for("listening on")
    cluster.wait_for_engines("P1.0", "P1.1")


def test_a_deployment_in_good_and_bad_times(tmp_path):
    """One test: starting the processes takes longer than most of it, and each part leaves them as
    the next needs them."""
    with Deployment(
        tmp_path, secret=b"known to every process", peer_timeout=3, deadline=4
    ) as cluster:
        cluster.job("prompt", "P1", peer_timeout=3, cpu_devices=1, data_parallel_size=2)
        for name, flags in MESHES.items():
            cluster.engine(
                "prompt" if name[0] == "P" else "completion",
                name,
                peer_timeout=3,
                cpu_devices=2,
                **flags,
            )
        cluster.joined(*ALL)
        cluster.wait_for_engines(*ALL)
        with client(cluster) as llm:
            start_up_says_what_each_process_is(cluster)
            tokens_equal_the_reference(llm, cluster)
            stream_gives_every_token_once(llm)
            several_completions_equal_single_ones_with_their_seeds(llm)
            bad_requests_are_refused_and_others_go_on(llm)
            bad_peers_are_refused_with_both_values_and_hurt_nobody(cluster, llm)
            closing_a_stream_frees_everything(llm, cluster)
            expected = long_answers(llm)
            for victim in ("C0", "P1.1"):
                kill_9_under_load_and_rejoin(cluster, expected, victim)
            for victim in ("C1", "P0"):
                a_stopped_process_is_given_up_and_comes_back(cluster, expected, victim)
            a_client_that_dies_leaves_nothing_behind(cluster)
            drain_lets_requests_finish(cluster, expected)
            without_a_role_requests_end_with_a_reason(cluster, llm)
            a_lost_router_ends_requests_with_a_reason(cluster, llm)
