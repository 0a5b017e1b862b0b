"""The entry point for doors: an item's bytes from its URL. One per process, on its event loop, which is never
blocked."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from concurrent.futures import ThreadPoolExecutor

import msgspec
from yarl import URL

from cluster.clock import Clock, SystemClock
from cluster.errors import MediaError
from cluster.media.fetch.addresses import is_global
from cluster.media.fetch.cache import ContentCache
from cluster.media.fetch.dial import Lookup, MayDial
from cluster.media.fetch.download import Downloader
from cluster.media.fetch.policy import FetchPolicy
from cluster.media.fetch.single_flight import SingleFlight
from cluster.media.fetch.urls import check_url
from cluster.media.settings import item_name
from cluster.media.sources import MediaSource, read_data_uri

INLINE_CHARS = 64 * 1024  # longer data URIs are decoded in a thread (64 Ki characters take 0.1 ms)
NUM_THREADS = 2  # for long data URIs


class FetchedMedia(msgspec.Struct, frozen=True):
    """The bytes of one item, within the requested size."""

    data: bytes
    digest: bytes  # SHA-256 of `data`


class Fetcher:
    """`lookup`, `is_public` and `tls` replace the system's resolver, the rule for addresses and the trusted
    certificates."""

    def __init__(
        self,
        policy: FetchPolicy,
        clock: Clock | None = None,
        *,
        lookup: Lookup | None = None,
        is_public: MayDial = is_global,
        tls: ssl.SSLContext | None = None,
    ):
        self._policy = policy
        self._cache = ContentCache(policy.cache_bytes, clock or SystemClock())
        self._downloader = Downloader(policy, lookup=lookup, is_public=is_public, tls=tls)
        self._flights: SingleFlight[tuple[str, str, int], FetchedMedia] = SingleFlight()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="media-bytes")

    async def read(
        self, source: MediaSource, max_bytes: int, *, item_idx: int, tenant: str = ""
    ) -> FetchedMedia:
        """Ends within the policy's `total_timeout_s`. A tenant never gets the content of another tenant's
        URL.

        Raises MediaError, which names the item, OverloadedError, or UnavailableError once closed. Cancelling
        one caller does not affect others that wait for the same URL.
        """
        url = source.url
        try:
            if url[:5].lower() != "data:":
                return await self._read_url(check_url(url, self._policy), max_bytes, tenant)
            if len(url) <= INLINE_CHARS:
                return _read_data_uri(url, max_bytes)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, _read_data_uri, url, max_bytes)
        except MediaError as error:
            name = item_name(source.modality, item_idx)
            raise MediaError(f"{name}: {error.message}", param=source.param) from error

    async def aclose(self) -> None:
        """Ends all downloads, whose callers get UnavailableError, and closes all connections. May be
        repeated."""
        await self._flights.aclose()
        await self._downloader.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read_url(self, url: URL, max_bytes: int, tenant: str) -> FetchedMedia:
        known = self._cache.get((tenant, str(url)))
        if known is not None and self._cache.is_fresh(known[0]):
            return _within(FetchedMedia(known[1], known[0].digest), max_bytes)
        key = (tenant, str(url), max_bytes)
        return await self._flights.join(key, lambda: self._download(url, max_bytes, tenant))

    async def _download(self, url: URL, max_bytes: int, tenant: str) -> FetchedMedia:
        key = (tenant, str(url))
        got = await self._downloader.get(url, max_bytes, self._cache.get(key), tenant)
        return _within(FetchedMedia(self._cache.put(key, got), got.digest), max_bytes)


def _within(media: FetchedMedia, max_bytes: int) -> FetchedMedia:
    if len(media.data) > max_bytes:
        raise MediaError(f"larger than {max_bytes} bytes")
    return media


def _read_data_uri(url: str, max_bytes: int) -> FetchedMedia:
    data = read_data_uri(url, max_bytes)
    return FetchedMedia(data, hashlib.sha256(data).digest())
