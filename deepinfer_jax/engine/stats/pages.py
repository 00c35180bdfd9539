"""A few pages over HTTP, for probes and scrapers: what a stranger sends can neither hold the server
nor fill the process with threads."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content-Type of Prometheus' text format."""
MAX_CONNECTIONS = 16
"""Served at a time, one thread each; more are closed at once."""
READ_SECONDS = 5.0
"""Seconds of silence of a client, after which its connection is closed."""
CONNECTION_SECONDS = 15.0
"""Seconds a connection may live, whatever it sends."""


@dataclass(frozen=True)
class Page:
    """kind: its Content-Type."""

    text: str
    kind: str = "text/plain"
    code: int = 200


NO_PAGE = Page("no such page", code=404)


class PageServer(ThreadingHTTPServer):
    """Serves GET on a daemon thread from the moment it is made."""

    daemon_threads = True
    block_on_close = False  # a stranger's connection does not hold up the end

    def __init__(self, host: str, port: int, answer: Callable[[str], Page]) -> None:
        """answer: the page of a path, called from several threads. port 0 takes any free one.
        OSError, naming the address, if it cannot be bound."""
        self.answer = answer
        self._open: dict[socket.socket, float] = {}  # since when
        self._guard = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(error.errno, f"port {port} on {host}: {error.strerror}") from error
        threading.Thread(target=self.serve_forever, name=f"http-{port}", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    # ---- connections (names of socketserver) -----------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Between two connections: ends those that have lived too long; their threads see it."""
        limit = time.monotonic() - CONNECTION_SECONDS
        with self._guard:
            old = [connection for connection, since in self._open.items() if since < limit]
        for connection in old:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("http: a connection of %s has ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        page = self.server.answer(self.path)
        data = page.text.encode()
        self.send_response(page.code)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: a probe comes every few seconds."""
