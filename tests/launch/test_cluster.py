"""The router process's core against engines that are played by the tests: no device, no second
process."""

import subprocess
import sys
import time

import pytest
from wire_handler import FAST, Handler

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.launch.cluster.core import Cluster, ClusterConfig
from deepinfer_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.client import RemoteEngine
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.sampling_params import RequestOutputKind

CACHES = {"k": {"kind": "blocks", "layers": 2, "entry": [16, 1, 4], "dtype": "float32"}}
ROLES = {"NORMAL": 0, "PROMPT": 1, "COMPLETION": 2}
MODEL = wire.ModelInfo(
    model="/nowhere",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=[2],
    max_logprobs=5,
    enable_penalties=True,
)


def layout(role, **changes):
    base = {
        "protocol": 2,
        "role": role,
        "roles": ROLES,
        "model": "aaaa",
        "block_size": 16,
        "caches": CACHES,
        "max_model_len": 64,
    }
    return {**base, **changes}


class Engine(Handler):
    """An engine process as the router sees it; the test says what it sends."""

    def __init__(
        self,
        world,
        kind,
        name,
        *,
        protocol=wire.PROTOCOL,
        processes=1,
        process=0,
        job=None,
        capacity=(4, 1000, 64),
        **changes,
    ):
        super().__init__()
        self.name, self.kind = name, kind
        self.hub = Hub(name, config=FAST).start()
        world.hubs.append(self.hub)
        hello = wire.Hello(
            protocol,
            kind,
            name,
            job=job or name,
            process=process,
            processes=processes,
            layout=layout(**{"role": ROLES[kind.upper()], **changes}),
            capacity=capacity,
            data=f"tcp://127.0.0.1:{1000 + len(world.hubs)}",
            model=MODEL,
        )
        self.hub.dial(world.cluster.endpoint, hello, self)
        self.wait(lambda: self.channel or self.ended)

    def take(self, kind, count=1):
        """The next `count` messages of a type, which are then forgotten."""
        self.wait(lambda: sum(isinstance(m, kind) for m, _ in self.messages) >= count)
        found = [m for m, _ in self.messages if isinstance(m, kind)][:count]
        self.messages = [(m, f) for m, f in self.messages if all(m is not x for x in found)]
        return found[0] if count == 1 else found

    def messages_of(self, kind):
        return [m for m, _ in self.messages if isinstance(m, kind)]

    def send(self, *messages):
        for m in messages:
            self.channel.send(m)

    def result(self, output_id, tokens, finish=None, fresh=None):
        completion = CompletionOutput(0, "", tokens, finish_reason=finish)
        self.send(
            wire.Result(
                RequestOutput(
                    str(output_id),
                    None,
                    [],
                    None,
                    [completion],
                    finish is not None,
                    RequestMetrics(0.0),
                )
            )
        )

    def die(self):
        self.hub.stop(0)


class World:
    def __init__(self, **config):
        self.hubs = []
        self.cluster = Cluster(ClusterConfig(hub=FAST, **config))
        self.cluster.start()

    def engine(self, kind, name, **options):
        engine = Engine(self, kind, name, **options)
        if engine.channel is not None and options.get("processes", 1) == 1:
            until = time.monotonic() + 5
            while not (name in self.cluster.members and self.cluster.members[name].active):
                assert time.monotonic() < until
                time.sleep(0.001)
        return engine

    def client(self):
        client = RemoteEngine(self.cluster.endpoint, connect_timeout=5, hub=FAST)
        self.hubs.append(client.connection.hub)
        return client

    def check(self):
        """Loads are the sum of the requests, and nothing is left over."""
        until = time.monotonic() + 5
        while self.cluster.router.jobs:
            assert time.monotonic() < until, self.cluster.router.jobs
            time.sleep(0.001)
        self.cluster.router.check_integrity()
        coordinator = self.cluster.coordinator
        assert not coordinator.requests and not coordinator.parts and not self.cluster.early

    def close(self):
        for hub in self.hubs:
            hub.stop(0)
        self.cluster.hub.stop(0)


