"""Errors as the OpenAI API reports them: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

from __future__ import annotations

import re

import msgspec

_AT = re.compile(r" - at `\$\.?([A-Za-z_0-9]*)")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_RETRY_AFTER_S = 1


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


class ApiError(Exception):
    """A request that is answered with an error.

    `status` is the HTTP status of an answer that has not begun; a stream that has begun carries the same body as an
    event. `headers` are added to the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.info = ErrorInfo(message=message, type=type, param=param, code=code)
        self.headers = headers or {}

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.info))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(limit: int, prompt_tokens: int, max_tokens: int, where: str, param: str) -> ApiError:
    """400 in OpenAI's words; `where` is `prompt` or `messages`."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {where}, {max_tokens} in the completion). "
        f"Please reduce the length of the {where} or completion."
    )
    return invalid(message, param, "context_length_exceeded")


def prompt_too_long(limit: int, prompt_tokens: str, where: str, param: str) -> ApiError:
    """400 in OpenAI's words, for a prompt that leaves no room for even one token."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your {where} resulted in {prompt_tokens} "
        f"tokens. Please reduce the length of the {where}."
    )
    return invalid(message, param, "context_length_exceeded")


def text_too_long(characters: int, limit: int, where: str) -> ApiError:
    """400 for a text that is not worth the time of tokenizing it."""
    return invalid(
        f"Your {where} resulted in a text of {characters} characters; this server tokenizes at most {limit} at once. "
        f"Please reduce the length of the {where}.",
        where,
        "context_length_exceeded",
    )


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")


def overloaded() -> ApiError:
    return ApiError(
        429,
        "The server's queue is full; retry later.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )


def too_much_received(total: int) -> ApiError:
    return ApiError(
        503,
        f"The server holds as much of large requests as it can ({total >> 20} MiB together); retry later.",
        type="service_unavailable",
        code="overloaded",
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )


def draining() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down.",
        type="service_unavailable",
        code="shutting_down",
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )


def engine_dead(reason: str) -> ApiError:
    return ApiError(500, f"The engine died: {reason}", type="server_error", code="engine_dead")


def aborted(reason: str) -> ApiError:
    return ApiError(500, f"The request was aborted: {reason}", type="server_error", code="aborted")


def from_decode_error(error: msgspec.DecodeError | UnicodeDecodeError | RecursionError) -> ApiError:
    """400 for a body that is not JSON or not of the request's types."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        match = _AT.search(text)
        missing = _MISSING.search(text)
        param = match.group(1) if match and match.group(1) else missing.group(1) if missing else None
        return invalid(text, param)
    if isinstance(error, RecursionError):
        text = "too deeply nested"
    return invalid(f"The body of the request is not valid JSON: {text}", code="invalid_json")
