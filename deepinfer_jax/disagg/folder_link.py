"""Hand-over through a folder that both sides can reach: the transport that needs no network and no
common process.

    folder / source--target / {source,target}.json     who is there: name, layout, session
                            / <session> / 00000001.msg  messages of one direction, with their KV, in
                            order

Each message is one file in the format of kv/store_format.py (checksums over every byte), written
aside and renamed, read once and removed. A thread per end writes, another reads, so an engine's
steps wait for neither disk nor device. A peer is lost when it says so, when it comes back as
another session, or when its sign of life is older than `lost_after`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from deepinfer_jax.disagg.completion_engine import CompletionEngine
from deepinfer_jax.disagg.inbox import Inbox
from deepinfer_jax.disagg.layout import Layout, LayoutMismatch, check_layouts
from deepinfer_jax.disagg.messages import Link, Message, Pages, decode_body, encode_body
from deepinfer_jax.disagg.prompt_engine import PromptEngine
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.kv.store import write_parts
from deepinfer_jax.kv.store_format import encode_tensors, read_header, read_tensor

LOST_AFTER = 15.0
"""Seconds without a sign of life after which a peer counts as gone."""
SIGN_OF_LIFE = 1.0
BUSY_POLL, IDLE_POLL, BUSY_SECONDS = 0.0005, 0.005, 0.1
"""Seconds between looks for messages: shortly after one has come, and otherwise."""


class FolderHello(msgspec.Struct, frozen=True):
    """What an end says of itself. session: names its folder of messages, new in every life.
    largest_payload: blocks."""

    name: str
    session: str
    layout: Layout
    largest_payload: int


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What stands beside a message's arrays. rank: of the target, for the payload."""

    body: bytes
    rank: int = 0
    has_payload: bool = False