@pytest.fixture
def world():
    made = []

    def make(**config):
        made.append(World(**config))
        return made[-1]

    yield make
    for w in made:
        w.close()


PARAMS = SamplingParams(max_tokens=8, temperature=0)
DELTA = PARAMS.replace(output_kind=RequestOutputKind.DELTA)


def outputs_of(client, count=1, timeout=10):
    """All outputs until `count` requests have ended."""
    got, until = [], time.monotonic() + timeout
    while sum(o.finished for o in got) < count:
        assert time.monotonic() < until, got
        got += client.step()
    return got


def prefill(prompt, completion):
    """Plays one hand-over up to the acknowledgement; returns the attempt's key."""
    key = prompt.take(wire.Start).attempt
    prompt.send(wire.AssignDecode(key))
    placed = prompt.take(wire.Assigned)
    assert (placed.attempt, placed.target) == (key, completion.name)
    prompt.send(
        wire.Progress(key, 3, 0.01), wire.Prefilled(key), wire.HandedOver(key, completion.name)
    )
    return key


def test_a_request_passes_through(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    peers = p.take(wire.Peers, 2)[-1].peers
    assert [x.name for x in peers] == ["C"] and peers[0].data.startswith("tcp://127.0.0.1:")
    client = w.client()
    client.add_request("mine", [1, 2, 3], PARAMS)
    key = prefill(p, c)
    assert key.attempt == 1
    c.result(key.handoff(1), [7, 8], "stop")
    (out,) = outputs_of(client)
    assert (out.request_id, out.prompt_token_ids, out.outputs[0].token_ids) == (
        "mine",
        [1, 2, 3],
        [7, 8],
    )
    w.check()


def test_the_first_token_is_not_overtaken(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], DELTA)
    key = p.take(wire.Start).attempt
    p.send(wire.AssignDecode(key))
    p.take(wire.Assigned)
    c.result(key.handoff(1), [12])  # arrives before anything the prompt engine says
    c.result(key.handoff(1), [13], "stop")
    time.sleep(0.05)
    p.result(key, [11])
    p.send(wire.Prefilled(key), wire.HandedOver(key, "C"))
    got = outputs_of(client)
    assert [o.outputs[0].token_ids for o in got] == [[11], [12], [13]]
    w.check()


def test_late_and_double_outputs_reach_nobody(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], PARAMS)
    key = prefill(p, c)
    c.result(key.handoff(1), [7], "stop")
    c.result(key.handoff(1), [7], "stop")
    c.result(key.handoff(2), [9], "stop")
    assert len(outputs_of(client)) == 1
    time.sleep(0.05)
    assert client.step() == []
    w.check()


def test_a_dead_prompt_engine_is_replaced_by_another(world):
    w = world()
    p0, p1, c = w.engine("prompt", "P0"), w.engine("prompt", "P1"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], PARAMS)
    first = p0 if _got(p0, p1) is p0 else p1
    other = p1 if first is p0 else p0
    key = first.take(wire.Start).attempt
    first.die()
    again = other.take(wire.Start)
    assert again.attempt == key._replace(attempt=2) and again.seed is not None
    other.send(wire.AssignDecode(again.attempt))
    other.take(wire.Assigned)
    other.send(wire.Prefilled(again.attempt), wire.HandedOver(again.attempt, "C"))
    c.result(again.attempt.handoff(1), [7], "stop")
    assert outputs_of(client)[0].outputs[0].token_ids == [7]
    w.check()


def _got(*engines):
    until = time.monotonic() + 5
    while time.monotonic() < until:
        for e in engines:
            if any(isinstance(m, wire.Start) for m, _ in e.messages):
                return e
        time.sleep(0.001)
    raise AssertionError("nobody was given the request")


