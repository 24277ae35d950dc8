"""A page in headless Chromium that a test clicks and types in, through the DevTools protocol over a pair of pipes."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.clients.browser import command

from runtime.aio import timeout

_SECONDS = 60.0
# Chromium reads commands from descriptor 3 and answers on 4.
_WITH_PIPES = 'exec "$@" 3<&{orders} 4>&{answers}'


@dataclass
class Page:
    """An open page. `problems` are uncaught exceptions of its scripts, and errors on its console."""

    _orders: asyncio.StreamWriter
    _answers: asyncio.StreamReader
    _session: str = ""
    _last: int = 0
    problems: list[str] = field(default_factory=list)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        options = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = await self.send("Runtime.evaluate", options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until the expression is true."""
        async with timeout(_SECONDS):
            while not await self.evaluate(f"Boolean({script})"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, selector: str, text: str) -> None:
        """Types into a field, after its present text."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.send("Input.insertText", {"text": text})

    async def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await self.send("Input.dispatchKeyEvent", {"type": "keyDown", **key})
        await self.send("Input.dispatchKeyEvent", {"type": "keyUp", **key})

    async def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Chooses files in a file input, as a user does in its dialogue."""
        root = await self.send("DOM.getDocument", {})
        found = await self.send("DOM.querySelector", {"nodeId": root["root"]["nodeId"], "selector": selector})
        await self.send("DOM.setFileInputFiles", {"nodeId": found["nodeId"], "files": [str(path) for path in paths]})

    async def screenshot(self) -> bytes:
        """A picture of the page, as PNG."""
        answer = await self.send("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(answer["data"])

    async def send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Sends a command and returns its answer. Events that arrive before it are searched for problems."""
        self._last += 1
        order = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        self._orders.write(json.dumps(order).encode() + b"\0")
        async with timeout(_SECONDS):
            while (answer := json.loads((await self._answers.readuntil(b"\0"))[:-1])).get("id") != self._last:
                self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Opens a URL in a new tab."""
        target = await self.send("Target.createTarget", {"url": "about:blank"})
        attached = await self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            await self.send(f"{domain}.enable", {})
        await self.send("Page.navigate", {"url": url})
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.problems.append(str(details.get("exception", details).get("description", details)))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                self.problems.append(text)


@asynccontextmanager
async def open_page(url: str, profile: Path, size: tuple[int, int] = (1100, 720)) -> AsyncIterator[Page]:
    """A page in a new browser. Without Chromium the test is skipped, as support.clients.browser says."""
    their_orders, our_orders = os.pipe()
    our_answers, their_answers = os.pipe()
    options = ["--remote-debugging-pipe", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars"]
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", _WITH_PIPES.format(orders=their_orders, answers=their_answers), "bash"),
        *(*command(profile), *options),
        pass_fds=(their_orders, their_answers),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    for theirs in (their_orders, their_answers):
        os.close(theirs)
    page = Page(await _writer(our_orders), await _reader(our_answers))
    try:
        await page.open(url)
        yield page
    finally:
        process.kill()
        await process.wait()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    # A screenshot is one long message.
    reader = asyncio.StreamReader(limit=64 << 20)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", 0))
    return reader


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
