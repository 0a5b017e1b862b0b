"""One URL over HTTP: a GET for each hop, a check of each hop, and a hash of the body as it arrives.

Belongs to one event loop. A download has one deadline for everything, from waiting for a slot to the last
byte. It holds at most `max_bytes` of the body. A connection that is not read to the end is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import ssl
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp import hdrs
from yarl import URL

from cluster import overload
from cluster.errors import MediaError, OverloadedError
from cluster.media.fetch.cache import FOREVER, Downloaded, Known, freshness
from cluster.media.fetch.dial import Lookup, MayDial, open_session, system_lookup, was_refused
from cluster.media.fetch.policy import FetchPolicy
from cluster.media.fetch.urls import NOT_PUBLIC, is_internal, redirected
from cluster.media.slots import FairSlots

_REDIRECTS = (301, 302, 303, 307, 308)
_VALIDATORS = ((hdrs.ETAG, hdrs.IF_NONE_MATCH), (hdrs.LAST_MODIFIED, hdrs.IF_MODIFIED_SINCE))
MAX_VALIDATOR_CHARS = 256
RETRY_AFTER_S = 1.0


class Downloader:
    """`is_public`: which addresses may be dialled for a host that is not internal. Other arguments as in
    `Fetcher`."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        lookup: Lookup | None,
        is_public: MayDial,
        tls: ssl.SSLContext | None,
    ):
        self._policy = policy
        self._threads = ThreadPoolExecutor(policy.max_concurrent, thread_name_prefix="media-dns")
        self._lookup = lookup or system_lookup(self._threads)
        self._is_public = is_public
        self._tls = tls
        # the others are left for tenants whose hosts answer
        self._per_tenant = max(1, policy.max_concurrent * 3 // 4)
        self._slots = FairSlots(policy.max_concurrent, self._per_tenant)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # key: whether its hosts are trusted

    async def get(self, url: URL, max_bytes: int, known: Known | None = None, tenant: str = "") -> Downloaded:
        """`url` has passed `check_url`. If the host says that `known` is still valid, `known` is returned.

        Raises MediaError, without the item's name, or OverloadedError.
        """
        has_slot = False
        try:
            async with asyncio.timeout(self._policy.total_timeout_s), self._slots.slot(tenant):
                has_slot = True
                return await self._follow(url, max_bytes, known)
        except aiohttp.ServerTimeoutError:
            raise MediaError("the host did not answer in time") from None
        except TimeoutError:
            if not has_slot:
                num_slots, waited_s = self._policy.max_concurrent, self._policy.total_timeout_s
                text = overload.no_slot("downloads of media", waited_s, num_slots, self._per_tenant)
                raise OverloadedError(text, retry_after_s=RETRY_AFTER_S) from None
            raise MediaError(f"not received within {self._policy.total_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise MediaError(
                _explanation(error)
            ) from None  # the texts of these errors contain URLs and addresses

    async def aclose(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: URL, max_bytes: int, known: Known | None) -> Downloaded:
        allowed = FOREVER
        for _ in range(self._policy.max_redirects + 1):
            answer, content = known if known is not None and known[0].url == str(url) else (None, b"")
            conditions = () if answer is None else answer.validators
            session = self._session(is_internal(url, self._policy))
            async with session.get(url, headers=conditions, allow_redirects=False) as response:
                control = ",".join(response.headers.getall(hdrs.CACHE_CONTROL, ()))
                allowed = allowed.and_(freshness(control, response.headers.get(hdrs.AGE)))
                if response.status in _REDIRECTS:
                    url = redirected(url, response.headers.get(hdrs.LOCATION), self._policy)
                    continue
                if response.status == 304 and answer is not None and conditions:
                    return Downloaded(content, answer.digest, allowed, answer.url, conditions)
                data, digest = await _body(response, max_bytes)
                return Downloaded(data, digest, allowed, str(url), _validators(response))
        raise MediaError(f"more than {self._policy.max_redirects} redirects")

    def _session(self, is_trusted: bool) -> aiohttp.ClientSession:
        if is_trusted not in self._sessions:
            may_dial = _any_address if is_trusted else self._is_public
            self._sessions[is_trusted] = open_session(
                may_dial, self._lookup, self._policy.connect_timeout_s, self._tls
            )
        return self._sessions[is_trusted]


def _any_address(address: str) -> bool:
    return True


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bytes]:
    """The body and its SHA-256. Raises MediaError as soon as it is certain that the body cannot be used."""
    if response.status != 200:
        raise MediaError(f"the host answered with status {response.status}")
    if response.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() not in ("", "identity"):
        raise MediaError("the host sent a compressed answer")
    too_large = MediaError(f"larger than {max_bytes} bytes")
    if response.content_length is not None and response.content_length > max_bytes:
        raise too_large
    data, digest = io.BytesIO(), hashlib.sha256()
    async for chunk in response.content.iter_any():
        if data.tell() + len(chunk) > max_bytes:
            raise too_large
        data.write(chunk)
        digest.update(chunk)
    if not data.tell():
        raise MediaError("empty")
    return data.getvalue(), digest.digest()


def _validators(response: aiohttp.ClientResponse) -> tuple[tuple[str, str], ...]:
    """The header fields with which a later request asks the host whether this answer is still valid."""
    found = ((condition, response.headers.get(field, "")) for field, condition in _VALIDATORS)
    return tuple(
        (condition, value)
        for condition, value in found
        if value.isascii() and value.isprintable() and 0 < len(value) <= MAX_VALIDATOR_CHARS
    )


def _explanation(error: Exception) -> str:
    if was_refused(error):
        return NOT_PUBLIC
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return "the host's certificate cannot be verified"
        case aiohttp.ClientConnectorError():
            return "the host cannot be reached"
        case _:
            return "the host's answer is broken or ended early"
