"""API keys as an operator keeps them: how a key is made, and the file that lists the keys of a cluster.

The file is a list in YAML or JSON, one entry for each key:

    - {name: al, hash: "sha256:…", requests_per_minute: 60, tokens_per_minute: 9000, concurrent_requests: 4}
    - {name: bob, hash: "sha256:…"}
    - {name: prometheus, hash: "sha256:…", admin: true}

A name is a tenant. Two keys of one name are one tenant, so that a key can be replaced while both are valid.
The file has no key, only SHA-256 of each. A slow hash would protect keys that can be guessed; these have 256
random bits, and a slow hash would delay every request. Pure functions, but for the one that reads the file;
any thread may call them.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Annotated

import msgspec

from cluster.errors import ConfigError

MAX_FILE_BYTES = 4 << 20
PREFIX = "sk-epdg-"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_RANDOM_BYTES = 32

PerMinute = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class KeyLimits(msgspec.Struct, frozen=True):
    """What a tenant may do at one door. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    concurrent_requests: int | None = None


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a key file."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]  # the tenant
    hash: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    admin: bool = False  # for the paths of operators, and for them alone
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrent_requests: PerMinute | None = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    def line(self) -> str:
        """The line of this key in a file, without limits."""
        admin = ", admin: true" if self.admin else ""
        return f'- {{name: {self.name}, hash: "{self.hash}"{admin}}}'

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def key_entry(name: str, key: str, *, admin: bool = False) -> ApiKey:
    """The entry of a key that is valid without limits. Raises ConfigError for a name that a file could not
    have."""
    entry = {"name": name, "hash": f"sha256:{key_digest(key_bytes(key)).hex()}", "admin": admin}
    try:
        return msgspec.convert(entry, ApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name[:64]!r} cannot be the name of a key: {error}") from error


def key_bytes(key: str) -> bytes:
    """The key as a client sends it. `key`: from this process's arguments or environment."""
    return key.encode(errors="surrogateescape")


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Blocks. Raises ConfigError, with one line that has no part of a key."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        keys = msgspec.yaml.decode(content, type=list[ApiKey] | None) or []
    except msgspec.DecodeError as error:  # of its text or of its values
        raise ConfigError(f"the key file {path}: {' '.join(str(error).split())}") from error
    check_keys(keys, str(path))
    return tuple(keys)


def check_keys(keys: list[ApiKey], source: str) -> None:
    """Whether each key is there once, and all keys of a name may do the same. Raises ConfigError."""
    of_name: dict[str, ApiKey] = {}
    for number, key in enumerate(keys, 1):
        first = of_name.setdefault(key.name, key)
        if (first.limits, first.admin) != (key.limits, key.admin):
            raise ConfigError(
                f"{source}: the keys of '{key.name}' differ in what they may do (entry {number})"
            )
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"{source}: one key is listed twice")
