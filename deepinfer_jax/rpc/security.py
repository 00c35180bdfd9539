"""Who may connect: a shared secret becomes a CURVE key pair, so that only those who know it can
speak, and nobody else can read.

Both ends derive the same key pair from the secret. A server accepts exactly that public key (ZAP),
a client exactly that server. Without a secret sockets are plain, and may only be bound to loopback
addresses.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from deepinfer_jax.rpc.endpoint import host_of, is_loopback

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 65536
TOO_WIDE = 0o027
"""Bits of a secret file's mode that must not be set."""


def read_secret_file(path: str | Path) -> bytes:
    """A file's content without surrounding white space, at most MAX_SECRET_BYTES and one.
    ValueError for a file that others may read, or that its group may change."""
    with Path(path).open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & TOO_WIDE:
            raise ValueError(
                f"the secret file {path} has mode {mode:04o}: others may read it, or its group"
                " may change it; make it 0600 (or 0640)"
            )
        return file.read(MAX_SECRET_BYTES + 1).strip()


class Security:
    """secret None: no authentication."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Raises ValueError for a short secret, RuntimeError where libzmq was built
        without CURVE."""
        self.keys: tuple[bytes, bytes] | None = None
        if secret is None:
            return
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ValueError(
                f"the shared secret must have at least {MIN_SECRET_BYTES} bytes and at most"
                f" {MAX_SECRET_BYTES}, got {len(secret)}"
            )
        if not zmq.has("curve"):
            raise RuntimeError(
                f"libzmq {zmq.zmq_version()} was built without CURVE: no shared secret can be used"
            )
        private = z85.encode(hashlib.sha256(b"deepinfer-jax control plane 1\0" + secret).digest())
        self.keys = zmq.curve_public(private), private

    @classmethod
    def from_file(cls, path: str | Path | None) -> Security:
        """The secret is the file's content without surrounding white space; None: no secret.
        ValueError for a file that others may read, or that its group may change."""
        return cls() if path is None else cls(read_secret_file(path))

    def check_bind(self, endpoint: str) -> None:
        """Raises ValueError when others than this machine could connect without a secret."""
        host = host_of(endpoint)
        if self.keys is None and not is_loopback(host):
            raise ValueError(
                f"binding to {host!r} needs a shared secret (--secret-file); without one only"
                " loopback addresses may be used"
            )

    def server(self, socket: zmq.Socket) -> None:
        if self.keys is not None:
            _authenticator(socket.context, self.keys[0])
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.keys

    def client(self, socket: zmq.Socket) -> None:
        if self.keys is not None:
            socket.curve_serverkey = self.keys[0]
            socket.curve_publickey, socket.curve_secretkey = self.keys

    @property
    def describe(self) -> str:
        """For error messages: says whether there is a secret, never which."""
        return "without a secret" if self.keys is None else "with a shared secret"


class _OneKey:
    """Accepts one client key."""

    def __init__(self, public: bytes) -> None:
        self.public = public  # z85, as the authenticator passes it

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


_authenticators: dict[zmq.Context, ThreadAuthenticator] = {}
_lock = threading.Lock()


def _authenticator(context: zmq.Context, public: bytes) -> None:
    """One per context, as ZAP demands; ends with stop_authenticator."""
    with _lock:
        if context not in _authenticators:
            auth = ThreadAuthenticator(context)
            auth.start()
            auth.configure_curve_callback(credentials_provider=_OneKey(public))
            _authenticators[context] = auth


def stop_authenticator(context: zmq.Context) -> None:
    with _lock:
        auth = _authenticators.pop(context, None)
    if auth is not None:
        auth.stop()