class FolderLink(Link):
    """One end; see `connect`. mover: of this end's engine."""

    def __init__(
        self,
        folder: Path,
        side: str,
        mover: BlockMover,
        hello: FolderHello,
        lost_after: float = LOST_AFTER,
    ) -> None:
        """Says hello. `meet` waits for the other side, `start` starts the threads."""
        self.folder, self.side, self.mover = folder, side, mover
        self.hello, self.lost_after = hello, lost_after
        self.other_side = "target" if side == "source" else "source"
        self.peer = ""
        self.inbox = Inbox()
        self._outbox: queue.SimpleQueue[tuple[Message, int] | None] = queue.SimpleQueue()
        self._closing: str | None = None
        self._own_box = folder / hello.session
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):  # what an earlier life has left
            shutil.rmtree(folder / self._read_hello(side).session)
        self._own_box.mkdir()
        _replace(self._hello_file(side), msgspec.json.encode(hello))

    def _hello_file(self, side: str) -> Path:
        return self.folder / f"{side}.json"

    def _read_hello(self, side: str) -> FolderHello:
        """Raises LayoutMismatch for a file of another version."""
        path = self._hello_file(side)
        try:
            return msgspec.json.decode(path.read_bytes(), type=FolderHello)
        except msgspec.DecodeError as error:
            raise LayoutMismatch(f"{path}: this is no hello of an engine: {error}") from error

    def meet(self, timeout: float = 60.0) -> FolderHello:
        """The other side's hello. Raises TimeoutError, LayoutMismatch."""
        limit = time.monotonic() + timeout
        while not self._hello_file(self.other_side).exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.folder}: no {self.other_side} within {timeout} s")
            time.sleep(IDLE_POLL)
        return self._read_hello(self.other_side)

    def start(self, peer_hello: FolderHello) -> None:
        self.peer, self._peer_box = peer_hello.name, self.folder / peer_hello.session
        for loop in (self._write_loop, self._read_loop):
            threading.Thread(
                target=self._contained,
                args=(loop,),
                name=f"{self.side}-{loop.__name__}",
                daemon=True,
            ).start()

    # ---- Link ------------------------------------------------------------------------------------

    def send(self, message: Message, rank: int = 0) -> None:
        if self.inbox.lost is None:
            self._outbox.put((message, rank))

    def poll(self) -> list[Message]:
        return self.inbox.take()

    def close(self, reason: str = "closed") -> None:
        if self._closing is None:
            self._closing = reason
            self._outbox.put(None)

    # ---- threads ---------------------------------------------------------------------------------

    def _contained(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            # disk full, folder removed, damaged message: for the engines the peer is gone
            self.inbox.lose(f"{self.folder}: {type(error).__name__}: {error}")

    def _write_loop(self) -> None:
        number = 0
        while True:
            try:
                item = self._outbox.get(timeout=SIGN_OF_LIFE)
            except queue.Empty:
                os.utime(self._own_box)
                continue
            if item is None:
                _replace(self._own_box / "closed", (self._closing or "").encode())
                return
            number += 1
            message, rank = item
            arrays = {} if message.payload is None else self.mover.to_host(message.payload)
            envelope = _Envelope(encode_body(message.body), rank, message.payload is not None)
            packed = base64.b64encode(msgspec.msgpack.encode(envelope)).decode()
            temp = self._own_box / f".{number}.tmp"
            write_parts(temp, encode_tensors({"message": packed}, arrays))
            # also the sign of life: it changes the folder's time
            os.replace(temp, self._own_box / f"{number:08d}.msg")

    def _read_loop(self) -> None:
        number, seen, last = 1, None, time.monotonic()
        while self._closing is None:
            path = self._peer_box / f"{number:08d}.msg"
            # before the look for a message: it is written last
            closed = (self._peer_box / "closed").exists()
            if path.exists():
                self.inbox.put(self._read(path))
                path.unlink()
                number, last = number + 1, time.monotonic()
                continue
            if closed:
                self.inbox.lose((self._peer_box / "closed").read_text())
                return
            sign = self._peer_box.stat().st_mtime_ns
            if sign != seen:
                seen, heard = sign, time.monotonic()
            elif time.monotonic() - heard > self.lost_after:
                self.inbox.lose(f"no sign of life from {self.peer} for {self.lost_after} s")
                return
            time.sleep(BUSY_POLL if time.monotonic() - last < BUSY_SECONDS else IDLE_POLL)

    def _read(self, path: Path) -> Message:
        with open(path, "rb", buffering=0) as file:
            header = read_header(file, str(path))
            packed = base64.b64decode(header.meta["message"])
            envelope = msgspec.msgpack.decode(packed, type=_Envelope)
            body = decode_body(envelope.body)
            if not envelope.has_payload or not isinstance(body, Pages):
                return Message(body)
            arrays = {name: read_tensor(file, str(path), header, name) for name in header.tensors}
        (payload,) = self.mover.from_host(arrays, envelope.rank, body.kind)
        return Message(body, payload)


def _replace(path: Path, data: bytes) -> None:
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temp.write_bytes(data)
    os.replace(temp, path)


def open_end(
    engine: PromptEngine | CompletionEngine,
    folder: str | Path,
    peer: str,
    lost_after: float = LOST_AFTER,
) -> FolderLink:
    """This engine's end of its link with `peer` (the other engine's name) in `folder`; `finish_end`
    completes it."""
    side = "source" if engine.policy.does_prefill else "target"
    names = (engine.name, peer) if side == "source" else (peer, engine.name)
    session, largest = uuid.uuid4().hex, engine.ensure_mover().buckets[-1]
    hello = FolderHello(engine.name, session, engine.layout(), largest)
    return FolderLink(
        Path(folder) / "--".join(names), side, engine.ensure_mover(), hello, lost_after
    )


def finish_end(
    engine: PromptEngine | CompletionEngine, link: FolderLink, timeout: float = 60.0
) -> FolderLink:
    """Waits for the peer, compares layouts, starts the link. Raises TimeoutError,
    LayoutMismatch."""
    other = link.meet(timeout)
    ours, theirs = link.hello, other
    layouts = (ours.layout, theirs.layout)
    check_layouts(*(layouts if link.side == "source" else layouts[::-1]))
    if ours.largest_payload != theirs.largest_payload:
        raise ValueError(
            f"payloads of up to {theirs.largest_payload} blocks there, {ours.largest_payload} here"
        )
    link.start(other)
    engine.hand_overs.connect(link)
    return link


def connect(
    source: PromptEngine, target: CompletionEngine, folder: str | Path
) -> tuple[FolderLink, FolderLink]:
    """Connects two engines of this process through a folder, as two processes would be. Returns
    (source's, target's) ends."""
    ends = open_end(source, folder, target.name), open_end(target, folder, source.name)
    return finish_end(source, ends[0]), finish_end(target, ends[1])
