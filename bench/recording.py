"""The page at work, as the README shows it: a moving picture and a still, both from one session with a
running cluster.

    python -m bench.recording --url http://127.0.0.1:8000 --out docs/images

An image is dropped and asked about, then asked for as JSON under a schema and through a call of a tool; a
sound is dropped and written down. Needs Chromium. The answers are the model's own; they come faster than in
the picture, in which each is shown for a while.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

from PIL import Image

from bench import EXAMPLES, REPOSITORY
from bench.arguments import parser_of
from bench.chromium import Tab, answer, ask, page

WIDTH, HEIGHT = 1180, 760
FRAME_S = 0.25
SHOWN_S = 2.5  # an answer that is complete
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"type": "string"}, "color": {"type": "string"}},
    "required": ["shape", "color"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "turn_light",
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string"}},
            "required": ["color"],
        },
    },
}


class Recording:
    """Frames of a tab, while `watch` runs."""

    def __init__(self, tab: Tab):
        self._tab = tab
        self.frames: list[Image.Image] = []
        self.durations_ms: list[int] = []

    async def watch(self) -> None:
        while True:
            await self._add(FRAME_S)
            await asyncio.sleep(FRAME_S)

    async def hold(self) -> None:
        await self._add(SHOWN_S)

    async def _add(self, seconds: float) -> None:
        frame = Image.open(io.BytesIO(await self._tab.screenshot())).convert("RGB")
        if self.frames and frame.tobytes() == self.frames[-1].tobytes():
            self.durations_ms[-1] += round(1000 * seconds)
            return
        self.frames.append(frame)
        self.durations_ms.append(round(1000 * seconds))

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        options = {"duration": self.durations_ms, "loop": 0, "lossless": True, "method": 6}
        first.save(path, save_all=True, append_images=rest, **options)


async def show(tab: Tab, recording: Recording, question: str, *, file: str = "", **fields: object) -> None:
    """A new conversation about a file, or the next question of the last one. `fields`: of the request;
    `schema` has a place of its own on the page."""
    schema = fields.pop("schema", None)
    if file:
        await tab.value("document.getElementById('clear').click()")
        await tab.drop(EXAMPLES / file)
        await tab.until("document.querySelectorAll('#attachments li').length === 1")
    await tab.value(f"document.querySelector('details').open = {json.dumps(bool(schema or fields))}")
    for name, value in (("schema", schema), ("fields", fields)):
        text = json.dumps(value, indent=1) if value else ""
        await tab.value(f"document.getElementById('{name}').value = {json.dumps(text)}")
    await ask(tab, question)
    print(f"{question} → {await answer(tab)}")
    await recording.hold()


async def record(url: str, out: Path) -> None:
    async with page(url, None, WIDTH, HEIGHT) as tab:
        recording = Recording(tab)
        watching = asyncio.ensure_future(recording.watch())
        await show(tab, recording, "What's in this picture?", file="red_circle.png")
        await show(tab, recording, "Is it blue?")
        await show(tab, recording, "Describe the image as JSON.", file="blue_triangle.jpg", schema=SCHEMA)
        light = "Turn the light to the color of the shape."
        await show(tab, recording, light, file="red_circle.png", tools=[TOOL])
        await show(tab, recording, "Which way does it move?", file="moving_right.mp4")
        await show(tab, recording, "What was said?", file="three_words.wav")
        watching.cancel()
        await asyncio.wait([watching])
        (out / "page.png").write_bytes(await tab.screenshot())
    recording.save(out / "page.webp")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images")
    arguments = parser.parse_args()
    asyncio.run(record(arguments.url, arguments.out))


if __name__ == "__main__":
    main()
