"""Links between processes: payloads arrive as they were, and what is no payload of this engine ends
that link and nothing else."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time

import msgspec
import numpy as np
import pytest
from fake_runner import fake_runner
from wire_handler import FAST, Handler

from deepinfer_jax.disagg.messages import Ack, Message, Pages, Segment, encode_body
from deepinfer_jax.disagg.protocol import PeerLost
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.launch.links import HostImporter, NetLink, Stager
from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.hub import Hub
from deepinfer_jax.scheduler.routing.ids import AttemptId

ID = AttemptId("a", 0, 1).handoff(1)
PAGES = Pages("blocks", (Segment(ID, 0, 2, 0),))


@pytest.fixture(scope="module")
def mover():
    return BlockMover(fake_runner(seed=3), (1, 2, 4))


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Ends:
    """A completion engine's hub that accepts links, and a prompt engine's raw channels to it."""

    def __init__(self, mover):
        self.links, self.hubs = [], [Hub("target", config=FAST), Hub("source", config=FAST)]

        def accept(channel, hello):
            channel.handler = NetLink(hello.name, channel, lambda: None, None, HostImporter(mover))
            self.links.append(channel.handler)
            return wire.Welcome("target")

        self.endpoint = self.hubs[0].listen("tcp://127.0.0.1:0", accept)
        for hub in self.hubs:
            hub.start()

    def dial(self):
        """(the prompt side's channel, the completion side's link)."""
        handler = Handler()
        self.hubs[1].dial(self.endpoint, wire.Hello(wire.PROTOCOL, "prompt", "P"), handler)
        handler.wait(lambda: handler.channel)
        return handler.channel, self.links[-1]

    def close(self):
        for hub in self.hubs:
            hub.stop(0)


@pytest.fixture
def ends(mover):
    e = Ends(mover)
    yield e
    e.close()


def poll(link, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if messages := link.poll():
            return messages
        time.sleep(0.001)
    raise AssertionError("nothing came")


def staged(mover):
    """A payload of two blocks as the prompt side sends it: (hand, frames, its values)."""
    stager = Stager(mover, "test")
    ((_, payload),) = mover.gathers([[1, 3]], "blocks", 1)
    hand = wire.Hand(msgspec.Raw(encode_body(PAGES)))
    frames = stager._stage(hand, payload)
    stager.stop()
    return hand, [bytes(f) for f in frames], mover.to_host(payload)


def test_a_payload_arrives_as_it_was(ends, mover):
    hand, frames, values = staged(mover)
    channel, link = ends.dial()
    channel.send(hand, frames)
    (message,) = poll(link)
    assert message.body == PAGES and message.payload.count == 2
    message.payload.wait()
    got = mover.to_host(message.payload)
    for name, value in values.items():
        np.testing.assert_array_equal(got[name], value)


def test_closing_tells_both_ends_once(ends):
    lost = []
    channel, link = ends.dial()
    near = NetLink("target", channel, lambda: None, on_lost=lost.append)
    channel.handler = near
    near.send(Message(Ack(ID)))
    assert poll(link)[0].body == Ack(ID)
    near.close("enough")
    for end, reason in ((near, "enough"), (link, "enough")):
        with pytest.raises(PeerLost, match=reason):
            poll(end)
    near.close("again")
    assert lost == [near]


def bad_hands(hand, frames):
    a = hand.arrays
    other = [wire.ArrayLayout("nobody", x.shape, x.dtype) for x in a]
    half = [wire.ArrayLayout(x.cache, [x.shape[0], *x.shape[2:]], x.dtype) for x in a]
    flat = [wire.ArrayLayout(x.cache, [], x.dtype) for x in a]
    odd = [wire.ArrayLayout(x.cache, x.shape, "no dtype") for x in a]
    objects = [wire.ArrayLayout(x.cache, x.shape, "O") for x in a]
    endless = [wire.ArrayLayout(x.cache, [1 << 39] * 3, x.dtype) for x in a]
    replace = msgspec.structs.replace
    reserve = msgspec.msgpack.encode({"t": "reserve", "handoff": [["a", 0, 1], 1]})
    return {
        "frames missing": (hand, frames[:-1]),
        "no frames": (hand, []),
        "short frames": (hand, [f[:-4] for f in frames]),
        "another rank": (replace(hand, rank=7), frames),
        "another transport": (replace(hand, remote=wire.Remote(1, 1, 1)), frames),
        "another cache": (replace(hand, arrays=other), frames),
        "another shape": (replace(hand, arrays=half), frames),
        "no shape": (replace(hand, arrays=flat), frames),
        "no dtype": (replace(hand, arrays=odd), frames),
        "objects": (replace(hand, arrays=objects), frames),
        "endless": (replace(hand, arrays=endless), frames),
        "no arrays": (replace(hand, arrays=[]), []),
        "states": (
            replace(hand, body=msgspec.Raw(encode_body(Pages("states", PAGES.segments)))),
            frames,
        ),
        "a payload with an ack": (replace(hand, body=msgspec.Raw(encode_body(Ack(ID)))), frames),
        "half a body": (replace(hand, body=msgspec.Raw(reserve)), []),
        "no body": (replace(hand, body=msgspec.Raw(b"\x01")), []),
        "another message": (wire.StatusQuery(), []),
    }


BAD = list(bad_hands(wire.Hand(msgspec.Raw(b"\xc0"), arrays=[]), []))


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_payload_ends_that_link_only(ends, mover, name):
    hand, frames, _ = staged(mover)
    good, good_link = ends.dial()
    bad, bad_link = ends.dial()
    bad.send(*bad_hands(hand, frames)[name])
    with pytest.raises(PeerLost, match="cannot be handled"):
        poll(bad_link)
    good.send(hand, frames)
    assert poll(good_link)[0].payload.count == 2
    assert ends.hubs[0].thread.is_alive()


def test_random_hands_never_end_the_network_thread(ends, mover):
    rng = random.Random(0)
    hand, frames, _ = staged(mover)
    for _ in range(60):
        channel, _ = ends.dial()
        data = bytearray(hand.body)
        for _ in range(rng.randint(0, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        arrays = [
            wire.ArrayLayout(a.cache, [rng.choice([0, 1, 2, 1 << 30]) for _ in a.shape], a.dtype)
            for a in hand.arrays
        ]
        bad = wire.Hand(msgspec.Raw(bytes(data)), rng.choice([0, 0, 9]), arrays)
        with contextlib.suppress(msgspec.MsgspecError):
            channel.send(bad, frames[: rng.randint(0, len(frames))])
    good, link = ends.dial()
    good.send(hand, frames)
    assert poll(link)[0].payload.count == 2 and ends.hubs[0].thread.is_alive()


def test_a_payload_that_cannot_be_staged_ends_its_link_only(ends, mover, monkeypatch):
    done = threading.Event()
    channel, link = ends.dial()
    stager = Stager(mover, "test")
    near = NetLink("target", channel, lambda: None, stager, on_lost=lambda _: done.set())
    channel.handler = near
    monkeypatch.setattr(stager, "_stage", lambda hand, payload: 1 / 0)
    near.send(Message(PAGES, object()))
    with pytest.raises(PeerLost, match="cannot copy KV to the host: division by zero"):
        poll(link)
    assert done.wait(10)
    stager.stop()
