"""Domain errors, and the one table that turns them into HTTP answers and SSE events.

Code that decides raises these types and knows nothing of HTTP; only the ingress calls `to_openai`
and `to_sse`. An error of any other type is a bug of ours: it becomes a 500 without its text,
because the text may quote a prompt or a path of the server.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple


class EldrError(Exception):
    """Base of the errors that a caller may get to see.

    Attributes:
        message: text for the client: what was wrong, the value, what is accepted, what to do.
        param: the request field at fault, or None.
        retry_after_s: after how many seconds a retry makes sense, or None.
    """

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(EldrError):
    """The client sent something that no retry will make acceptable."""

    def __init__(
        self,
        param: str | None,
        message: str,
        status: int = 400,
        code: str = "invalid_value",
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


class UnknownModel(EldrError):
    """The request names a model that this application does not serve."""

    def __init__(self, model: str, served_name: str) -> None:
        super().__init__(
            f"model {model!r} is not served here: use {served_name!r}, as GET /v1/models says",
            param="model",
        )


class BodyTooLarge(EldrError):
    """The request body is over `limits.max_body_bytes`."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"the request body has {num_bytes} bytes or more, at most {max_bytes} are accepted: "
            "send a shorter prompt",
            param="body",
        )


class Unauthorized(EldrError):
    """The API key is missing or not one of ours."""

    def __init__(
        self, message: str = "missing or unknown API key: send `Authorization: Bearer KEY`"
    ) -> None:
        super().__init__(message)


class RateLimited(EldrError):
    """The key has used up its requests for now."""

    def __init__(self, requests_per_minute: int, retry_after_s: float) -> None:
        super().__init__(
            f"this key is limited to {requests_per_minute} requests a minute: "
            f"retry in {math.ceil(retry_after_s)} s",
            retry_after_s=retry_after_s,
        )


class NoPrefillReplica(EldrError):
    """No prefill replica is running and reachable."""


class NoDecodeReplica(EldrError):
    """No decode replica is running and reachable."""


class PrefillFailed(EldrError):
    """The prefill leg died or answered something unusable, after all retries."""


class DecodeFailed(EldrError):
    """The decode leg died or answered something unusable, and could not be replaced."""


class DeadlineExceeded(EldrError):
    """The request, or one phase of it, ran past its deadline."""


class ErrorKind(NamedTuple):
    """How a type of error is told to a client."""

    status: int
    type: str
    code: str


# BadRequest carries status and code itself; its row gives the type and the defaults.
ERROR_TABLE: dict[type[EldrError], ErrorKind] = {
    BadRequest: ErrorKind(400, "invalid_request_error", "invalid_value"),
    UnknownModel: ErrorKind(404, "invalid_request_error", "model_not_found"),
    BodyTooLarge: ErrorKind(413, "invalid_request_error", "body_too_large"),
    Unauthorized: ErrorKind(401, "authentication_error", "invalid_api_key"),
    RateLimited: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    NoPrefillReplica: ErrorKind(503, "service_unavailable_error", "no_prefill_replica"),
    NoDecodeReplica: ErrorKind(503, "service_unavailable_error", "no_decode_replica"),
    PrefillFailed: ErrorKind(502, "upstream_error", "prefill_failed"),
    DecodeFailed: ErrorKind(502, "upstream_error", "decode_failed"),
    DeadlineExceeded: ErrorKind(504, "timeout_error", "deadline_exceeded"),
}
INTERNAL = ErrorKind(500, "internal_error", "internal_error")
INTERNAL_MESSAGE = "internal error of the server: retry, and report the request id if it persists"


def error_kind(error: BaseException) -> ErrorKind:
    """The table row of an error, by its nearest class in the table; 500 for all others."""
    for cls in type(error).__mro__:
        if kind := ERROR_TABLE.get(cls):
            if isinstance(error, BadRequest):
                return kind._replace(status=error.status, code=error.code)
            return kind
    return INTERNAL


def to_openai(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI error body of an error."""
    kind = error_kind(error)
    if kind is INTERNAL or not isinstance(error, EldrError):
        message, param = INTERNAL_MESSAGE, None
    else:
        message, param = error.message, error.param
    body = {"message": message, "type": kind.type, "param": param, "code": kind.code}
    return kind.status, {"error": body}


def to_sse(error: BaseException) -> bytes:
    """The event that ends a stream which has already begun.

    No `[DONE]` follows it: that would tell a client that the answer is complete.
    """
    _, body = to_openai(error)
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def response_headers(error: BaseException) -> dict[str, str]:
    """HTTP headers that belong to the error: when to retry, how to authenticate."""
    headers = {}
    if isinstance(error, EldrError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers
