"""Routes of the page. Its files are read once, when the API is built; no request touches the disk. Every
answer forbids scripts, styles and connections that are not this server's own. Runs on the door's event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
FOLDER = "/page/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Media are shown from data URIs, which can neither run nor load anything. `trusted-types 'none'` turns every
# attempt to make markup out of a string into an error.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "media-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asks with the ETag each time, so a new release is seen at once
}


def is_public(path: str) -> bool:
    """Whether a path is the page's own: it is served without an API key."""
    return path == "/" or path.startswith(FOLDER)


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


def read_static() -> dict[str, StaticFile]:
    """Reads the files, by name. Blocks."""
    found = {}
    for path in STATIC.iterdir():
        if (media_type := TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.name] = StaticFile(content, media_type, etag)
    return found


class Site:
    def __init__(self, pools: Callable[[], Mapping[str, Any]]):
        """`pools`: the fields of `/pools`. Blocks."""
        self._files = read_static()
        self._pools = pools

    def mount(self, api: FastAPI) -> None:
        files = {"methods": ["GET"], "include_in_schema": False, "response_model": None}
        api.add_api_route("/", self.index, **files)
        api.add_api_route(f"{FOLDER}{{name}}", self.file, **files)
        api.add_api_route("/pools", self.pools, methods=["GET"], include_in_schema=False, response_model=None)

    async def index(self, request: Request) -> Response:
        return self._answer(request, self._files[INDEX])

    async def file(self, request: Request, name: str) -> Response:
        if (file := self._files.get(name)) is None:
            raise HTTPException(404)
        return self._answer(request, file)

    async def pools(self) -> Response:
        return Response(
            msgspec.json.encode(self._pools()),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )

    def _answer(self, request: Request, file: StaticFile) -> Response:
        headers = {**HEADERS, "etag": file.etag}
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)
