"""How KV travels between the engines of two processes: through host memory, or from device to
device where both sides have that and their shards match."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.kv.block_mover import BlockMover
from deepinfer_jax.launch.links import Exporter, HostImporter, Importer, Stager
from deepinfer_jax.rpc import messages as wire

DEVICE = "device "
"""Before the address of a transfer server, in Hello.transports."""


class PromptTransports:
    """What a prompt engine can send by."""

    def __init__(self, mover: BlockMover, name: str, device_host: str | None) -> None:
        """device_host: the address others reach this process by, where device transfers are wanted;
        None: not."""
        self._exporters: dict[str, Exporter] = {"host": Stager(mover, name)}
        self.offered = ["host"]
        if device_host is not None:
            from deepinfer_jax.launch.device_links import DeviceExporter

            self._exporters["device"] = exporter = DeviceExporter(device_host)
            self.offered.append(DEVICE + exporter.address)

    def exporter(self, transport: str) -> Exporter:
        """Raises ValueError for one that this side has not."""
        if transport not in self._exporters:
            raise ValueError(f"transport {transport!r}, this side has {sorted(self._exporters)}")
        return self._exporters[transport]


class CompletionTransports:
    """What a completion engine can receive by. timeout: seconds that a pull may take."""

    def __init__(self, mover: BlockMover, device_host: str | None, timeout: float) -> None:
        self._mover, self._timeout = mover, timeout
        self._server: Any = None
        if device_host is not None:
            from deepinfer_jax.launch.device_links import start_server

            self._server = start_server(device_host)

    def importer(self, hello: wire.Hello, ours: wire.ModelInfo) -> tuple[str, Importer]:
        """The transport of a new link, by name, and its end here."""
        offered = [t.removeprefix(DEVICE) for t in hello.transports if t.startswith(DEVICE)]
        if self._server is None or not offered or hello.model is None:
            return "host", HostImporter(self._mover)
        from deepinfer_jax.launch.device_links import DeviceImporter, compatible

        if not compatible(ours, hello.model):
            return "host", HostImporter(self._mover)
        return "device", DeviceImporter(self._server, offered[0], self._mover, self._timeout)
