"""Which URLs may be read. Pure: names are checked but not resolved.

The resulting URL is built from the checked parts, so no later parser can find another host in it. Paths and
queries stay as written, byte for byte, because signatures cover them.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urljoin

from yarl import URL

from cluster.errors import MediaError
from cluster.media.fetch.addresses import is_global
from cluster.media.fetch.policy import DEFAULT_PORTS, FetchPolicy, lists

MAX_URL_CHARS = 8192
NOT_PUBLIC = "the address of this host is not public"
BAD_HOST = "the host of the URL is not valid"
# user names, zones and %-coded hosts do not match
_FRONT = re.compile(r"(https?)://([^/?#@%]+)(?=[/?#]|\Z)", re.I)
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label like this makes the whole host an IPv4 address


def check_url(text: str, policy: FetchPolicy) -> URL:
    """The URL to request. Raises MediaError if it may not be read; the message contains no part of the
    URL."""
    if len(text) > MAX_URL_CHARS:
        raise MediaError(f"the URL is longer than {MAX_URL_CHARS} characters")
    if not text.isprintable() or " " in text or "\\" in text:
        raise MediaError("the URL holds a space, a backslash or a control character")
    if not text.lower().startswith(("https:", "http:")):
        raise MediaError("only https: and data: URLs are accepted")
    if _FRONT.match(text) is None:
        raise MediaError(BAD_HOST)
    try:
        parsed = URL(text)
        written = URL(text, encoded=True) if text.isascii() else parsed
    except ValueError:
        raise MediaError(BAD_HOST) from None
    scheme, host, port = parsed.scheme, _host(parsed), parsed.port or 0
    default_port = DEFAULT_PORTS[scheme]
    if lists(policy.denied_hosts, host, port, None):
        raise MediaError("this host is not allowed")
    if not lists(policy.internal_hosts, host, port, default_port):
        _check_public(scheme, host, port, policy)
    authority = f"[{host}]" if ":" in host else host
    if port != default_port:
        authority += f":{port}"
    return URL.build(
        scheme=scheme,
        authority=authority,
        path=written.raw_path,
        query_string=written.raw_query_string,
        encoded=True,
    )


def redirected(url: URL, location: str | None, policy: FetchPolicy) -> URL:
    """The target of a redirect, checked like a client's own URL. Raises MediaError."""
    if not location or not location.isprintable():
        raise MediaError("the host answered with a redirect without a valid target")
    try:
        text = urljoin(str(url), location)
    except ValueError:
        raise MediaError(BAD_HOST) from None
    target = check_url(text, policy)
    if url.scheme == "https" and target.scheme != "https":
        raise MediaError("a redirect from https to http is not followed")
    return target


def is_internal(url: URL, policy: FetchPolicy) -> bool:
    """Whether the operator trusts the host of this checked URL, regardless of its address."""
    return lists(policy.internal_hosts, url.raw_host or "", url.port or 0, DEFAULT_PORTS[url.scheme])


def _host(url: URL) -> str:
    """Lower case, ASCII, without brackets: a name, or an address in canonical form. Raises MediaError."""
    host = url.raw_host or ""
    try:
        if ":" in host:
            return str(IPv6Address(host))
        if _is_address(host):
            return str(IPv4Address(host))
    except ValueError:
        raise MediaError(BAD_HOST) from None
    if _NAME.fullmatch(host) is None:
        raise MediaError(BAD_HOST)
    return host


def _is_address(host: str) -> bool:
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _check_public(scheme: str, host: str, port: int, policy: FetchPolicy) -> None:
    if scheme != "https":
        raise MediaError("only https: and data: URLs are accepted")
    if not lists(policy.allowed_hosts or ("*",), host, port, DEFAULT_PORTS[scheme]):
        raise MediaError("this host or port is not allowed")
    if not is_global(host) if _is_address(host) else "." not in host:
        raise MediaError(NOT_PUBLIC)
