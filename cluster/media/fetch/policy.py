"""What the operator allows the fetcher to read. Pure values."""

from __future__ import annotations

import re
from ipaddress import ip_address

import msgspec

from cluster.errors import ConfigError

DEFAULT_PORTS = {"https": 443, "http": 80}
_ENTRY = re.compile(r"(\*|(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.I)


class FetchPolicy(msgspec.Struct, frozen=True):
    """Hosts are written "example.com" (this host), "*.example.com" (all below it) or "*", with ":port" if the
    port is not the scheme's own. IPv6 addresses stand in brackets, other alphabets are written as xn--.
    Raises ConfigError for an invalid entry; the settings have checked the values.
    """

    allowed_hosts: tuple[str, ...] = ()  # empty: any; hosts must be public in both cases
    denied_hosts: tuple[str, ...] = ()  # an entry without a port: every port; overrides both other lists
    internal_hosts: tuple[str, ...] = ()  # trusted: may use http and have any address
    connect_timeout_s: float = 5.0  # for name lookup, connection and TLS of one hop
    total_timeout_s: float = 30.0  # for a whole item, including the wait for a slot
    max_redirects: int = 3
    cache_bytes: int = 256 * 2**20  # of cached contents; 0: no cache
    max_concurrent: int = 32  # simultaneous downloads; each may hold an item of the largest size in memory

    def __post_init__(self) -> None:
        for entry in (*self.allowed_hosts, *self.denied_hosts, *self.internal_hosts):
            parse_entry(entry)


def parse_entry(entry: str) -> tuple[str, int | None]:
    """Host pattern and port of a list entry. Raises ConfigError."""
    match = _ENTRY.fullmatch(entry)
    try:
        if match is None:
            raise ValueError(entry)
        host, port = match[1].lower(), int(match[2]) if match[2] else None
        if host.startswith("["):
            host = str(ip_address(host[1:-1]))
        if port is not None and not 0 < port < 65536:
            raise ValueError(entry)
    except ValueError as error:
        raise ConfigError(
            f'media fetch: "{entry}" is not a host; expected "host", "*.host" or "host:port"'
        ) from error
    return host, port


def names_host(pattern: str, host: str) -> bool:
    """Whether a parsed entry's pattern matches this host (lower case, ASCII)."""
    if pattern == "*":
        return True
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def lists(entries: tuple[str, ...], host: str, port: int, default_port: int | None) -> bool:
    """Whether one of the entries matches this host and port. An entry without a port means `default_port`, or
    any port if None."""
    for pattern, entry_port in map(parse_entry, entries):
        expected = default_port if entry_port is None else entry_port
        if names_host(pattern, host) and expected in (None, port):
            return True
    return False
