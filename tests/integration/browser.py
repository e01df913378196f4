"""A headless Chromium driven over the DevTools protocol: enough of it to look at a report."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Page:
    """One tab. `problems` collects exceptions, console errors and failed or outside requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, 60)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load `url` in a window of that size and wait until its charts are drawn."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        for _ in range(600):
            if await self.evaluate("document.documentElement?.dataset.drawn ?? null") is not None:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the charts of {url} were never drawn: {self.problems}")

    async def screenshot(self, path: Path) -> None:
        """The whole page, beyond the window's height too."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if (number := event.get("id")) is not None:
                if not self._answers[number].done():
                    self._answers[number].set_result(event.get("result") or {"error": event.get("error")})
                continue
            self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:")):
                self.problems.append(f"request to {url}")


@contextlib.asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """A fresh browser with a fresh profile and one tab; the browser is gone when the context ends."""
    executable = find_chromium()
    assert executable is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            for _ in range(1200):
                if port_file.exists() and port_file.read_text().count("\n"):
                    break
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = await response.json()
                target = next(tab for tab in tabs if tab["type"] == "page")
                socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