def test_a_dead_prompt_engine_does_not_end_what_it_has_handed_over(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], DELTA)
    key = p.take(wire.Start).attempt
    p.send(wire.AssignDecode(key))
    p.take(wire.Assigned)
    p.result(key, [11])
    p.send(wire.Prefilled(key))
    c.result(key.handoff(1), [12])  # it has it, whatever the prompt engine still manages to say
    while not any(o.outputs[0].token_ids == [12] for o in client.step()):
        pass
    p.die()
    time.sleep(0.3)
    c.result(key.handoff(1), [13], "stop")
    assert outputs_of(client)[-1].outputs[0].token_ids == [13]
    w.check()


def test_a_dead_completion_engine_after_the_first_token_of_a_stream_ends_it_with_a_reason(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], DELTA)
    key = prefill_streaming(p, c)
    c.result(key.handoff(1), [12])
    got = []
    while len(got) < 2:
        got += client.step()
    assert [o.outputs[0].token_ids for o in got] == [[11], [12]]
    c.die()
    got = outputs_of(client)
    assert got[-1].outputs[0].finish_reason == "error" and got[-1].outputs[
        0
    ].stop_reason.startswith("C: ")
    w.check()


def prefill_streaming(p, c):
    key = p.take(wire.Start).attempt
    p.send(wire.AssignDecode(key))
    p.take(wire.Assigned)
    p.result(key, [11])
    p.send(wire.Prefilled(key), wire.HandedOver(key, c.name))
    return key


