"""Chromium without a window, over its DevTools protocol: keys, files that are dropped, screenshots; and what
a page asked for and complained about.

`Chromium` is an async context manager that owns one process and one profile; each `Tab` is a session of its
own. Only loopback can be reached from it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HANG_S = 60.0
LOOK_S = 0.05
FLAGS = (
    "--headless=new", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0", "about:blank",
)  # fmt: skip
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}


class Tab:
    def __init__(self, call: Callable[..., Any], session: str):
        self._call, self._session = call, session
        self.urls: list[str] = []  # that were asked for
        self.complaints: list[str] = []  # errors of scripts, violations of the policy

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.complaints.append(params["entry"]["text"])

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._call(method, params, self._session)

    async def open(self, url: str) -> None:
        await self.do("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON. Raises RuntimeError if it throws."""
        done = await self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Waits for it to be true. Raises TimeoutError, with what the page shows."""
        try:
            async with asyncio.timeout(HANG_S):
                while not (found := await self.value(expression)):
                    await asyncio.sleep(LOOK_S)
                return found
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise TimeoutError(f"{expression}\n{shown}\n{self.complaints}") from None

    async def type(self, text: str) -> None:
        await self.do("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """`key`: of KEYS."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        common["modifiers"] = 8 if shift else 0
        await self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **common)

    async def drop(self, *files: Path) -> None:
        """Drops the files on the middle of the page."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await self.do("Input.dispatchDragEvent", type=kind, x=150, y=150, data=data)

    async def choose(self, field: str, *files: Path) -> None:
        """Chooses files in the file dialog of an input, by its selector."""
        root = (await self.do("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.do("DOM.querySelector", nodeId=root, selector=field))["nodeId"]
        await self.do("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the screen, in CSS pixels, and the colours that the person prefers."""
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.do("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.do("Page.captureScreenshot", format="png"))["data"])


class Chromium:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def __aenter__(self) -> Chromium:
        assert BINARY is not None  # tests are skipped without it
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        command = [BINARY, f"--user-data-dir={self._profile.name}", *FLAGS]
        nowhere = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*command, stdout=nowhere, stderr=nowhere)
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(await self._address(), max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._http.close()
        self._process.kill()
        await self._process.wait()
        self._profile.cleanup()

    @asynccontextmanager
    async def tab(self, width: int = 1280, height: int = 900, scheme: str = "light") -> AsyncIterator[Tab]:
        """An empty one, without what other tabs have stored."""
        context = (await self._call("Target.createBrowserContext", {}))["browserContextId"]
        options = {"url": "about:blank", "browserContextId": context}
        target = (await self._call("Target.createTarget", options))["targetId"]
        session = (await self._call("Target.attachToTarget", {"targetId": target, "flatten": True}))[
            "sessionId"
        ]
        tab = self._tabs[session] = Tab(self._call, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await tab.do(f"{domain}.enable")
        await tab.look(width, height, scheme)
        try:
            yield tab
        finally:
            del self._tabs[session]
            await self._call("Target.disposeBrowserContext", {"browserContextId": context})

    async def _address(self) -> str:
        file = Path(self._profile.name) / "DevToolsActivePort"
        async with asyncio.timeout(HANG_S):
            while not (file.exists() and len(lines := file.read_text().split()) == 2):
                await asyncio.sleep(LOOK_S)
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}"

    async def _call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps(message))
        async with asyncio.timeout(HANG_S):
            return await self._waiting[number]

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                future = self._waiting.pop(message["id"])
                if future.cancelled():
                    continue
                if "error" in message:
                    future.set_exception(RuntimeError(str(message["error"])))
                else:
                    future.set_result(message["result"])
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.on_event(message["method"], message["params"])


IS_DONE = "document.querySelector('.answer') && !document.querySelector('[aria-busy]')"
ANSWER = "[...document.querySelectorAll('.answer')].at(-1)"


@asynccontextmanager
async def page(
    url: str, model: str | None = "demo_model", width: int = 1280, height: int = 900, scheme: str = "light"
) -> AsyncIterator[Tab]:
    """The door's page in a browser of its own. Audited at its end: it has asked no other host, and neither a
    script nor the policy has complained. `model`: None if the door does not report its name yet."""
    async with Chromium() as browser, browser.tab(width, height, scheme) as tab:
        await tab.open(f"{url}/")
        if model is not None:
            await tab.until(f"document.getElementById('model').textContent === '{model}'")
        yield tab
        assert [asked for asked in tab.urls if not asked.startswith((f"{url}/", "data:"))] == []
        assert tab.complaints == []


async def ask(tab: Tab, text: str) -> None:
    """Types it and sends it; the answer has begun."""
    num_before = await tab.value("document.querySelectorAll('.answer').length")
    await tab.value("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.until(f"document.querySelectorAll('.answer').length > {num_before}")


async def answer(tab: Tab) -> str:
    """The last one, when it is complete."""
    await tab.until(IS_DONE)
    return await tab.value(f"({ANSWER}.querySelector('.text, pre, .error') ?? {ANSWER}).textContent")
