"""A `Member` as Serve carries it: replica metadata is a dict of plain values. Imports no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from cluster.types.members import Member

_KEY = "member"


def encode_member(member: Member) -> dict[str, str]:
    return {_KEY: msgspec.json.encode(member).decode()}


def decode_members(metadata: Iterable[dict[str, Any]]) -> list[Member]:
    """The published members. Replicas that have not published yet are left out; a later push contains
    them."""
    return [msgspec.json.decode(entry[_KEY], type=Member) for entry in metadata if _KEY in entry]
