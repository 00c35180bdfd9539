"""Messages of a hand-over: read as they were written, refused when they are not; what a peer must
not send ends its link and nothing else."""

from __future__ import annotations

import contextlib
import logging
import random

import msgspec
import pytest
from handoff_world import World

from deepinfer_jax.disagg.inbox import Inbox
from deepinfer_jax.disagg.mesh_link import link_pair
from deepinfer_jax.disagg.messages import (
    Ack,
    BadHandoff,
    Cancel,
    Deliver,
    Failed,
    Granted,
    Message,
    Pages,
    Refusal,
    Reserve,
    Segment,
    decode_body,
    encode_body,
)
from deepinfer_jax.disagg.protocol import PeerLost
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.scheduler.routing.ids import AttemptId

ID = AttemptId("a/b#c@d", 1, 2).handoff(3)
STATE = RequestState(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    params={"max_tokens": 4},
    seed=2**63 + 1,
    output_token_ids=[5],
)
BODIES = [
    Reserve(ID, STATE, 3, 1),
    Granted(ID, 2),
    Refusal(ID, "full", True),
    Pages("blocks", (Segment(ID, 0, 2, 0), Segment(ID, 5, 1, 2))),
    Deliver(ID, STATE),
    Ack(ID),
    Cancel(ID, "aborted"),
    Failed(ID, "why", False),
]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_messages_are_read_as_they_were_written(body):
    assert decode_body(encode_body(body)) == body


def test_what_is_out_of_bounds_is_refused():
    def changed(body, **fields):
        return msgspec.msgpack.encode({**msgspec.to_builtins(body), **fields})

    ident = msgspec.to_builtins(ID)
    bad = [
        changed(BODIES[0], pages=-1),
        changed(BODIES[0], pages=1 << 31),
        changed(BODIES[0], states=2),
        changed(BODIES[0], request={"prompt_token_ids": "x"}),
        changed(BODIES[1], rank=-1),
        changed(BODIES[1], rank=1 << 16),
        changed(BODIES[3], kind="weights"),
        changed(BODIES[3], segments=[[ident, -1, 1, 0]]),
        changed(BODIES[3], segments=[[ident, 0, 0, 0]]),
        changed(BODIES[3], segments=[[ident, 0, 1, 1 << 40]]),
        changed(BODIES[3], segments=[[ident, 0, 1]]),
        changed(BODIES[5], handoff="a@1/1"),
        changed(BODIES[5], handoff=[["a", 0], 1]),
        changed(BODIES[5], t="nonsense"),
        b"",
        b"\xc1",
        b"\x91" * 100_000,
    ]
    for data in bad:
        with pytest.raises(BadHandoff):
            decode_body(data)


