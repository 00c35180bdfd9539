"""Channels between hubs: handshake, order, silence, garbage, secrets. All within this process, over
loopback sockets."""

import socket
import time

import msgspec
import pytest
import zmq
from wire_handler import FAST, Handler
from zmq.utils.monitor import recv_monitor_message

from deepinfer_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.channel import HubConfig
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.rpc.security import Security

SECRET = b"sixteen bytes or more"


@pytest.fixture
def hubs():
    made = []

    def make(secret=None, config=FAST):
        made.append(Hub(f"hub{len(made)}", Security(secret), config))
        return made[-1]

    yield make
    for hub in made:
        hub.stop(0)


def serve(hub, refuse=None):
    """(endpoint, handlers of accepted channels)."""
    accepted = []

    def accept(channel, hello):
        if refuse is not None:
            raise ValueError(refuse)
        channel.handler = Handler()
        channel.handler.channel = channel
        accepted.append(channel.handler)
        return wire.Welcome("server", transport=hello.name)

    endpoint = hub.listen("tcp://127.0.0.1:0", accept)
    hub.start()
    return endpoint, accepted


def dial(hub, endpoint, protocol=wire.PROTOCOL, kind="client"):
    handler = Handler()
    if not hub.thread.is_alive():
        hub.start()
    hub.dial(endpoint, wire.Hello(protocol, kind, "me"), handler)
    return handler


@pytest.mark.parametrize("secret", [None, SECRET])
def test_messages_arrive_once_and_in_order_with_their_payloads(hubs, secret):
    patient = HubConfig(
        heartbeat=0.05, peer_timeout=30
    )  # a busy machine may keep a hub's thread from its heartbeats
    endpoint, accepted = serve(hubs(secret, patient))
    client = dial(hubs(secret, patient), endpoint)
    client.wait(lambda: client.channel)
    assert client.welcome.transport == "me"
    for i in range(2000):
        client.channel.send(
            wire.JobLost(str(i)), [bytes([i % 256]) * (i % 7) * 1000] if i % 2 else []
        )
    accepted[0].wait(lambda: len(accepted[0].messages) == 2000)
    assert [m.reason for m, _ in accepted[0].messages] == [str(i) for i in range(2000)]
    assert all(
        f == ([bytes([i % 256]) * (i % 7) * 1000] if i % 2 else [])
        for i, (_, f) in enumerate(accepted[0].messages)
    )


def test_a_refusal_says_why(hubs):
    endpoint, _ = serve(
        hubs(), refuse="block_size: 16 on the prompt side, 32 on the completion side"
    )
    client = dial(hubs(), endpoint)
    client.wait(lambda: client.ended)
    assert client.ended == ("block_size: 16 on the prompt side, 32 on the completion side", True)


def test_another_version_is_refused_and_both_are_named(hubs):
    endpoint, accepted = serve(hubs())
    client = dial(hubs(), endpoint, protocol=wire.PROTOCOL + 8)
    client.wait(lambda: client.ended)
    assert client.ended == (
        f"protocol version {wire.PROTOCOL + 8}, this side speaks {wire.PROTOCOL}",
        True,
    )
    assert not accepted


def test_an_unknown_kind_is_refused(hubs):
    endpoint, _ = serve(hubs())
    client = dial(hubs(), endpoint, kind="spectator")
    client.wait(lambda: client.ended)
    assert "kind 'spectator', known: prompt, completion, normal, client" in client.ended[0]


@pytest.mark.parametrize(
    ("server", "client"), [(SECRET, b"another secret of length"), (SECRET, None), (None, SECRET)]
)
def test_wrong_secrets_do_not_connect_and_the_client_is_told(hubs, server, client):
    endpoint, accepted = serve(hubs(server))
    handler = dial(hubs(client), endpoint)
    handler.wait(lambda: handler.ended)
    assert "secret" in handler.ended[0] and not accepted
    good = dial(hubs(server), endpoint)  # and others still can
    good.wait(lambda: good.channel)


def test_a_client_that_knows_the_server_but_has_another_key_is_not_let_in(hubs):
    endpoint, accepted = serve(hubs(SECRET))
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.linger = 0
        s.curve_serverkey = Security(SECRET).keys[0]
        s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
        monitor = s.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        s.connect(endpoint)
        assert monitor.poll(5000)
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        s.disable_monitor()
    assert not accepted


