"""The other payload transport between processes: jax.experimental.transfer pulls arrays from device
to device.

The prompt side offers each payload under a number and says it in the "pages" message; the
completion side pulls. What the library lacks is added here: it cannot cancel, a pull from a dead
peer may hang for ever and a failed one gives arrays that poison whatever reads them. So every pull
has a deadline, is looked at before it is used, and ends its link when it fails. Shards must match
one to one: both sides need the same tensor-parallel size (`compatible`).
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from deepinfer_jax.disagg.messages import PayloadKind
from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.kv.payload import Payload
from deepinfer_jax.launch.links import NetLink
from deepinfer_jax.rpc import messages as wire

CONNECT_TIMEOUT = 5.0


def start_server(host: str) -> Any:
    """A transfer server on any free port of `host`."""
    return transfer.start_transfer_server(
        jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"] * 2
    )


def compatible(ours: wire.ModelInfo, theirs: wire.ModelInfo) -> bool:
    """Whether two engines' devices can be paired shard by shard."""
    return ours.mesh.tp == theirs.mesh.tp


class DeviceExporter:
    """Prompt side. Offers stay in device memory until they are pulled: `outstanding` counts bytes
    ever offered."""

    def __init__(self, host: str) -> None:
        self._server = start_server(host)
        self.address: str = self._server.address()
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        self.sent_bytes = 0

    def put(self, link: NetLink, hand: wire.Hand, payload: Payload | None) -> None:
        if payload is not None:
            number, arrays = next(self._numbers), payload.arrays()
            self._server.await_pull(number, arrays)
            self.sent_bytes += payload.nbytes
            hand.remote = wire.Remote(number, payload.count, payload.size)
            hand.arrays = [wire.ArrayLayout("", list(x.shape), x.dtype.name) for x in arrays]
        link.channel.send(hand)


@dataclass(frozen=True)
class PulledPayload(Payload):
    """A fault of the pull ends `link`, on which it was announced. deadline: of `time.monotonic`."""

    link: NetLink | None = None
    deadline: float = 0.0

    def ready(self) -> bool:
        """True also once the link has ended: nobody will read it then, the hand-over has failed."""
        if self.link.inbox.lost is not None:
            return True
        if not super().ready():
            if time.monotonic() > self.deadline:
                self.link.close("a pull of KV did not end in time")
            return False
        try:
            # an array that failed is ready too, and says so here
            jax.block_until_ready(self.arrays())
        except Exception as error:
            self.link.close(f"a pull of KV has failed: {error}")
            return False
        return True


class DeviceImporter:
    """Completion side of one link."""

    def __init__(self, server: Any, address: str, mover: BlockMover, timeout: float) -> None:
        self._mover, self._timeout = mover, timeout
        self._connection: Any = None
        self._connected = threading.Event()

        def connect() -> None:  # may hang: it has a thread of its own
            self._connection = server.connect(address)
            self._connected.set()

        threading.Thread(target=connect, name=f"connect-{address}", daemon=True).start()

    def take(
        self, hand: wire.Hand, kind: PayloadKind, frames: Sequence[Any], link: NetLink
    ) -> Payload:
        if hand.remote is None or hand.rank >= self._mover.ranks:
            raise ValueError(f"no payload to pull for rank {hand.rank} of {self._mover.ranks}")
        if not self._connected.wait(CONNECT_TIMEOUT):
            raise ValueError(f"no connection to the transfer server within {CONNECT_TIMEOUT} s")
        mover, count, size = self._mover, hand.remote.count, hand.remote.size
        if not 0 < count <= size or size not in mover.buckets or kind not in mover.kinds:
            raise ValueError(
                f"{count} of {size} {kind}; this side's buckets are {mover.buckets}, its kinds"
                f" {mover.kinds}"
            )
        devices, specs = (
            mover.device_row(hand.rank),
            sorted(mover.specs[kind], key=lambda s: s.name),
        )
        order = [
            (s, i, t)
            for s in specs
            for i in range(mover.num_arrays(s))
            for t in range(len(devices))
        ]
        wanted = [(mover.shard_shape(kind, s, size), np.dtype(s.dtype).name) for s, _, _ in order]
        given = [(tuple(a.shape), a.dtype) for a in hand.arrays]
        if given != wanted:
            raise ValueError(
                f"a payload of {len(given)} arrays such as {given[:1]}, expected {len(wanted)} such"
                f" as {wanted[:1]}"
            )
        structs = [
            jax.ShapeDtypeStruct(shape, s.dtype, sharding=SingleDeviceSharding(devices[t]))
            for (s, _, t), (shape, _) in zip(order, wanted, strict=True)
        ]
        arrays = iter(self._connection.pull(hand.remote.number, structs))
        pieces = {
            s.name: tuple(
                tuple((next(arrays),) for _ in devices) for _ in range(mover.num_arrays(s))
            )
            for s in specs
        }
        deadline = time.monotonic() + self._timeout
        return PulledPayload(kind, hand.rank, count, size, pieces, link, deadline)
