"""What a peer or a client sends ends its own connection, or its own request, and nothing else: the
router goes on serving, and a job's engines keep theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import socket
import time

import msgspec
import pytest
import zmq
from wire_handler import FAST

from deepinfer_jax.disagg.layout import make_layout
from deepinfer_jax.launch.cluster.core import Cluster, ClusterConfig
from deepinfer_jax.launch.cluster.http import serve_http
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.scheduler.roles import EngineType
from deepinfer_jax.scheduler.routing.ids import AttemptId

BLOCKS = {
    "block_size": 16,
    "caches": [{"name": "k", "kind": "blocks", "layers": 2, "entry": [16, 4], "dtype": "float32"}],
}
MODEL = wire.ModelInfo("/nowhere", 64, 100, [2], 5, enable_penalties=True)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def pack(kind, /, **fields):
    return msgspec.msgpack.encode({"t": kind, **fields})


def hello(kind="client", name="evil", /, **fields):
    return pack("hello", **({"protocol": wire.PROTOCOL, "kind": kind, "name": name} | fields))


def engine(kind, name, /, **fields):
    layout = make_layout(EngineType[kind.upper()], "aaaa", BLOCKS, 64).to_plain()
    model = msgspec.to_builtins(MODEL)
    known = {"job": name, "layout": layout, "capacity": [4, 1000, 64], "model": model}
    return hello(kind, name, **(known | fields))


def submit(request_id="a", ids=(1, 2, 3), params=None, arrival_time=0.0, **fields):
    known = {"request_id": request_id, "prompt_token_ids": list(ids), "params": params or {}}
    return pack("submit", **(known | {"arrival_time": arrival_time} | fields))


class Router:
    """A cluster of this process, and raw connections to it."""

    def __init__(self, **config):
        self.cluster = Cluster(ClusterConfig(**{"hub": FAST} | config))
        self.cluster.start()
        self.context = zmq.Context()

    def dial(self, *messages):
        """A connection that has said these."""
        s = self.context.socket(zmq.DEALER)
        s.linger = 0
        s.connect(self.cluster.endpoint)
        for m in messages:
            s.send(m)
        return s

    def joined(self, kind, name, **fields):
        s = self.dial(engine(kind, name, **fields))
        assert take(s, "welcome")
        deadline = time.monotonic() + 5
        while name not in self.cluster.members or not self.cluster.members[name].active:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return s

    def client(self):
        s = self.dial(hello())
        assert take(s, "welcome")
        return s

    def started(self, engine_socket):
        """The attempt an engine was given, as plain values."""
        return take(engine_socket, "start")["attempt"]

    def check_alive(self):
        """A newcomer is greeted, and the loads are the sums of the jobs."""
        s = self.dial(hello("client", "good"))
        assert take(s, "welcome") and self.cluster.hub.thread.is_alive()
        self.cluster.router.check_integrity()

    def close(self):
        self.cluster.hub.stop(0)
        self.context.destroy(0)


@pytest.fixture
def router():
    made = []

    def make(**config):
        made.append(Router(**config))
        return made[-1]

    yield make
    for r in made:
        r.close()


def take(s, *kinds, timeout=30.0):
    """The next message of one of these types; None without one."""
    deadline = time.monotonic() + timeout
    while s.poll(max(0, 1000 * (deadline - time.monotonic()))):
        message = msgspec.msgpack.decode(s.recv_multipart()[0])
        if message["t"] in kinds:
            return message
    return None


def output(name, tokens=(6,), finish="stop", **fields):
    completion = {"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": finish}
    known = {"prompt": None, "prompt_token_ids": [], "prompt_logprobs": None}
    known |= {"outputs": [completion], "finished": finish is not None}
    known |= {"metrics": {"arrival_time": 0.0}}
    return pack("result", output={"request_id": name} | known | fields)


# ---- clients -------------------------------------------------------------------------------------

BAD_SUBMITS = {
    "a token of 41 bits": {"ids": [1 << 40]},
    "a token of 64 bits": {"ids": [1 << 63]},
    "a negative token": {"ids": [-1]},
    "a token that is text": {"ids": ["x"]},
    "no tokens": {"ids": []},
    "no time": {"arrival_time": NAN},
    "an endless time": {"arrival_time": INF},
    "a time before time": {"arrival_time": -1.0},
    "an id of a megabyte": {"request_id": "a" * 1_000_000},
    "an id that is no text": {"request_id": 3},
    "params that are a list": {"params": [1]},
}


@pytest.mark.parametrize("name", BAD_SUBMITS)
def test_a_submit_out_of_bounds_ends_its_client_only(router, name):
    r = router()
    n = r.joined("normal", "N")
    good, bad = r.client(), r.client()
    good.send(submit("mine"))
    attempt = r.started(n)
    bad.send(submit(**BAD_SUBMITS[name]))
    assert "no message of protocol" in take(bad, "refused")["reason"]
    n.send(output(str(AttemptId(*attempt))))
    assert take(good, "result")["output"]["outputs"][0]["token_ids"] == [6]
    r.check_alive()


BAD_PARAMS = [
    {"n": 10_000_000},
    {"n": 1025},
    {"n": 0},
    {"n": "2"},
    {"n": True},
    {"stop": [1]},
    {"stop": [""]},
    {"logit_bias": [1]},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {"1" * 5000: 1.0}},
    {"logit_bias": {"1": INF}},
    {"seed": 1.5},
    {"temperature": INF},
    {"temperature": NAN},
    {"output_kind": 7},
    {"output_kind": []},
    {"priority": 1 << 62},
    {"stop_token_ids": {"a": 1}},
    {"user_id": ["a"]},
    {"cache_salt": {}},
    {"max_tokens": 1 << 62},
    {"min_tokens": 1 << 62},
    {"repetition_penalty": 1e-300},
    {"logprobs": []},
    {"no_such_field": 1},
]


def test_params_that_make_no_sense_end_that_request_only(router):
    r = router()
    r.joined("normal", "N")
    client = r.client()
    for i, params in enumerate(BAD_PARAMS):
        client.send(submit(f"r{i}", params=params))
        got = take(client, "result")["output"]
        assert got["request_id"] == f"r{i}", params
        assert got["outputs"][0]["finish_reason"] == "error" and got["outputs"][0]["stop_reason"]
    assert not r.cluster.coordinator.requests
    r.check_alive()


def test_limits_count_completions_and_name_the_value_and_the_limit(router):
    r = router(max_requests=8, max_n=4)
    r.joined("normal", "N")
    client = r.client()

    def refused(request_id, n):
        client.send(submit(request_id, params={"n": n}))
        return take(client, "result")["output"]["outputs"][0]["stop_reason"]

    assert refused("a", 5) == "request 'a': n=5 exceeds the router's limit of 4"
    client.send(submit("b", params={"n": 4}))
    client.send(submit("c", params={"n": 3}))
    assert refused("d", 2) == (
        "request 'd': n=2, and 7 completions are unfinished; the router's limit is 8"
    )
    client.send(submit("e"))
    deadline = time.monotonic() + 5
    while len(r.cluster.coordinator.parts) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_prompts_over_every_engines_limit_end_at_the_door(router):
    r = router()
    client = r.client()
    client.send(submit("early"))
    reason = take(client, "result")["output"]["outputs"][0]["stop_reason"]
    assert "no engine has joined" in reason
    n = r.joined("normal", "N")
    client.send(submit("long", ids=[5] * 64))
    got = take(client, "result")["output"]
    assert got["finished"] and got["outputs"][0]["finish_reason"] == "prompt_length_exceeded"
    client.send(submit("odd", ids=[1, 100]))
    reason = take(client, "result")["output"]["outputs"][0]["stop_reason"]
    assert reason == "request 'odd': token id 100 is outside the vocabulary [0, 100)"
    assert take(n, "start", timeout=0.1) is None
    r.check_alive()


@pytest.mark.parametrize("name", ["", "a#b@1", "x.0@1", "a.b", "a/b", "\0", "\ud7ff"])
def test_a_request_may_have_any_name(router, name):
    r = router()
    n = r.joined("normal", "N")
    client = r.client()
    client.send(submit(name))
    n.send(output(str(AttemptId(*r.started(n)))))
    assert take(client, "result")["output"]["request_id"] == name
    client.send(submit(name))
    client.send(pack("cancel", request_ids=[name]))
    assert take(client, "result")["output"]["outputs"][0]["finish_reason"] == "abort"


def test_nobody_cancels_the_request_of_another_client(router):
    r = router()
    n = r.joined("normal", "N")
    a = r.dial(hello())
    session = take(a, "welcome")["session"]
    b = r.client()
    a.send(submit("mine"))
    attempt = r.started(n)
    b.send(pack("cancel", request_ids=["mine", f"{session}.mine", f"../{session}.mine"]))
    b.send(pack("status?"))
    assert take(b, "status")["status"]["requests"] == 1
    n.send(output(str(AttemptId(*attempt))))
    assert take(a, "result")["output"]["outputs"][0]["finish_reason"] == "stop"


# ---- engines -------------------------------------------------------------------------------------

PLAIN = make_layout(EngineType.COMPLETION, "aaaa", BLOCKS, 64).to_plain()
CACHE = PLAIN["caches"]["k"]
BAD_HELLOS = {
    "no capacity": {"capacity": [0, 1000, 64]},
    "negative capacity": {"capacity": [-1, -1, -1]},
    "endless capacity": {"capacity": [1 << 63, 1 << 63, 1 << 63]},
    "caches that are a list": {"layout": PLAIN | {"caches": [1, 2]}},
    "caches that are numbers": {"layout": PLAIN | {"caches": {"k": 1}}},
    "a cache of text layers": {"layout": PLAIN | {"caches": {"k": CACHE | {"layers": "x"}}}},
    "a layout without a model": {"layout": {k: v for k, v in PLAIN.items() if k != "model"}},
    "a layout that is text": {"layout": "x"},
    "a model of text lengths": {"model": {"max_model_len": "abc"}},
    "a model of a mesh that is a number": {"model": {"mesh": 3}},
    "no model": {"model": None},
    "a vocabulary of nothing": {"model": msgspec.to_builtins(MODEL) | {"vocab_size": 0}},
    "a process beyond its job": {"process": 1},
    "processes without end": {"processes": 1 << 60},
    "no processes": {"processes": 0},
    "a name of two lines": {"name": "x\n2026-01-01 ERROR forged"},
    "a name of a megabyte": {"name": "x" * 1_000_000},
    "a name of nothing": {"name": ""},
    "a job of two lines": {"job": "x\ny"},
    "a kind that is a list": {"kind": ["completion"]},
    "another kind": {"kind": "train"},
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_an_engine_that_makes_no_sense_is_refused(router, name):
    r = router()
    p = r.joined("prompt", "P")
    fields = BAD_HELLOS[name]
    stranger = r.dial(engine("completion", "C", **fields))
    assert take(stranger, "refused") and list(r.cluster.members) == ["P"]
    client = r.client()
    client.send(submit())
    c = r.joined("completion", "C")
    attempt = r.started(p)
    p.send(pack("assign", attempt=attempt))
    assert take(p, "assigned")["target"] == "C" and c is not None
    r.check_alive()


def test_no_second_engine_gets_the_place_of_a_member_of_a_running_job(router):
    r = router()
    first = r.dial(engine("normal", "foo.0", job="foo", processes=2, process=0))
    assert take(first, "welcome")
    second = r.joined("normal", "foo.1", job="foo", processes=2, process=1)
    for fields in (
        {"name": "foo", "job": "foo", "processes": 1},
        {"name": "foo.2", "job": "foo", "processes": 2, "process": 1},
        {"name": "foo.2", "job": "foo", "processes": 3, "process": 2},
        {"name": "foo.1", "job": "foo", "processes": 2, "process": 1},
    ):
        reason = take(r.dial(engine("normal", "foo", **fields)), "refused")["reason"]
        assert "job 'foo'" in reason or "belongs to a living" in reason, reason
    assert list(r.cluster.members) == ["foo.0", "foo.1"]
    client = r.client()
    client.send(submit())
    poller = zmq.Poller()
    for s in (first, second):
        poller.register(s, zmq.POLLIN)
    assert dict(poller.poll(5000)), "the job serves"
    r.check_alive()


def test_only_the_engine_that_holds_a_request_answers_it(router):
    r = router()
    holder = r.joined("normal", "N")
    client = r.client()
    client.send(submit("mine"))
    attempt = r.started(holder)
    other = r.joined("normal", "EVIL")
    other.send(output(str(AttemptId(*attempt)), tokens=[6, 6, 6]))
    other.send(pack("hand_over_failed", attempt=attempt, reason="ha", retry=False))
    other.send(pack("progress", attempt=attempt, tokens=1, seconds=1.0))
    other.send(pack("prefilled", attempt=attempt))
    assert take(client, "result", timeout=0.2) is None
    holder.send(output(str(AttemptId(*attempt)), tokens=[7]))
    assert take(client, "result")["output"]["outputs"][0]["token_ids"] == [7]
    assert r.cluster.counters["late"] == 4
    r.check_alive()


BAD_WORDS = {
    "a result of nothing": lambda key: output(key, outputs=[]),
    "a result without metrics": lambda key: output(key, metrics=None),
    "a result of no attempt": lambda key: output("mine"),
    "a result of a hand-over": lambda key: output(f"{key}/1"),
    "a place for no attempt": lambda key: pack("assign", attempt="a@b"),
    "progress backwards": lambda key: pack("progress", attempt=ID, tokens=-5, seconds=1.0),
    "progress without time": lambda key: pack("progress", attempt=ID, tokens=1, seconds=NAN),
    "progress in no time": lambda key: pack("progress", attempt=ID, tokens=1, seconds=INF),
    "progress without end": lambda key: pack("progress", attempt=ID, tokens=1 << 62, seconds=1.0),
    "a heartbeat of no number": lambda key: pack("ping", stuck=NAN),
    "a gauge without end": lambda key: pack("ping", gauges={"cache": INF}),
    "a client's word": lambda key: submit(),
    "a second hello": lambda key: engine("normal", "N"),
    "a completion engine's link": lambda key: pack("hand", body=1),
    "noise": lambda key: b"\xc1" * 100,
    "depth": lambda key: b"\x91" * 100_000,
    "nothing": lambda key: b"",
}
ID = ["a", 0, 1]


@pytest.mark.parametrize("name", BAD_WORDS)
def test_what_an_engine_must_not_say_ends_that_engine_only(router, name):
    r = router()
    bad = r.joined("normal", "N")
    client = r.client()
    client.send(submit("mine"))
    attempt = r.started(bad)
    good = r.joined("normal", "M")
    bad.send(BAD_WORDS[name](str(AttemptId(*attempt))))
    assert take(bad, "refused")
    again = r.started(good)
    assert again == [attempt[0], attempt[1], attempt[2] + 1]
    good.send(output(str(AttemptId(*again)), tokens=[7]))
    assert take(client, "result")["output"]["outputs"][0]["token_ids"] == [7]
    r.check_alive()


def test_gauges_do_not_pass_for_what_the_router_knows(router):
    r = router()
    n = r.joined("normal", "N")
    n.send(pack("ping", gauges={"name": 1.0, "role": 2.0, "waiting": 3.0}))
    client = r.client()
    deadline = time.monotonic() + 5
    while True:
        client.send(pack("status?"))
        (shown,) = take(client, "status")["status"]["engines"]
        if shown["waiting"] == 3.0:
            break
        assert time.monotonic() < deadline
    assert (shown["name"], shown["role"]) == ("N", "normal")


def test_a_request_whose_engines_die_goes_to_no_third(router):
    r = router()
    client = r.client()
    engines = {name: r.joined("normal", name) for name in ("A", "B", "C")}
    client.send(submit("pill"))
    for _ in range(2):
        name = holder(r)
        assert take(engines[name], "start")
        engines.pop(name).close(0)
        deadline = time.monotonic() + 5
        while name in r.cluster.members:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    got = take(client, "result", timeout=10)["output"]["outputs"][0]
    assert got["finish_reason"] == "error"
    assert "2 engines have died while they held this request" in got["stop_reason"]
    (last,) = engines.values()
    assert take(last, "start", timeout=0.1) is None
    r.check_alive()


def holder(r):
    """The engine that has been given something."""
    deadline = time.monotonic() + 5
    while True:
        for load in list(r.cluster.router.prompt.values()):
            if load.jobs:
                return load.name
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- anything ------------------------------------------------------------------------------------

VALUES = [None, -1, 0, 1 << 31, 1 << 63, 1e308, NAN, INF, "", "x" * 300, [], {}, True, b"\0", [[]]]


def changed(rng, value, depth=0):
    """The value with one leaf replaced, dropped or doubled."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.8):
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at], depth + 1), *value[at + 1 :]]
    return rng.choice(VALUES)


