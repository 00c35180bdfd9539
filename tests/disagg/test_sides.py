"""One side of a hand-over at a time: what it sends and asks of its engine for each message."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepinfer_jax.disagg.messages import (
    Ack,
    Cancel,
    Deliver,
    Failed,
    Granted,
    Message,
    Pages,
    Reserve,
    Segment,
)
from deepinfer_jax.disagg.protocol import HandoffConfig, HandoffState
from deepinfer_jax.disagg.receiver import Receiver
from deepinfer_jax.disagg.sender import Sender
from deepinfer_jax.engine.request_state import RequestState
from deepinfer_jax.scheduler.routing.ids import AttemptId

ATTEMPT = AttemptId("a", 0, 1)
FIRST = ATTEMPT.handoff(1)
STATE = RequestState(request_id="a", prompt_token_ids=[1, 2, 3], params={}, seed=0)


class Peer:
    """A link whose other end is the test."""

    def __init__(self, name: str) -> None:
        self.peer, self.arrived, self.sent = name, [], []

    def poll(self) -> list[Message]:
        messages, self.arrived = self.arrived, []
        return messages

    def send(self, message: Message, rank: int = 0) -> None:
        self.sent.append(message.body)

    def close(self, reason: str = "closed") -> None:
        raise AssertionError(reason)


class Prompts:
    """SourcePort and Placement in one: notes what becomes of the request."""

    def __init__(self, pages: int) -> None:
        self.pages, self.forgotten, self.taken, self.released = pages, [], [], []

    def ready_pages(self, attempt) -> int:
        return self.pages

    def send_payloads(self, link, kind, ranges) -> None:
        for r in ranges:
            link.sent.append((kind, r.first, r.count))

    def forget(self, attempt, error) -> None:
        self.forgotten.append(error)

    def assign_decode(self, attempt, exclude) -> str:
        return "D"

    def release_decode(self, attempt, target) -> None:
        self.released.append(target)

    def handed_over(self, attempt, target) -> None:
        self.taken.append(target)


class Decodes:
    """TargetPort: notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def reserve(self, handoff, request, pages, states) -> int:
        return 3

    def write(self, kind, payload, segments) -> None:
        self.calls.append(("write", kind))

    def enqueue(self, handoff, state) -> bool:
        self.calls.append(("enqueue", handoff))
        return True

    def release(self, handoff) -> None:
        self.calls.append(("release", handoff))

    def abort(self, handoff) -> None:
        self.calls.append(("abort", handoff))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source():
    port, peer, clock = Prompts(pages=2), Peer("D"), Clock()
    sender = Sender(port, port, "P", HandoffConfig(timeout=10.0), clock)
    sender.connect(peer)
    sender.offer(ATTEMPT, STATE, pages=2)
    return SimpleNamespace(side=sender, port=port, peer=peer, clock=clock)


@pytest.fixture
def target():
    port, peer, clock = Decodes(), Peer("P"), Clock()
    receiver = Receiver(port, "D", HandoffConfig(timeout=10.0), clock)
    receiver.connect(peer)
    return SimpleNamespace(side=receiver, port=port, peer=peer, clock=clock)


def tell(world, *bodies, payload=None) -> list:
    """What the side answers to these messages."""
    world.peer.arrived += [Message(body, payload) for body in bodies]
    world.side.pump()
    sent, world.peer.sent = world.peer.sent, []
    return sent


def delivered(source) -> None:
    assert tell(source) == [Reserve(FIRST, STATE, 2, 0)]
    assert tell(source, Granted(FIRST, 0)) == [("blocks", 0, 2)]
    source.side.prefilled(ATTEMPT, STATE)
    assert tell(source) == [Deliver(FIRST, STATE)]


# ---- the sending side ----------------------------------------------------------------------------


def test_a_late_grant_of_what_was_taken_is_not_answered(source):
    """A Cancel would end the request that the other side decodes by now."""
    delivered(source)
    assert tell(source, Ack(FIRST)) == [] and source.port.taken == ["D"]
    assert tell(source, Granted(FIRST, 0)) == []
    assert source.side.counters["late"] == 1


def test_a_late_grant_of_what_nobody_wants_is_cancelled(source):
    tell(source)
    source.side.cancel(ATTEMPT, "aborted")
    assert source.peer.sent.pop() == Cancel(FIRST, "aborted")
    assert tell(source, Granted(FIRST, 0)) == [Cancel(FIRST, "no longer needed")]


