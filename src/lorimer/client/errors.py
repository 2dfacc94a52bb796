"""What the clients raise, under the names of the official SDK.

    TinkerError
    ├── APIError
    │   ├── APIStatusError                 the server refused; ``status_code``, ``response`` and ``body`` say how
    │   │   ├── BadRequestError 400        ├── AuthenticationError 401   ├── BillingError 402
    │   │   ├── PermissionDeniedError 403  ├── NotFoundError 404         ├── ConflictError 409
    │   │   ├── UnprocessableEntityError 422   ├── RateLimitError 429    └── InternalServerError from 500
    │   ├── APIConnectionError             no answer
    │   │   └── APITimeoutError            no answer in time
    │   └── APIResponseValidationError     an answer that cannot be read
    ├── RequestFailedError                 the work was accepted and failed; ``category`` says whose fault it was
    │   └── RefusedData                    it would fail, which was seen before it was sent; a ``ValueError`` too
    └── ResultLost                         the server no longer knows the work

All are ``lorimer.errors.LorimerError`` too, and can be pickled.
"""

from typing import Any

import httpx2

from lorimer.errors import LorimerError, NoServer
from lorimer.types import RequestErrorCategory


class TinkerError(LorimerError):
    """Base of everything the clients raise on purpose, except for wrong arguments."""


class ExperimentalWarning(FutureWarning):
    """A call may change or go away in any release."""


class APIError(TinkerError):
    def __init__(self, message: str, request: httpx2.Request, *, body: object | None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIStatusError(APIError):
    status_code: int = 0

    def __init__(self, message: str, response: httpx2.Response, body: object | None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _status_error, (type(self), self.message, self.status_code, self.body, *_address(self.request))


class BadRequestError(APIStatusError):
    status_code = 400


class AuthenticationError(APIStatusError):
    status_code = 401


class BillingError(APIStatusError):
    status_code = 402


class PermissionDeniedError(APIStatusError):
    status_code = 403


class NotFoundError(APIStatusError):
    status_code = 404


class ConflictError(APIStatusError):
    status_code = 409


class UnprocessableEntityError(APIStatusError):
    status_code = 422


class RateLimitError(APIStatusError):
    status_code = 429


class InternalServerError(APIStatusError):
    pass


class APIConnectionError(APIError, NoServer):
    def __init__(self, request: httpx2.Request, message: str = "Connection error.") -> None:
        super().__init__(message, request, body=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _connection_error, (type(self), self.message, *_address(self.request))


class APITimeoutError(APIConnectionError):
    def __init__(self, request: httpx2.Request) -> None:
        super().__init__(request, "Request timed out.")


class APIResponseValidationError(APIError):
    def __init__(self, response: httpx2.Response, body: object | None, message: str | None = None) -> None:
        super().__init__(message or "The answer cannot be read.", response.request, body=body)
        self.response = response
        self.status_code = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _validation_error, (self.message, self.status_code, self.body, *_address(self.request))


class RequestFailedError(TinkerError):
    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.request_id, self.category)


class RefusedData(RequestFailedError, ValueError):
    """Data of which it can be seen here that the server would refuse them: whoever expects that catches this."""

    def __init__(
        self, message: str, request_id: str = "", category: RequestErrorCategory = RequestErrorCategory.User
    ) -> None:
        super().__init__(message, request_id, category)


class ResultLost(TinkerError):
    """The result has expired, or was never known; samples are then submitted again."""


# ── from answers ──────────────────────────────────────────────────────────────────────────────────────

_BY_STATUS: dict[int, type[APIStatusError]] = {
    kind.status_code: kind
    for kind in (
        BadRequestError,
        AuthenticationError,
        BillingError,
        PermissionDeniedError,
        NotFoundError,
        ConflictError,
        UnprocessableEntityError,
        RateLimitError,
    )
}


def status_error(response: httpx2.Response, body: object) -> APIStatusError:
    """The exception of a status; its message begins with the sentence of the server, if there is one."""
    status = response.status_code
    kind = InternalServerError if status >= 500 else _BY_STATUS.get(status, APIStatusError)
    detail = body.get("detail") if isinstance(body, dict) else None
    message = f"Error code: {status} - {detail if isinstance(detail, str) else body or response.reason_phrase}"
    return kind(message, response, body)


def no_server(base_url: str, error: Exception) -> str:
    """What to say of an address at which nothing answers, and what to do about it."""
    reason = str(error).removeprefix(f"{base_url} cannot be reached: ")
    return (
        f"no server answers at {base_url} ({reason}); start one with `lorimer serve`, or name another with --base-url "
        "or LORIMER_BASE_URL"
    )


def _address(request: httpx2.Request) -> tuple[str, str]:
    return request.method, str(request.url)


def _status_error(
    kind: type[APIStatusError], message: str, status: int, body: object, method: str, url: str
) -> APIStatusError:
    return kind(message, httpx2.Response(status, request=httpx2.Request(method, url)), body)


def _connection_error(kind: type[APIConnectionError], message: str, method: str, url: str) -> APIConnectionError:
    error = kind.__new__(kind)
    APIConnectionError.__init__(error, httpx2.Request(method, url), message)
    return error


def _validation_error(message: str, status: int, body: object, method: str, url: str) -> APIResponseValidationError:
    response = httpx2.Response(status, request=httpx2.Request(method, url))
    return APIResponseValidationError(response, body, message)