def test_nobody_there(hubs):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    client = dial(hubs(), f"tcp://127.0.0.1:{port}")
    client.wait(lambda: client.ended)
    assert "nobody listens" in client.ended[0]


@pytest.mark.parametrize(
    "endpoint", ["-", "tcp://no-such-host.invalid:1", "tcp://127.0.0.1:99999999", ""]
)
def test_an_address_that_is_none(hubs, endpoint):
    client = dial(hubs(), endpoint)
    client.wait(lambda: client.ended)
    assert client.channel is None


def test_a_listener_that_never_answers(hubs):
    with socket.create_server(("127.0.0.1", 0)) as s:
        client = dial(hubs(), f"tcp://127.0.0.1:{s.getsockname()[1]}")
        client.wait(lambda: client.ended)
    assert "no answer within 1.0 s" in client.ended[0]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00" * 100,
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03" + b"\x00" * 60,
        b"\xc1" * 5000,
    ],
    ids=["nothing", "zeros", "http", "zmtp_greeting", "noise"],
)
def test_bytes_that_are_no_zeromq_hurt_nobody(hubs, garbage):
    endpoint, accepted = serve(hubs())
    with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as s:
        s.sendall(garbage)
    client = dial(hubs(), endpoint)
    client.wait(lambda: client.channel)
    assert len(accepted) == 1


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x80", b"hello", msgspec.msgpack.encode({"t": "hello"}), b"\x91" * 3000],
    ids=range(6),
)
def test_frames_that_are_no_hello_are_refused(hubs, frame):
    server = hubs()
    endpoint, accepted = serve(server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.linger = 0
        s.connect(endpoint)
        s.send(frame)
        assert s.poll(5000)
        assert isinstance(wire.decode(s.recv()), wire.Refused)
    assert not accepted and server.counters["garbage"] == 1


def test_garbage_on_an_open_channel_ends_that_channel_only(hubs):
    endpoint, accepted = serve(hubs())
    good = dial(hubs(), endpoint)
    good.wait(lambda: good.channel)
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.linger = 0
        s.connect(endpoint)
        s.send(wire.encode(wire.Hello(wire.PROTOCOL, "client", "bad")))
        assert s.poll(5000) and isinstance(wire.decode(s.recv()), wire.Welcome)
        s.send(b"\xc1garbage")
        accepted[1].wait(lambda: accepted[1].ended)
    assert "sent garbage" in accepted[1].ended[0]
    good.channel.send(wire.JobLost("still here"))
    accepted[0].wait(lambda: accepted[0].messages)


def test_an_oversized_frame_ends_the_connection(hubs):
    endpoint, accepted = serve(hubs())
    sender = hubs(config=HubConfig(heartbeat=0.05, peer_timeout=0.5))
    client = dial(sender, endpoint)
    client.wait(lambda: client.channel)
    client.channel.send(wire.JobLost("x"), [b"x" * (FAST.max_frame + 1)])
    client.wait(lambda: client.ended)
    accepted[0].wait(lambda: accepted[0].ended)
    assert not accepted[0].messages
    other = dial(hubs(), endpoint)
    other.wait(lambda: other.channel)


def test_silence_ends_a_channel_on_both_sides_and_a_late_message_is_answered(hubs):
    server = hubs()
    endpoint, accepted = serve(server)
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as s,
    ):  # a peer that sends no heartbeats
        s.linger = 0
        s.connect(endpoint)
        s.send(wire.encode(wire.Hello(wire.PROTOCOL, "client", "mute")))
        accepted_by = time.monotonic() + 5
        while not accepted and time.monotonic() < accepted_by:
            s.poll(50)
        accepted[0].wait(lambda: accepted[0].ended)
        assert accepted[0].ended == ("nothing heard for 0.5 s", False)
        s.send(wire.encode(wire.Ping()))
        reasons = []
        while len(reasons) < 2 and s.poll(5000):
            message = wire.decode(s.recv())
            if isinstance(message, wire.Refused):
                reasons.append(message.reason)
    assert reasons == [
        "nothing heard for 0.5 s",
        "this side has given up the connection: dial again",
    ]


