"""Headless Chromium for tests: a page to go to, to ask, to press keys in and to take pictures of."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
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


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    assert PROGRAM is not None, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(PATIENCE):
                while b"DevTools listening on" not in (line := await process.stderr.readline()):
                    assert line, "Chromium ended"
            port = line.decode().split("127.0.0.1:")[1].split("/")[0]
            draining = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    target = next(each for each in await answer.json() if each["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.send(f"{domain}.enable")
                    yield page
        finally:
            process.kill()
            await process.wait()
            await draining
