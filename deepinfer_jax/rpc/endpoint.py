"""Addresses: host:port as people write it, and as sockets want it."""

from __future__ import annotations

import ipaddress


def as_endpoint(address: str) -> str:
    """ "host:port" -> "tcp://host:port"; ValueError for anything else."""
    endpoint = address if address.startswith("tcp://") else f"tcp://{address}"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"an address must look like host:port, got {address!r}")
    return endpoint


def host_of(endpoint: str) -> str:
    """ "tcp://[::1]:90" -> "::1"."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
