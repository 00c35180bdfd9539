"""What stands before every route: keys, sizes, how many requests at a time, counting."""

from __future__ import annotations

import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_jax.serve.context import ServerContext
from deepinfer_jax.serve.errors import ApiError, busy
from deepinfer_jax.serve.metrics import ServerMetrics

OPEN = ("/", "/health", "/version")
"""Paths that need no key: they say nothing of anybody's requests."""


class Limits:
    """A plain ASGI layer, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp, context: ServerContext, metrics: ServerMetrics) -> None:
        self._app, self._context, self._metrics = app, context, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, path = time.perf_counter(), scope["path"]
        known = path if path in _COUNTED else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = str(message["status"])
                self._metrics.requests.labels(known, status).inc()
                self._metrics.first.labels(known).observe(time.perf_counter() - started)
            await send(message)

        try:
            self._check(scope)
            receive = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, counted)
            return
        with self._metrics.live.track_inprogress():
            await self._app(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        options, headers = self._context.options, dict(scope["headers"])
        if options.api_keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            if kind.lower() != "bearer" or not key_matches(key.strip(), options.api_keys):
                raise ApiError("a valid API key is needed", status=401, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > options.max_body:
            raise _too_large(options.max_body)
        full = self._context.engine.num_completions >= options.max_requests
        if full and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            raise busy(options.max_requests)

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the body here, so that it is refused before anything holds more of it."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._context.options.max_body:
                raise _too_large(self._context.options.max_body)
            more = message.get("more_body", False)
        given = False

        async def once() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": b"".join(parts), "more_body": False}

        return once


_COUNTED = (
    "/",
    "/health",
    "/metrics",
    "/status",
    "/version",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
)


def key_matches(given: str, keys: frozenset[str]) -> bool:
    """Compares in a time that does not tell how much of a key is right."""
    return any([hmac.compare_digest(given.encode(), key.encode()) for key in keys])


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the body may have {limit} bytes", status=413)