def test_damaged_bytes_are_a_message_or_refused_never_another_error():
    rng = random.Random(0)
    for _ in range(3000):
        data = bytearray(encode_body(rng.choice(BODIES)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(BadHandoff):
            decode_body(bytes(data))


# ---- inboxes -------------------------------------------------------------------------------------


class Interleaved(Inbox):
    """Another thread puts a message and loses the peer just when the messages have been drained."""

    def __init__(self, message):
        super().__init__()
        inbox, deque = self, type(self._messages)

        class Messages(deque):
            def __bool__(self):
                if not len(self) and inbox.lost is None:
                    inbox.put(message)
                    inbox.lose("gone")
                    return False  # what this look found
                return len(self) > 0

        self._messages = Messages()


def test_a_message_that_comes_between_the_last_look_and_the_end_is_not_lost():
    inbox = Interleaved(Message(Ack(ID)))
    assert inbox.take() == []
    assert [m.body for m in inbox.take()] == [Ack(ID)]
    with pytest.raises(PeerLost, match="gone"):
        inbox.take()


def test_messages_come_before_the_end_and_the_first_reason_counts():
    arrivals = []
    inbox = Inbox(lambda: arrivals.append(1))
    inbox.put(Message(Ack(ID)))
    inbox.lose("first")
    inbox.lose("second")
    assert len(arrivals) == 2 and len(inbox.take()) == 1
    with pytest.raises(PeerLost, match="first"):
        inbox.take()


# ---- what a peer must not send -------------------------------------------------------------------


def strangers_link(world, name):
    """A link of the test's own into an engine of the world."""
    ours, theirs = link_pair(name, "X", None)
    ours.peer, theirs.peer = name, "X"
    world.workers[name].engine.hand_overs.connect(theirs)
    return ours, theirs


class Rows:
    count = 4

    def ready(self):
        return True


def running(world):
    """A world with a request whose pages are on their way, and its hand-over's id."""
    world.add("r0", [(j % 23) + 2 for j in range(40)], 6)
    while not world.workers["C0"].engine.receiver.incoming:
        world.tick()
    (handoff,) = world.workers["C0"].engine.receiver.incoming
    return handoff


@pytest.mark.parametrize(
    "bad",
    [
        lambda h: Message(Ack(h)),
        lambda h: Message(Cancel(h, "not mine")),
        lambda h: Message(Deliver(h, STATE)),
        lambda h: Message(Pages("blocks", (Segment(h, 0, 1, 0),)), Rows()),
        lambda h: Message(Pages("blocks", (Segment(ID, 0, 1, 4),)), Rows()),
        lambda h: Message(Pages("blocks", (Segment(ID, 0, 1, 0),))),
        lambda h: Message(Reserve(h, STATE, 1, 0)),
    ],
)
def test_a_bad_message_to_a_completion_engine_ends_that_link_only(bad):
    world = World(0, prompt=1, completion=1)
    handoff = running(world)
    ours, _ = strangers_link(world, "C0")
    ours.send(bad(handoff))
    receiver = world.workers["C0"].engine.receiver
    receiver.pump()
    assert "X" not in receiver.links and receiver.counters["bad_messages"] == 1
    with pytest.raises(PeerLost, match="cannot be handled"):
        ours.poll()
    world.settle()
    assert world.results["r0"].outputs[0].finish_reason == "length"


def test_pages_beyond_what_was_reserved_end_the_link():
    world = World(0, prompt=1, completion=1)
    world.workers["C0"].engine.receiver.peer_lost("P0", "not needed")
    ours, _ = strangers_link(world, "C0")
    receiver = world.workers["C0"].engine.receiver
    request = msgspec.structs.replace(STATE, output_token_ids=[])
    ours.send(Message(Reserve(ID, request, 1, 0)))
    receiver.pump()
    assert isinstance(ours.poll()[0].body, Granted)
    ours.send(Message(Pages("blocks", (Segment(ID, 1, 1, 0),)), Rows()))
    receiver.pump()
    assert not receiver.links and not receiver.incoming and not receiver.port.reserved
    world.settle()


@pytest.mark.parametrize("bad", [Reserve(ID, STATE, 1, 0), Cancel(ID, "x"), Deliver(ID, STATE)])
def test_a_bad_message_to_a_prompt_engine_ends_that_link_only(bad):
    world = World(0, prompt=1, completion=1)
    ours, _ = strangers_link(world, "P0")
    ours.send(Message(bad))
    sender = world.workers["P0"].engine.sender
    sender.pump()
    assert list(sender.links) == ["C0"] and sender.counters["bad_messages"] == 1
    world.settle()


def test_random_messages_of_a_stranger_never_stop_an_engine():
    rng = random.Random(1)
    world = World(0, prompt=1, completion=1)
    handoff = running(world)
    for _ in range(300):
        name = rng.choice(["P0", "C0"])
        ours, _ = strangers_link(world, name)
        for _ in range(3):
            ids = rng.choice([ID, handoff, handoff._replace(number=9)])
            segment = Segment(ids, rng.randrange(9), rng.randint(1, 9), rng.randrange(5))
            body = rng.choice([*BODIES, Pages("states", (segment,)), Pages("blocks", (segment,))])
            if not isinstance(body, Pages):
                body = msgspec.structs.replace(body, handoff=ids)
            if not isinstance(body, Reserve):  # that is a good message, if its pages are right
                ours.send(Message(body, Rows() if rng.random() < 0.9 else None))
        world.workers[name].engine.hand_overs.pump()
    world.settle()
    assert world.results["r0"].outputs[0].finish_reason == "length"