def test_random_fields_never_end_the_router(router):
    r, rng = router(hub=dataclasses.replace(FAST, peer_timeout=2.0)), random.Random(0)
    words = [submit(), pack("cancel", request_ids=["a"]), pack("status?"), pack("ping", stuck=1.0)]
    engine_words = [
        output("a.0@1"),
        pack("assign", attempt=ID, exclude=["C"]),
        pack("release", attempt=ID, target="C"),
        pack("progress", attempt=ID, tokens=1, seconds=1.0),
        pack("prefilled", attempt=ID),
        pack("handed_over", attempt=ID, target="C"),
        pack("hand_over_failed", attempt=ID, reason="x", retry=True),
        pack("linked", linked=True, seconds=0.0),
        pack("draining"),
    ]
    for i in range(250):
        kind = rng.choice(["client", "normal"])
        greeting = hello() if kind == "client" else engine("normal", f"N{i}")
        said = rng.choice(words if kind == "client" else engine_words)
        messages = [greeting, said]
        which = rng.random() < 0.7
        messages[which] = msgspec.msgpack.encode(
            changed(rng, msgspec.msgpack.decode(messages[which]))
        )
        s = r.dial(*messages)
        if i % 10 == 9:
            take(s, "welcome", "refused", timeout=1.0)
        s.close(20)
    deadline = time.monotonic() + 60
    while r.cluster.members:  # silent ones are lost
        assert time.monotonic() < deadline
        time.sleep(0.01)
    n, client = r.joined("normal", "GOOD"), r.client()
    client.send(submit("mine", params={"max_tokens": 1}))
    n.send(output(str(AttemptId(*r.started(n)))))
    while take(client, "result")["output"]["request_id"] != "mine":
        pass
    r.check_alive()


