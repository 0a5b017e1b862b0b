"""Which requests may pass, and as which tenant: API keys, paths without a key, limits.

* Without keys any program may call the API, and web pages as far as `pages` lets them. The tenant is a digest
  of the Authorization header.
* With keys a request needs one of them (401). The tenant is the key's name, and its limits hold (429). Paths
  of operators need a key with `admin: true`, which opens nothing else (403).
* `OPEN_PATHS` and the page never need a key. A path that is not named here needs one.

The keys come from a file and from the environment. The file is looked at by the first request after
`LOOK_PERIOD_S`, on a thread; requests wait for that at most `LOOK_TIMEOUT_S`, so a key that was taken out of
the file is refused from then on. If the file cannot be used, the keys stay as they were, and the log says so.

A key is found by a digest with a secret of this process: how long that takes says nothing about how much of a
key is right. Limits and their state belong to the door's event loop, and hold for this door alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.clock import Clock, SystemClock
from cluster.config.environment import Environment
from cluster.config.keys import ApiKey, check_keys, key_digest, key_entry, read_key_file
from cluster.config.settings import AccessArgs
from cluster.errors import ConfigError, RequestError
from router.http.pages import check_page
from router.http.rates import Permit, TenantUse
from router.page.site import is_public

log = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/health", "/ready", "/openapi.json"})
METRICS_PATH = "/metrics"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({METRICS_PATH, LOAD_PATH, UNLOAD_PATH})
LOOK_PERIOD_S = 1.0
_CANCEL_PATH = re.compile(r"/v1/responses/[^/]+/cancel")
LOOK_TIMEOUT_S = 1.0  # after this time requests no longer wait for a look that has begun
ENVIRONMENT_NAME = "default"  # tenant of EPDG_API_KEY
ADMIN_NAME = "admin"  # … of EPDG_ADMIN_KEY

_Stamp = tuple[int, ...]


class InvalidKeyError(RequestError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    status = 403
    code = "insufficient_permissions"


class KeyFile:
    """Where keys are listed. Its calls block."""

    def __init__(self, path: Path):
        self._path = path

    def stamp(self) -> _Stamp:
        """Changes when the list does. Raises OSError."""
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

    def read(self) -> tuple[ApiKey, ...]:
        """Raises ConfigError."""
        return read_key_file(self._path)


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, source: KeyFile | None, own: Sequence[ApiKey], clock: Clock):
        """Reads the keys. `own`: keys of the environment, which no file takes away. Blocks. Raises
        ConfigError."""
        self._source = source
        self._own = tuple(own)
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}
        self._uses: dict[str, TenantUse] = {}  # of tenants with limits
        self._stamp: _Stamp | None = None
        self._looked_at = clock.now()
        self._look: asyncio.Future[tuple[_Stamp, Sequence[ApiKey] | None]] | None = None
        self.is_stale = False  # the file has changed and cannot be used
        if source is not None:
            try:
                self._stamp = source.stamp()
            except OSError as error:
                raise ConfigError(
                    f"cannot read the key file: {error}", param="door.access.key_file"
                ) from error
        self._use(source.read() if source is not None else ())

    @property
    def guards_api(self) -> bool:
        """Whether the API needs a key. A file without any key guards it, too."""
        return self._source is not None or any(not key.admin for key in self._own)

    @property
    def guards_admin(self) -> bool:
        return self._source is not None or bool(self._own)

    def find(self, key: bytes) -> ApiKey | None:
        return self._keys.get(self._index(key_digest(key)))

    def use_of(self, key: ApiKey) -> TenantUse | None:
        return self._uses.get(key.name)

    async def refresh(self) -> None:
        """Takes over a change of the file. At most one look at it is under way."""
        if self._source is None:
            return
        now = self._clock.now()
        if self._look is None:
            if now < self._looked_at + LOOK_PERIOD_S:
                return
            self._looked_at = now
            self._look = asyncio.ensure_future(asyncio.to_thread(_look_at, self._source, self._stamp))
            self._look.add_done_callback(self._take_over)
        if (left_s := self._looked_at + LOOK_TIMEOUT_S - now) > 0:
            await asyncio.wait((self._look,), timeout=left_s)

    def _take_over(self, look: asyncio.Future[tuple[_Stamp, Sequence[ApiKey] | None]]) -> None:
        self._look = None
        if look.cancelled():
            return
        error = look.exception()
        if error is None:
            stamp, keys = look.result()
            if keys is None:
                self.is_stale = False
                return
            try:
                self._use(keys)
            except ConfigError as conflict:
                error = conflict
            else:
                self._stamp, self.is_stale = stamp, False
                log.warning("the key file has changed: %d keys are valid", len(self._keys))
        if error is not None:
            if not self.is_stale:
                log.error("the keys stay as they were: the key file cannot be used: %s", error)
            self.is_stale = True

    def _use(self, keys: Sequence[ApiKey]) -> None:
        """Raises ConfigError; then nothing has changed."""
        valid = [*keys, *self._own]
        check_keys(valid, "the key file and the environment")
        self._keys = {self._index(key.digest): key for key in valid}
        limits = {key.name: key.limits for key in valid if any(msgspec.structs.astuple(key.limits))}
        for name, own in limits.items():
            if name in self._uses:
                self._uses[name].change(own)
        self._uses = {
            name: self._uses.get(name) or TenantUse(name, own, self._clock) for name, own in limits.items()
        }

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


class Access:
    """The rules of a door for its clients."""

    def __init__(self, keys: KeyRing, *, public_metrics: bool = False, cors_origins: Sequence[str] = ()):
        self.keys = keys
        self.cors_origins = tuple(cors_origins)
        self._public_metrics = public_metrics

    @classmethod
    def load(cls, args: AccessArgs, environment: Environment, clock: Clock | None = None) -> Access:
        """Blocks. Raises ConfigError."""
        own: list[ApiKey] = []
        if environment.api_key:
            own.append(key_entry(ENVIRONMENT_NAME, environment.api_key))
        if environment.admin_key:
            own.append(key_entry(ADMIN_NAME, environment.admin_key, admin=True))
        source = KeyFile(Path(args.key_file)) if args.key_file else None
        ring = KeyRing(source, own, clock or SystemClock())
        return cls(ring, public_metrics=args.public_metrics, cors_origins=args.cors_origins)

    async def admit(self, scope: Scope) -> Permit:
        """Raises InvalidKeyError, ForbiddenError, ForeignPageError or RateLimitError."""
        headers = Headers(scope=scope)
        given = _credentials(headers)
        path = _route_path(scope)
        if not self.needs_key(path):
            check_page(scope["method"], headers, self.cors_origins)
            return Permit(_digest_of(given))
        await self.keys.refresh()
        key = self._find(given)
        is_admin = path in ADMIN_PATHS
        if key.admin is not is_admin:
            needed = "an admin key" if is_admin else "a key that is no admin key"
            raise ForbiddenError(f"this path needs {needed}")
        # to ask about answers and to end them costs no limit
        asks_for_answer = scope["method"] == "POST" and not _CANCEL_PATH.fullmatch(path)
        use = self.keys.use_of(key) if asks_for_answer else None
        return Permit(key.name) if use is None else use.begin()

    def needs_key(self, path: str) -> bool:
        if path in ADMIN_PATHS:
            return self.keys.guards_admin and not (path == METRICS_PATH and self._public_metrics)
        return self.keys.guards_api and path not in OPEN_PATHS and not is_public(path)

    def _find(self, given: str) -> ApiKey:
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("no API key was sent; send the header 'Authorization: Bearer KEY'")
        found = self.keys.find(key.strip().encode("latin-1"))  # as Headers has decoded it
        if found is None:
            raise InvalidKeyError("the API key is not valid")
        return found


def _look_at(source: KeyFile, known: _Stamp | None) -> tuple[_Stamp, Sequence[ApiKey] | None]:
    """Reads the list of keys; None if it is as it was. Blocks. The stamp is older than what is read, so a
    change between the two is seen by the next look."""
    stamp = source.stamp()
    return stamp, None if stamp == known else source.read()


def _route_path(scope: Scope) -> str:
    """Returns the path as the router sees it, without the prefix of the application."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _credentials(headers: Headers) -> str:
    """Returns the credentials as the Authorization header has them. Clients of Anthropic's API may send a key
    in a header of its own."""
    given = headers.get("authorization", "")
    return f"Bearer {key}" if not given and (key := headers.get("x-api-key")) else given


def _digest_of(header: str) -> str:
    """Returns a digest from which a key cannot be recovered."""
    return hashlib.sha256(header.encode()).hexdigest()[:32] if header else ""