def test_who_found_no_room_is_told_when_there_is(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C", capacity=(1, 1000, 64))
    client = w.client()
    client.add_request("a", [1], PARAMS)
    key = prefill(p, c)
    client.add_request("b", [1], PARAMS)
    second = p.take(wire.Start).attempt
    p.send(wire.AssignDecode(second))
    assert p.take(wire.Assigned).target is None
    c.result(key.handoff(1), [7], "stop")
    placed = p.take(wire.Assigned)
    assert (placed.attempt, placed.target) == (second, "C")
    client.abort_request(["b"])
    assert [o.outputs[0].finish_reason for o in outputs_of(client, 2)] == ["stop", "abort"]
    assert (
        p.take(wire.CancelAttempt).attempt == second
        and c.take(wire.CancelAttempt).attempt == second
    )
    w.check()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "completion",
            {"block_size": 32},
            "block_size: 16 on the prompt side, 32 on the completion side",
        ),
        (
            "completion",
            {"model": "bbbb"},
            "model: 'aaaa' on the prompt side, 'bbbb' on the completion side",
        ),
        (
            "completion",
            {"caches": {"k": {**CACHES["k"], "dtype": "bfloat16"}}},
            "cache 'k' dtype: 'float32' on the prompt side",
        ),
        ("completion", {"roles": {**ROLES, "PROMPT": 2}}, "roles: {"),
        ("completion", {"role": 1}, "role of the completion side: 1, expected COMPLETION=2"),
        ("prompt", {"max_model_len": 128}, "max_model_len: 128 here, 64 on P"),
        ("normal", {}, "a normal engine cannot join a deployment of prompt engines"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_both_values(world, kind, changes, message):
    w = world()
    w.engine("prompt", "P")
    stranger = w.engine(kind, "X", **changes)
    assert stranger.ended is not None and message in stranger.ended[0] and stranger.ended[1]
    assert list(w.cluster.members) == ["P"]


def test_another_protocol_version_is_refused(world):
    stranger = world().engine("prompt", "X", protocol=99)
    assert stranger.ended == (f"protocol version 99, this side speaks {wire.PROTOCOL}", True)


def test_the_name_of_a_living_engine_is_refused(world):
    w = world()
    w.engine("prompt", "P")
    reason, final = w.engine("prompt", "P").ended
    assert (
        "'P' belongs to a living prompt engine" in reason and not final
    )  # it may have lost its connection, and be back too soon


def test_a_job_serves_when_all_its_processes_are_there_and_ends_with_the_first_that_goes(world):
    w = world()
    a = w.engine("normal", "N.0", job="N", processes=2, process=0)
    client = w.client()
    client.add_request("r", [1], PARAMS)
    time.sleep(0.05)
    assert not a.messages
    b = w.engine("normal", "N.1", job="N", processes=2, process=1)
    first = _got(a, b)
    assert first.take(wire.Start).prompt_token_ids == [1]
    (b if first is a else a).die()
    survivor = a if first is a else b
    survivor.wait(lambda: survivor.ended)
    assert (
        "of the job is gone" in survivor.ended[0]
        and survivor.take(wire.JobLost).reason == survivor.ended[0]
    )
    client.abort_request(["r"])
    assert outputs_of(client)[0].outputs[0].finish_reason == "abort"
    w.check()


def test_normal_engines_answer_by_themselves(world):
    w = world()
    n = w.engine("normal", "N")
    client = w.client()
    client.add_request("r", [1], DELTA)
    key = n.take(wire.Start).attempt
    n.result(key, [5])
    n.result(key, [6], "length")
    assert [o.outputs[0].token_ids for o in outputs_of(client)] == [[5], [6]]
    w.check()


def test_requests_wait_for_a_role_until_the_deadline(world):
    w = world(deadline=0.5)
    p = w.engine("prompt", "P")
    client = w.client()
    client.add_request("a", [1], PARAMS)
    (out,) = outputs_of(client)
    assert out.outputs[0].stop_reason == "no completion engine has been there for 0.5 s"
    client.add_request("b", [1], PARAMS)
    c = w.engine("completion", "C")  # in time
    key = prefill(p, c)
    c.result(key.handoff(1), [7], "stop")
    assert outputs_of(client)[0].outputs[0].token_ids == [7]
    w.check()


def test_a_prompt_engine_that_reaches_no_completion_engine_gets_nothing_new(world):
    w = world(deadline=1.0)
    p0, c = w.engine("prompt", "P0"), w.engine("completion", "C")
    client = w.client()
    client.add_request("a", [1], PARAMS)
    start = time.monotonic()
    p0.send(
        wire.Linked(False, 0.6),
        wire.HandOverFailed(
            p0.take(wire.Start).attempt, "no completion engine can be reached", True
        ),
    )
    (out,) = outputs_of(client)
    assert (
        out.outputs[0].stop_reason
        == "no prompt engine that reaches a completion engine has been there for 1.0 s"
    )
    assert time.monotonic() - start < 0.9  # the silence before counts
    assert w.cluster.health()[1]["problems"] == [
        "no prompt engine that reaches a completion engine"
    ]
    p1 = w.engine("prompt", "P1")
    client.add_request("b", [1], PARAMS)
    c.result(prefill(p1, c).handoff(1), [7], "stop")
    assert outputs_of(client)[0].outputs[0].token_ids == [7] and not p0.messages_of(wire.Start)
    p0.send(wire.Linked(True))
    while w.cluster.health()[1]["problems"] or not w.cluster.members["P0"].linked:
        time.sleep(0.001)
    w.check()


def test_an_engine_that_makes_no_progress_is_dropped_and_health_says_so(world):
    w = world(stall_timeout=0.5)
    w.engine("prompt", "P")
    c = w.engine("completion", "C")
    assert w.cluster.health() == (True, {"status": "ok", "problems": [], "requests": 0})
    c.hub.on_ping = lambda: wire.Ping(stuck=3.0)
    c.wait(lambda: c.ended)
    assert "no progress for 3.0 s" in c.ended[0]
    healthy, body = w.cluster.health()
    assert not healthy and body["problems"] == ["no completion engine"]


def test_a_client_that_goes_takes_its_requests_along(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("r", [1, 2, 3], PARAMS)
    key = prefill(p, c)
    client.connection.hub.stop(0)
    assert c.take(wire.CancelAttempt).attempt == key
    w.check()


def test_an_engine_that_drains_gets_nothing_new(world):
    w = world()
    p0, p1, c = w.engine("prompt", "P0"), w.engine("prompt", "P1"), w.engine("completion", "C")
    p0.send(wire.Draining())
    until = time.monotonic() + 5
    while not w.cluster.members["P0"].draining and time.monotonic() < until:
        time.sleep(0.001)
    client = w.client()
    for i in range(4):
        client.add_request(str(i), [1], PARAMS)
    for start in p1.take(wire.Start, 4):
        p1.send(wire.HandOverFailed(start.attempt, "cannot serve this", False))
    assert {o.outputs[0].stop_reason for o in outputs_of(client, 4)} == {"cannot serve this"}
    assert not any(isinstance(m, wire.Start) for m, _ in p0.messages) and not c.messages
    w.check()


def test_a_router_that_drains_refuses_new_requests_and_lets_others_end(world):
    w = world()
    p, c = w.engine("prompt", "P"), w.engine("completion", "C")
    client = w.client()
    client.add_request("old", [1], PARAMS)
    key = prefill(p, c)
    w.cluster.hub.call(w.cluster.begin_drain)
    client.add_request("new", [1], PARAMS)
    (out,) = outputs_of(client)
    assert (out.request_id, out.outputs[0].finish_reason) == (
        "new",
        "error",
    ) and "draining" in out.outputs[0].stop_reason
    assert not w.cluster.drained
    c.result(key.handoff(1), [7], "stop")
    outputs_of(client)
    assert w.cluster.drained


def test_what_an_engine_may_not_say_ends_it(world):
    w = world()
    w.engine("prompt", "P")
    c = w.engine("completion", "C")
    c.send(wire.Submit("x", [1], {}, 0.0))
    c.wait(lambda: c.ended)
    assert "a completion engine says no Submit" in c.ended[0]


def test_a_result_that_makes_no_sense_ends_its_sender_only(world):
    w = world()
    n0, n1 = w.engine("normal", "N0"), w.engine("normal", "N1")
    client = w.client()
    client.add_request("r", [1], PARAMS)
    first = _got(n0, n1)
    other = n1 if first is n0 else n0
    key = first.take(wire.Start).attempt
    first.send(wire.Result(RequestOutput(str(key), None, [], None, [], True)))
    first.wait(lambda: first.ended)
    assert "must have one completion" in first.ended[0]
    other.result(other.take(wire.Start).attempt, [5], "stop")
    assert outputs_of(client)[0].outputs[0].token_ids == [5]
    w.check()


def test_status_counts(world):
    w = world()
    w.engine("prompt", "P"), w.engine("completion", "C")
    status = w.client().stats()
    assert {e["name"]: e["state"] for e in status["engines"]} == {"P": "serving", "C": "serving"}
    assert status["counters"]["joined"] == 2 and status["health"]["status"] == "ok"


def test_llm_with_a_router_takes_no_engine_arguments():
    with pytest.raises(
        ValueError, match=r"the engines' arguments are theirs; got \['block_size'\]"
    ):
        LLM(router="127.0.0.1:1", block_size=32)
    with pytest.raises(ValueError, match="give a model, or the router of a deployment"):
        LLM()


def test_a_client_is_told_why_there_is_no_deployment(world):
    w = world()
    with pytest.raises(ConnectionError, match="no engine has joined it"):
        RemoteEngine(w.cluster.endpoint, connect_timeout=0.3)
    with pytest.raises(ValueError, match=r"must look like host:port, got 'nonsense'"):
        RemoteEngine("nonsense")


def test_a_router_needs_no_device():
    code = (
        "import sys; from deepinfer_jax.launch import router;"
        " router.main(['--listen', 'nonsense']); print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run
