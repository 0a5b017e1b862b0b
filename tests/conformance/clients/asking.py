"""What every client is asked, and how its script tells the outcome: one line of JSON for each check.

A script runs in an environment of its own, with the URL and the model's id as its arguments. It imports
nothing of the product.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
API = f"{URL}/v1"
KEY = "unused"
PICTURE = (Path(__file__).parents[3] / "deploy" / "demo_model" / "examples" / "red_circle.png").read_bytes()
LONG = 300  # tokens that a call has room in
PICTURE_URI = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
DESCRIBE, SEEN = "Describe the image.", "The image shows a red circle."
COUNT, COUNTED = "Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."


class Shape(BaseModel):
    """A shape in an image."""

    model_config = ConfigDict(extra="forbid")  # a model that knows no tools goes on and on with other fields
    colour: Literal["red", "blue"]
    is_round: bool


def equal(got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{got!r} instead of {wanted!r}")


def a_shape(got: object) -> None:
    """Which one is the model's affair."""
    Shape.model_validate(got.model_dump() if isinstance(got, BaseModel) else got)


def run(package: str, *checks: Callable[[], Awaitable[None]]) -> None:
    """Exit status 1 if a check fails."""
    failed = 0
    for check in checks:
        error = ""
        try:
            asyncio.run(_bounded(check))
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:600]
            traceback.print_exc()
            failed = 1
        line = {"client": package, "version": version(package), "check": check.__name__, "error": error}
        print(json.dumps(line), flush=True)
    sys.exit(failed)


async def _bounded(check: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(120):
        await check()
