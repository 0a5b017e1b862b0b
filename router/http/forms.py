"""Bodies of `multipart/form-data`, as OpenAI's clients send files (RFC 7578).

A body has been read within the limits of `bodies` before it comes here, so it is parsed whole: one search for
each boundary, and the standard library's parser for the few bytes of each part's header. Pure; large bodies
are parsed on the parse thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from cluster.errors import RequestError
from router.http.bodies import MediaTypeError

FORM_TYPE = "multipart/form-data"
MAX_PARTS = 64
# Of a part's header, and of the request's Content-Type: the time to parse one grows with the square of it
MAX_HEADER_BYTES = 2048
MAX_TYPE_CHARS = 256
MAX_BOUNDARY_CHARS = 70  # RFC 2046
_Parameters = dict[str, str | tuple[str | None, str | None, str]]  # a tuple: in a character set (RFC 2231)


class Form(NamedTuple):
    """Fields whose names end in [] are lists, without it in their name."""

    fields: dict[str, str | list[str]]
    files: dict[str, bytes]  # what clients say of their names and types is not read


def parse_form(body: bytes, content_type: str) -> Form:
    """Parses a body. `content_type`: the request's header. Raises RequestError."""
    form = Form({}, {})
    for part in _parts(body, _boundary(content_type)):
        end = part.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
        if end < 0:
            raise RequestError("the form has a part without a header, or with a long one")
        header = BytesHeaderParser().parsebytes(part[:end].lstrip())
        disposition = _parameters(header, "content-disposition")
        name = _text(disposition, "name").strip()
        if not name:
            raise RequestError("the form has a part without a name")
        data = part[end + 4 :]
        key = name.removesuffix("[]")
        known = form.fields.get(key)
        if key in form.files or (known is not None and not (isinstance(known, list) and key != name)):
            raise RequestError(f"the form has {key[:64]!r} twice", param=key[:64])
        if "filename" in disposition:
            form.files[key] = data
        elif key == name:
            form.fields[key] = _decoded(data, key)
        else:
            form.fields[key] = [*(known or ()), _decoded(data, key)]
    return form


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name[:64]!r} is not UTF-8", param=name[:64]) from error


def _boundary(content_type: str) -> bytes:
    if len(content_type) > MAX_TYPE_CHARS:
        raise RequestError(f"the Content-Type is longer than {MAX_TYPE_CHARS} characters")
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != FORM_TYPE:
        raise MediaTypeError(f"the body must be {FORM_TYPE}, with the sound as its file")
    boundary = _text(_parameters(header, "content-type"), "boundary").rstrip()
    if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise RequestError(f"{FORM_TYPE} needs a boundary of up to {MAX_BOUNDARY_CHARS} characters")
    return boundary.encode()


def _parts(body: bytes, boundary: bytes) -> Iterator[bytes]:
    """Returns each part with its header. Raises RequestError."""
    delimiter = b"\r\n--" + boundary
    if body.startswith(delimiter[2:]):
        at = len(delimiter) - 2
    elif (start := body.find(delimiter)) >= 0:  # after a preamble, which has no meaning
        at = start + len(delimiter)
    else:
        raise RequestError("the form does not contain its boundary")
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return
        end = body.find(delimiter, at)
        if end < 0:
            break
        yield body[at:end]
        at = end + len(delimiter)
    else:
        raise RequestError(f"the form has more than {MAX_PARTS} parts")
    raise RequestError("the form ends before its last boundary")


def _parameters(header: Message, field: str) -> _Parameters:
    """Returns the parameters of a header field by name. Raises RequestError."""
    try:
        return {name.lower(): value for name, value in header.get_params((), field)}
    except ValueError as error:
        raise RequestError(f"the form's {field} cannot be read") from error


def _text(parameters: _Parameters, name: str) -> str:
    """Returns a parameter's text, empty if there is none. Raises RequestError for one that is not text in the
    character set that it names."""
    try:
        return collapse_rfc2231_value(parameters.get(name, ""))
    except (LookupError, ValueError) as error:  # of any codec that Python has
        raise RequestError(f"the form's {name} cannot be decoded") from error
