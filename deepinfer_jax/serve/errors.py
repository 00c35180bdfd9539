"""Errors in the API's form: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """What a client is told. status: HTTP; param: the request's field; code: for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


RETRY_SECONDS = 1


def busy(limit: int) -> ApiError:
    """As many requests as the server takes are unfinished."""
    return ApiError(
        f"{limit} requests are being answered; try again",
        status=429,
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )
