"""A process that behaves badly towards a port of a deployment, and prints a JSON object: bad deed
-> what it was told."""

from __future__ import annotations

import argparse
import json
import socket

import zmq

from deepinfer_jax.rpc import messages as wire
from deepinfer_jax.rpc.security import Security

NOISE = (
    b"\x00" * 200,
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff" + b"\x00" * 8 + b"\x7f\x03" + b"\xee" * 500,
    bytes(range(256)) * 256,
)
HELLO = wire.encode(wire.Hello(wire.PROTOCOL, "client", "bad"))
NEWER = wire.encode(wire.Hello(wire.PROTOCOL + 98, "client", "newer"))


def say(
    endpoint: str,
    security: Security,
    frames: list[bytes],
    then: list[bytes] | None = None,
    patience: float = 10.0,
) -> str:
    """Sends frames, then (after a welcome) more; the reason it was refused for, "nothing" after
    `patience` seconds of silence."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.linger, s.reconnect_ivl = 0, -1
        security.client(s)
        s.connect(endpoint)
        s.send_multipart(frames)
        while s.poll(1000 * patience):
            message = wire.decode(s.recv_multipart()[0])
            if isinstance(message, wire.Refused):
                return message.reason
            if isinstance(message, wire.Welcome) and then is not None:
                s.send_multipart(then)
        return "nothing"


def noise(endpoint: str, data: bytes) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as s:
        s.sendall(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--secret-file")
    parser.add_argument("--oversized", type=int, help="bytes of one frame")
    args = parser.parse_args()
    security = Security.from_file(args.secret_file)
    for data in NOISE:
        noise(args.endpoint, data)
    told = {
        "newer": say(args.endpoint, security, [NEWER]),
        "garbage": say(args.endpoint, security, [b"\xc1" * 1000]),
        "late garbage": say(args.endpoint, security, [HELLO], [b"\xc1" * 1000]),
        "no secret": say(args.endpoint, Security(), [HELLO], patience=1.0),
    }
    if args.oversized:
        too_much = [wire.encode(wire.Cancel([])), bytes(args.oversized)]
        told["oversized"] = say(args.endpoint, security, [HELLO], too_much, patience=1.0)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
