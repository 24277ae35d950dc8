"""`baton chat`: a conversation in the terminal."""

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton import AsyncClient
from baton.errors import BatonError
from baton.files import LARGEST_REQUEST_BYTES
from baton.images import Image, media_item, user_message
from baton.inference.v1 import generate_pb2
from cli.connection import connect
from cli.failures import describe
from cli.request import image_of, set_sampling, text_of
from cli.terminal import errors
from cli.timings import timings_table

_HELP = """\
/image FILE   adds an image file or URI to the next message
/retry        sends the message that failed again; /retry text sends it without its images
/timing       shows the timings of each answer, or no longer
/clear        begins a new conversation
/exit         ends it, as the end of input does; Ctrl-C stops an answer"""


async def run(arguments: argparse.Namespace) -> int:
    """Reads messages and streams the answers, until the end of input. Each request has the conversation so far."""
    async with connect(arguments, arguments.tenant) as client:
        conversation = Conversation(client, arguments, shows_timing=arguments.timing)
        if sys.stdin.isatty():
            errors().print("Type a message, or /help.")
        while (line := await _read_line()) is not None:
            if line.strip() == "/exit":
                break
            await conversation.run_line(line)
    return 0


@dataclass(frozen=True, slots=True)
class Message:
    """A message as a user typed it: a text, and images that were added to it."""

    text: str
    images: tuple[Image, ...] = ()


@dataclass
class Conversation:
    """The turns so far, and what the next message has besides its text."""

    client: AsyncClient
    arguments: argparse.Namespace
    shows_timing: bool = False
    turns: list[generate_pb2.ChatMessage] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    failed: Message | None = None

    async def run_line(self, line: str) -> None:
        """Obeys a command, or sends a message and shows the answer."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                return
            case "/help":
                errors().print(_HELP)
            case "/clear":
                self.turns, self.images, self.failed = [], [], None
            case "/timing":
                self.shows_timing = not self.shows_timing
            case "/image":
                self._add_image(rest.strip())
            case "/retry":
                await self._retry(rest.strip())
            case _ if word.startswith("/"):
                errors().print(f"unknown command {word}; /help lists them")
            case _:
                images, self.images = self.images, []
                await self._send(Message(line, tuple(images)))

    def _add_image(self, name: str) -> None:
        """An image that cannot be read is refused here, and not together with the message that would have had it."""
        if not name:
            errors().print("/image needs a FILE or a URI")
            return
        image = image_of(name)
        try:
            media_item(image)
        except BatonError as error:
            errors().print(f"{describe(error)}; no image was added to the next message")
            return
        self.images.append(image)

    async def _retry(self, what: str) -> None:
        match what, self.failed:
            case _, None:
                errors().print("no message has failed")
            case "", Message() as failed:
                await self._send(failed)
            case "text", Message(text):
                await self._send(Message(text))
            case _:
                errors().print("expected /retry or /retry text")

    async def _send(self, typed: Message) -> None:
        """A message that fails is not part of the conversation, but kept for /retry; one that was stopped is."""
        answer = generate_pb2.ChatMessage(role="assistant")
        self.failed = None
        try:
            message = user_message(text_of("chat.messages", typed.text), typed.images)
            finished = await _stoppable(self._stream(self._request(message), answer))
        except BatonError as error:
            self.failed = typed
            errors().print(f"{describe(error)}; the message is kept: /retry sends it again")
            return
        if finished is None:
            errors().print("(stopped)")
        elif self.shows_timing:
            errors().print(timings_table(finished.timings, finished.usage))
        self.turns += [message, answer]

    def _request(self, message: generate_pb2.ChatMessage) -> generate_pb2.GenerateRequest:
        request = generate_pb2.GenerateRequest(model=self.arguments.model)
        if self.arguments.system is not None:
            part = generate_pb2.ContentPart(text=text_of("chat.messages[0].parts[0].text", self.arguments.system))
            request.chat.messages.append(generate_pb2.ChatMessage(role="system", parts=[part]))
        request.chat.messages.extend([*self.turns, message])
        set_sampling(request, self.arguments)
        return request

    async def _stream(
        self, request: generate_pb2.GenerateRequest, answer: generate_pb2.ChatMessage
    ) -> generate_pb2.Finished:
        """Shows the answer as it comes, and notes it: reasoning on standard error, which is no part of the text."""
        text = answer.parts.add(text="")
        finished = generate_pb2.Finished()
        try:
            async with aclosing(self.client.generate(request, timeout_seconds=self.arguments.timeout)) as events:
                async for event in events:
                    if event.token.reasoning:
                        errors().print(event.token.reasoning, end="", style="dim", markup=False)
                    text.text += event.token.text
                    print(event.token.text, end="", flush=True)
                    finished = event.finished
        finally:
            print(flush=True)
        return finished


async def _stoppable(
    work: Coroutine[Any, Any, generate_pb2.Finished],
) -> generate_pb2.Finished | None:
    """The result of `work`; None if Ctrl-C stopped it."""
    task = asyncio.ensure_future(work)
    with _on_interrupt(task):
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return None


@contextmanager
def _on_interrupt(task: "asyncio.Future[Any]") -> Iterator[None]:
    """Ctrl-C cancels the task, and nothing else, while the context is open."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def _read_line() -> str | None:
    """The next line of input; None at its end. In a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def resolve(found: str | None) -> None:
        if not line.done():
            line.set_result(found)

    def read() -> None:
        try:
            found: str | None = input("> ") if sys.stdin.isatty() else _piped_line()
        except EOFError:
            found = None
        except (OSError, UnicodeDecodeError) as error:
            errors().print(f"standard input cannot be read: {error}")
            found = None
        loop.call_soon_threadsafe(resolve, found)

    threading.Thread(target=read, name="read-line", daemon=True).start()
    return await line


def _piped_line() -> str:
    """The next line of a file or a pipe. Raises EOFError at its end, and after a line longer than any request."""
    line = sys.stdin.readline(LARGEST_REQUEST_BYTES)
    if len(line) == LARGEST_REQUEST_BYTES:
        errors().print(f"the line has more than {LARGEST_REQUEST_BYTES - 1} characters; nothing after it is read")
        raise EOFError
    if not line:
        raise EOFError
    return line.rstrip("\n")
