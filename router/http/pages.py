"""Which web pages may make the server do something where it asks for no API key.

A browser sends some requests of any page to any address without asking it first: a form, or a body whose type
is not named. And a page can make the name of its own address mean this server (DNS rebinding): to the browser
the page then asks itself. So a request that a page makes needs to come from one of these:

* a page of an origin that `door.access.cors_origins` names;
* a page of this server, if the browser says so in a header that no page can set. Browsers do that for https
  and for loopback, which no other name can be made to mean;
* a page of this server at an address without a name, or at a name that no public name server answers.

Programs say nothing about pages, so the rule is not for them. Reading is not restricted here: a page of
another origin cannot read what it gets. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from cluster.errors import RequestError

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE = frozenset({"same-origin", "none"})  # none: the user has typed the address
# Last labels of names that are not public: RFC 6761, RFC 6762, ICANN's `internal`, services of Kubernetes
_PRIVATE_LABELS = frozenset({"localhost", "local", "internal", "svc"})


class ForeignPageError(RequestError):
    status = 403
    code = "foreign_page"


def check_page(method: str, headers: Headers, allowed_origins: Collection[str]) -> None:
    """Raises ForeignPageError."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if method in _READING or (origin is None and site is None) or site in _OWN_SITE:
        return
    if "*" in allowed_origins or origin in allowed_origins:
        return
    if origin is not None and site is None and _is_own(origin, headers.get("host", "")):
        return
    raise ForeignPageError(
        f"web pages of {(origin or 'other sites')[:200]} may not call this server; name the origin in "
        "door.access.cors_origins, or use API keys"
    )


def _is_own(origin: str, host: str) -> bool:
    """Whether the page is one of `host`, whose name only this network can resolve."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return parts.netloc.lower() == host.lower() and (_is_address(name) or _is_private(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_private(name: str) -> bool:
    first, *others = name.rstrip(".").split(".")
    return bool(first) and (not others or others[-1] in _PRIVATE_LABELS)
