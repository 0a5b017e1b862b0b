"""Reads request bodies within limits: size, duration, number of values, and bytes of all bodies at once.

A body is checked chunk by chunk while it arrives: its size, and the number of values that it can have. So a
body is refused before it is complete in memory and before it is parsed, and costs little more than the
copying of its bytes. The bytes of a request are charged to its tenant until its answer has been sent, because
the request holds its media that long. Runs on the door's event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import AbstractContextManager

from starlette.requests import ClientDisconnect, Request

from cluster import overload
from cluster.errors import OverloadedError, RequestError
from router.http.disconnect import ClientGoneError
from router.http.limits import Limits

MIN_BYTES_PER_S = 64 << 10  # of a body that takes longer than its timeout
RETRY_AFTER_S = 5.0
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)
_PLAIN = bytes(set(range(256)) - set(b",[{\\"))
# Every body that contains media as data has one of them before the first data: a data URI, or the name of the
# field around them. They count wherever they stand: a client that wants a larger body could send a media item
# of no bytes as well, and what such a body costs is bounded by its marks and escapes
_MEDIA = (b"base64,", b'"input_audio"', b'"source"', b'"file_data"')


class BodyTooLargeError(RequestError):
    status = 413
    code = "request_too_large"


class MediaTypeError(RequestError):
    status = 415
    code = "unsupported_media_type"


class BodyTimeoutError(RequestError):
    status = 408
    code = "request_timeout"


class BodyBudget:
    """Bytes of all bodies at this door. A tenant may hold as many bytes as are still free (Choudhury and
    Hahne, "Dynamic queue length thresholds", 1998). So one tenant alone gets at most half, and there is
    always room for another tenant."""

    def __init__(self, max_bytes: int):
        self._max_bytes = self._free = max_bytes
        self._held: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        return self._held.total()

    def lease(self, tenant: str) -> BodyLease:
        return BodyLease(self, tenant)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Raises OverloadedError."""
        held, free = self._held[tenant] + num_bytes, self._free - num_bytes
        if held > free:
            raise OverloadedError(
                overload.body_bytes(held, max(0, free), self._max_bytes), retry_after_s=RETRY_AFTER_S
            )
        self._free -= num_bytes
        self._held[tenant] += num_bytes

    def free(self, tenant: str, num_bytes: int) -> None:
        self._free += num_bytes
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]


class BodyLease(AbstractContextManager):
    """The bytes of one request; a context manager that frees them."""

    def __init__(self, budget: BodyBudget, tenant: str):
        self._budget = budget
        self._tenant = tenant
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises OverloadedError."""
        if num_bytes:
            self._budget.take(self._tenant, num_bytes)
            self._num_bytes += num_bytes

    def __exit__(self, *error: object) -> None:
        if self._num_bytes:
            self._budget.free(self._tenant, self._num_bytes)
            self._num_bytes = 0


class _Scan:
    """Checks a body without parsing it."""

    def __init__(self, limits: Limits, is_json: bool):
        self._limits = limits
        self._is_json = is_json
        self._chunks: list[bytes] = []
        self._has_media = False
        self._num_marks = 0
        self._num_escapes = 0
        self.num_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Raises BodyTooLargeError."""
        limits = self._limits
        self._chunks.append(chunk)
        self.num_bytes += len(chunk)
        check_size(self.num_bytes, limits)
        if not self._is_json:
            return
        marks = chunk.translate(None, _PLAIN)
        num_escapes = marks.count(b"\\")
        self._num_escapes += num_escapes
        self._num_marks += len(marks) - num_escapes
        if self._num_marks > limits.max_marks:
            raise BodyTooLargeError(
                f"the body has more than {limits.max_marks} values (token ids, entries of log-probabilities "
                "and others); send fewer at once"
            )
        if self._num_escapes > limits.max_escapes + self.num_bytes // 32:
            raise BodyTooLargeError(f"the body has more than {limits.max_escapes} escaped characters")
        if self.num_bytes > limits.max_text_bytes and not self._has_media:
            # Once: text before the first media item is bounded like a body without media
            start = self.body()
            self._has_media = any(mark in start for mark in _MEDIA)
            if not self._has_media:
                raise BodyTooLargeError(
                    f"a body without media may have {limits.max_text_bytes} bytes at most"
                )

    def body(self) -> bytes:
        return b"".join(self._chunks)


def check_size(num_bytes: int, limits: Limits) -> None:
    if num_bytes > limits.max_body_bytes:
        raise BodyTooLargeError(f"the body is larger than {limits.max_body_bytes} bytes")


def check_json_type(request: Request) -> None:
    """Raises MediaTypeError. A request without a type may be JSON. `pages` says which web pages may send
    one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not _JSON_TYPE.fullmatch(kind):
        raise MediaTypeError(f"the type of the body is {kind[:64]!r}; send 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("the body is compressed; send it as it is, without Content-Encoding")


async def read_body(
    request: Request, limits: Limits, lease: BodyLease, timeout_s: float, *, is_json: bool
) -> bytes:
    """Reads the whole body. `is_json`: false for a form, whose file may be any bytes. Raises RequestError if
    it is too large or slow, OverloadedError if there is no room, ClientGoneError if it ends early."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        check_size(int(declared[:20]), limits)
    scan = _Scan(limits, is_json)
    started_at = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started_at + timeout_s) as deadline:
            async for chunk in request.stream():
                lease.grow(len(chunk))
                scan.add(chunk)
                deadline.reschedule(started_at + timeout_s + scan.num_bytes / MIN_BYTES_PER_S)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise BodyTimeoutError("the body did not come in time") from error
    return scan.body()