def test_random_bytes_never_end_the_router(router):
    r, rng = router(), random.Random(0)
    base = [hello(), submit(), engine("prompt", "P"), pack("ping", stuck=0.0)]
    for i in range(150):
        data = bytearray(rng.choice(base))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        s = r.dial(*([hello("client", f"c{i}")] if rng.random() < 0.5 else []))
        s.send_multipart([bytes(data)] + [rng.randbytes(5)] * rng.randint(0, 3))
        s.close(20)
    r.check_alive()


# ---- http ----------------------------------------------------------------------------------------


def get(port, path):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
        s.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: s.recv(65536), b""))


def test_silent_http_connections_are_bounded_and_ended(router, monkeypatch):
    from deepinfer_jax.engine.stats import pages

    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(pages._Handler, "timeout", 0.3)
    r = router()
    server = serve_http(r.cluster, "127.0.0.1", 0)
    try:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", server.server_port)
            held = [
                stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(20)
            ]
            for s in held:
                s.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    assert s.recv(1) == b""  # the last ones at once, the first after 0.3 s
        assert b"404" in get(server.server_port, "/nothing")
        for path, word in (("/healthz", b"unhealthy"), ("/status", b"engines"), ("/metrics", b"#")):
            assert word in get(server.server_port, path)
    finally:
        server.close()


def test_http_connections_that_trickle_are_ended(router, monkeypatch):
    from deepinfer_jax.engine.stats import pages

    monkeypatch.setattr(pages, "CONNECTION_SECONDS", 0.2)
    r = router()
    server = serve_http(r.cluster, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as s:
            deadline = time.monotonic() + 10
            with pytest.raises(OSError):
                while time.monotonic() < deadline:
                    s.sendall(b"G")
                    s.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        if s.recv(1) == b"":
                            raise ConnectionError("ended")
        assert time.monotonic() < deadline
    finally:
        server.close()
