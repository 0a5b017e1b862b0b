"""Every failure that leaves the function it happened in, by name.

    ClusterError
    ├── RequestError            the client must change the request (4xx; never retried by this cluster)
    │   ├── MediaError          one media item cannot be used; the message names the item
    │   │   └── NoSoundError    it has no sound track
    │   ├── ContextLengthError  prompt and answer do not fit the model
    │   ├── StructureError      the structure cannot be held, or no answer can go on under it
    │   ├── QuarantinedError    422: workers were lost over this content; it is refused for a while
    │   ├── UnsupportedError    a field that this server does not implement (no field is ignored silently)
    │   └── ModelNotFoundError  404
    ├── OverloadedError         429: the client may retry after `retry_after_s`
    ├── UnavailableError        503: a worker or a peer was lost, or a deadline passed; another may succeed
    ├── OverwrittenError        503: what tokens were drawn from may have been overwritten
    ├── NotWantedError          work that was stopped because nothing waits for it; never leaves its process
    ├── ConfigError             the operator must change the configuration; raised at start only
    └── InternalError           500: a bug in this project; what another process's unknown error becomes

    BookkeepingError            a ValueError, no ClusterError: the worker that finds it is replaced

An error crosses a process as `ErrorInfo`; only `to_info` and `from_info` know the mapping. Any exception that
is not a ClusterError is a bug: the process logs it and answers with an internal error (500).
"""

from __future__ import annotations

import msgspec


class BookkeepingError(ValueError):
    """What is held differs from what is recorded as held. No request caused it: the engine that finds it
    ends, and its worker is replaced. An idle engine, which holds nothing, empties its cache instead."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on the wire."""

    kind: str  # class name of the ClusterError, or "InternalError"
    message: str
    param: str | None = None  # the request field at fault, as in OpenAI's error object
    retry_after_s: float | None = None


class ClusterError(Exception):
    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(ClusterError):
    """A bug in this project; the client cannot avoid it."""


class RequestError(ClusterError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class MediaError(RequestError):
    code = "invalid_media"


class NoSoundError(MediaError):
    """A file that is understood and has nothing to hear. Crosses a process as a MediaError."""


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class StructureError(RequestError):
    """The structure cannot be held, or no answer can go on under it."""

    code = "invalid_structure"


class QuarantinedError(RequestError):
    status = 422
    code = "quarantined"


class UnsupportedError(RequestError):
    code = "unsupported_parameter"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"


class OverloadedError(ClusterError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class UnavailableError(ClusterError):
    status = 503
    type = "server_error"
    code = "unavailable"


class OverwrittenError(ClusterError):
    """Memory that an answer was computed from was written to by another worker. Tokens drawn from it cannot
    be taken back, so only an answer that has none may go on."""

    status = 503
    code = "unavailable"


class NotWantedError(ClusterError):
    """Nothing waits for the result of this work any more. No client ever sees this error."""


class ConfigError(ClusterError):
    code = "invalid_config"


_BY_NAME: dict[str, type[ClusterError]] = {
    cls.__name__: cls
    for cls in (
        ClusterError, InternalError, RequestError, MediaError, ContextLengthError, StructureError,
        QuarantinedError, UnsupportedError, ModelNotFoundError,
        OverloadedError, UnavailableError, OverwrittenError, ConfigError,
    )
}  # fmt: skip
KINDS = tuple(_BY_NAME)  # of errors that an answer may end with


def to_info(error: BaseException) -> ErrorInfo:
    """The wire form. The text of an unexpected exception stays in this process's log, because it may contain
    internals."""
    if isinstance(error, ClusterError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME)
        return ErrorInfo(kind, error.message, error.param, error.retry_after_s)
    return ErrorInfo("InternalError", "internal error; see the server's log")


def to_known(error: BaseException) -> ClusterError:
    """The error as a client of this process may see it."""
    return error if isinstance(error, ClusterError) else from_info(to_info(error))


def from_info(info: ErrorInfo) -> ClusterError:
    return _BY_NAME.get(info.kind, InternalError)(
        info.message, param=info.param, retry_after_s=info.retry_after_s
    )