def test_a_server_that_ends_is_noticed_at_once(hubs):
    server = hubs()
    endpoint, _ = serve(server)
    client = dial(hubs(config=HubConfig(heartbeat=10, peer_timeout=60)), endpoint)
    client.wait(lambda: client.channel)
    server.stop(0)
    client.wait(lambda: client.ended, timeout=2)


def test_a_client_that_ends_is_noticed_with_the_next_heartbeat(hubs):
    endpoint, accepted = serve(hubs())
    client_hub = hubs()
    client = dial(client_hub, endpoint)
    client.wait(lambda: client.channel)
    client_hub.stop(0)
    accepted[0].wait(lambda: accepted[0].ended, timeout=2)


@pytest.mark.parametrize("limit", [{"max_queued": 100}, {"max_queued_bytes": 10_000_000}])
def test_a_peer_that_does_not_read_is_given_up_when_its_queue_is_full(hubs, limit):
    server = hubs(config=HubConfig(heartbeat=0.05, peer_timeout=30, **limit))
    endpoint, accepted = serve(server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.linger, s.rcvhwm = 0, 1
        s.connect(endpoint)
        s.send(wire.encode(wire.Hello(wire.PROTOCOL, "client", "slow")))
        until = time.monotonic() + 5
        while not accepted and time.monotonic() < until:
            time.sleep(0.01)
        for _ in range(2000):
            accepted[0].channel.send(wire.JobLost("x"), [b"x" * 100_000])
        accepted[0].wait(lambda: accepted[0].ended)
    assert "does not read" in accepted[0].ended[0]


def test_only_loopback_without_a_secret(hubs):
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:0"):
        with pytest.raises(ValueError, match="needs a shared secret"):
            hubs().listen(endpoint, None)
    with pytest.raises(ValueError, match="at least 16 bytes and at most 65536, got 5"):
        Security(b"short")
    assert hubs(SECRET).listen("tcp://0.0.0.0:0", None).startswith("tcp://0.0.0.0:")


def test_outputs_survive_the_wire():
    logprobs = [{5: Logprob(-0.5, 1, "a"), 7: Logprob(-1.5, 2, None)}]
    output = RequestOutput(
        "r",
        None,
        [],
        [None, *logprobs],
        [CompletionOutput(0, "text", [5], -0.5, logprobs, "stop", 7)],
        True,
        RequestMetrics(1.0, 2.0),
    )
    assert wire.decode(wire.encode(wire.Result(output))).output == output
    with pytest.raises(wire.BadMessage):
        wire.decode(msgspec.msgpack.encode({"t": "result", "output": {"request_id": 5}}))


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o666, 0o601])
def test_a_secret_file_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"secret has mode 0{mode:o}: others may read it"):
        Security.from_file(path)
    for own in (0o600, 0o400, 0o640):
        path.chmod(own)
        assert Security.from_file(path).keys == Security(SECRET).keys


def test_a_handler_that_raises_loses_its_channel_and_nothing_else(hubs):
    class Broken(Handler):
        def message(self, channel, message, frames):
            raise ZeroDivisionError("a fault of this handler")

    hub, accepted = hubs(), []

    def accept(channel, hello):
        if hello.name == "unknown":
            raise AttributeError("a fault of this function")
        channel.handler = Broken() if hello.name == "broken" else Handler()
        channel.handler.channel = channel
        accepted.append(channel.handler)
        return wire.Welcome("server")

    endpoint = hub.listen("tcp://127.0.0.1:0", accept)
    hub.start()
    clients = {}
    for name in ("good", "broken", "unknown"):
        clients[name] = Handler()
        mine = hubs().start()
        mine.dial(endpoint, wire.Hello(wire.PROTOCOL, "client", name), clients[name])
        clients[name].wait(lambda name=name: clients[name].channel or clients[name].ended)
    assert "its hello cannot be handled: a fault" in clients["unknown"].ended[0]
    clients["broken"].channel.send(wire.StatusQuery())
    clients["broken"].wait(lambda: clients["broken"].ended)
    assert "its StatusQuery cannot be handled: ZeroDivisionError" in clients["broken"].ended[0]
    hub.call(lambda: 1 / 0)
    deadline = time.monotonic() + 5
    while hub.counters["faults"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    clients["good"].channel.send(wire.StatusQuery())
    accepted[0].wait(lambda: accepted[0].messages)
    assert hub.thread.is_alive()
