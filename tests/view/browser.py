"""Headless Chromium for tests: a page to go to, to ask, to press keys in and to take pictures of."""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "Chromium is not installed: make test-view installs it"
PATIENCE = 60.0


class Page:
    """One tab, spoken to over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.requests: list[str] = []  # addresses that were asked for
        self.problems: list[str] = []  # errors and refusals that the console was told

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(PATIENCE):
            while True:
                message = json.loads(await self._socket.receive_str())
                self._hear(message)
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']}")
                    return message["result"]

    def _hear(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(parameters["entry"]["text"])

    async def goto(self, address: str) -> None:
        await self.send("Page.navigate", url=address)

    async def ask(self, expression: str) -> Any:
        """The value of an expression on the page; promises are awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        found = f"const found = {expression}; return found instanceof Node || found"
        tried = f"(() => {{ try {{ {found} }} catch {{ return null }} }})()"
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while not (value := await self.ask(tried)):
                    await asyncio.sleep(0.05)
                return value
        where, shown = await self.ask("location.hash"), await self.text()
        raise AssertionError(f"never true: {expression}; at {where} with {self.problems}:\n{shown[:2000]}")

    async def text(self) -> str:
        return str(await self.ask("document.body.innerText"))

    async def press(self, key: str) -> None:
        letter = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **letter)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def size(self, width: int, height: int, scale: float = 1) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> None:
        data = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(data["data"]))


@functools.cache
def _browser() -> str:
    """Start Chromium, and return the address at which it is controlled. It ends with this process."""
    assert PROGRAM is not None, MISSING
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    process = subprocess.Popen(
        [
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *(f"--user-data-dir={profile.name}", "--remote-debugging-port=0", "about:blank"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "DevTools listening on" not in (line := process.stderr.readline()):
        assert line, "Chromium ended"
    threading.Thread(target=process.stderr.read, daemon=True).start()

    def end() -> None:
        process.kill()
        process.wait()
        profile.cleanup()

    atexit.register(end)
    return line.split()[-1]


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A page of a browser that many tests share. It has storage and cookies of its own."""
    address = _browser()
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=1 << 28) as control:
        browser = Page(control)
        context = (await browser.send("Target.createBrowserContext"))["browserContextId"]
        target = await browser.send("Target.createTarget", url="about:blank", browserContextId=context)
        own = f"{address.partition('/devtools/')[0]}/devtools/page/{target['targetId']}"
        try:
            async with session.ws_connect(own, max_msg_size=1 << 28) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
        finally:
            await browser.send("Target.disposeBrowserContext", browserContextId=context)