@pytest.mark.parametrize("granted", [False, True])
def test_an_acknowledgement_before_anything_was_delivered_is_no_success(source, granted):
    tell(source)
    if granted:
        tell(source, Granted(FIRST, 0))
    assert tell(source, Ack(FIRST)) == []
    assert source.side.counters["duplicate"] == 1 and not source.port.forgotten
    assert ATTEMPT in source.side.outgoing and not source.port.taken


def test_an_acknowledgement_of_another_try_is_no_success(source):
    delivered(source)
    assert tell(source, Ack(ATTEMPT.handoff(2))) == []
    assert source.side.counters["late"] == 1 and not source.port.taken


def test_the_source_waits_for_progress_as_long_as_it_was_promised(source):
    delivered(source)
    source.clock.now = 9.9
    assert tell(source) == [] and source.side.counters["failed_tries"] == 0
    source.clock.now = 10.0
    (cancel,) = tell(source)
    assert isinstance(cancel, Cancel) and "no progress of the hand-over within 10.0 s" in (
        cancel.reason
    )


# ---- the receiving side --------------------------------------------------------------------------


def pages(kind: str, first: int, count: int) -> Pages:
    return Pages(kind, (Segment(FIRST, first, count, 0),))


PAYLOAD = SimpleNamespace(count=2, ready=lambda: True)


def test_what_is_incomplete_is_not_decoded(target):
    """Neither without its last page, nor without its state row, nor before it is delivered."""
    assert tell(target, Reserve(FIRST, STATE, 2, 1)) == [Granted(FIRST, 3)]
    assert tell(target, pages("blocks", 0, 1), payload=PAYLOAD) == []
    assert tell(target, Deliver(FIRST, STATE)) == []
    assert tell(target, pages("states", 0, 1), payload=PAYLOAD) == []
    assert ("enqueue", FIRST) not in target.port.calls  # a page is missing
    assert tell(target, pages("blocks", 1, 1), payload=PAYLOAD) == [Ack(FIRST)]
    assert target.port.calls[-1] == ("enqueue", FIRST)


def test_a_missing_state_row_is_waited_for(target):
    tell(target, Reserve(FIRST, STATE, 1, 1))
    assert tell(target, pages("blocks", 0, 1), payload=PAYLOAD) == []
    assert tell(target, Deliver(FIRST, STATE)) == []
    assert tell(target, pages("states", 0, 1), payload=PAYLOAD) == [Ack(FIRST)]


def test_pages_alone_are_not_decoded_before_the_state_comes(target):
    tell(target, Reserve(FIRST, STATE, 1, 0))
    assert tell(target, pages("blocks", 0, 1), payload=PAYLOAD) == []
    assert tell(target, Deliver(FIRST, STATE)) == [Ack(FIRST)]


@pytest.mark.parametrize("progress", ["pages", "deliver"])
def test_progress_moves_the_deadline_on(target, progress):
    tell(target, Reserve(FIRST, STATE, 2, 0))
    target.clock.now = 6.0
    if progress == "pages":
        tell(target, pages("blocks", 0, 1), payload=PAYLOAD)
    else:
        tell(target, Deliver(FIRST, STATE))
    target.clock.now = 15.9
    assert tell(target) == [] and target.side.num_open == 1
    target.clock.now = 16.0
    assert tell(target) == [Failed(FIRST, "no progress from P within 10.0 s", True)]
    assert target.port.calls[-1] == ("release", FIRST) and target.side.num_open == 0


def test_the_states_of_a_hand_over_move_with_its_messages(target):
    tell(target, Reserve(FIRST, STATE, 2, 0))
    handoff = target.side.incoming[FIRST].handoff
    assert handoff.state is HandoffState.RESERVED
    tell(target, pages("blocks", 0, 1), payload=PAYLOAD)
    assert handoff.state is HandoffState.SENDING


def test_cancelling_what_decodes_ends_it_and_what_waits_is_freed(target):
    tell(target, Reserve(FIRST, STATE, 1, 0))
    assert tell(target, Cancel(FIRST, "aborted")) == []
    assert target.port.calls == [("release", FIRST)]
    second = ATTEMPT.handoff(2)
    tell(target, Reserve(second, STATE, 1, 0))
    tell(target, Pages("blocks", (Segment(second, 0, 1, 0),)), payload=PAYLOAD)
    assert tell(target, Deliver(second, STATE)) == [Ack(second)]
    assert tell(target, Deliver(second, STATE)) == [Ack(second)]  # its answer was lost
    tell(target, Cancel(second, "aborted"))
    assert target.port.calls[-1] == ("abort", second)
