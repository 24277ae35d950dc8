"""One response as it comes: its object, and its events after any number.

The number of an event follows from the text alone, however tokens came together: each character of a delta counts one,
as does every other event. So `starting_after` means the same on every router that has the response, and after any loss.
Items are in one order: reasoning, message, calls.

A text that grows by pieces.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from router.openai.errors import PLAIN_NAMES, FieldNames, describe
from router.openai.exchange import AnswerStream
from router.openai.responses import ItemKind, ResponseBuilder, part, part_type, status_of
from router.stream.collector import UnaryCollector

_MANY_PIECES = 1024  # so many of the last are joined to one


class GrowingText:
    """A text to which adding, and of which reading from a place on, take as long as that part is, not as the whole."""

    def __init__(self) -> None:
        self._joined: list[str] = []
        self._pieces: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        self._joined, self._pieces = ["".join((*self._joined, *self._pieces))], []
        return self._joined[0]

    def add(self, piece: str) -> None:
        """Adds a piece at the end."""
        if not piece:
            return
        self._pieces.append(piece)
        self._length += len(piece)
        if len(self._pieces) >= _MANY_PIECES:
            self._joined.append("".join(self._pieces))
            self._pieces.clear()

    def after(self, place: int) -> str:
        """The text after its first `place` characters."""
        found, begin = [], self._length
        for pieces in (self._pieces, self._joined):
            for piece in reversed(pieces):
                if begin <= place:
                    break
                begin -= len(piece)
                found.append(piece[max(0, place - begin) :])
        return "".join(reversed(found))


_ENDED = ("completed", "incomplete", "failed", "cancelled")


class RecordedStream:
    """Passes messages on to another stream, and records them in a document."""

    def __init__(self, document: "ResponseDocument", inner: AnswerStream | UnaryCollector) -> None:
        self._document = document
        self._inner = inner

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Takes the next message of the pipeline."""
        await self._document.send(message)
        await self._inner.send(message)

    async def fail(self, error: BatonError) -> None:
        """Ends a stream that has begun."""
        if not isinstance(self._inner, UnaryCollector):
            await self._inner.fail(error)


@dataclass(frozen=True, slots=True)
class ResponseEvent:
    """An event. `text` is the new text of a delta; `shown` is for `with_shown`."""

    number: int
    name: str
    fields: dict[str, Any]
    text: str = ""
    shown: bytes = b""


class ResponseDocument:
    """A response: takes the messages of the pipeline, and gives its object and its events."""

    def __init__(self, builder: ResponseBuilder, model: str) -> None:
        self.status = "queued"
        self.handle = ""  # by which other routers find it; empty if no worker keeps it
        self.ended: Callable[[], None] = _nothing  # called when it has ended well
        self.has_left = False  # another router has it now
        self._builder = builder
        self._model = model
        self._texts: dict[ItemKind, GrowingText] = {"reasoning": GrowingText(), "message": GrowingText()}
        self._calls: list[generate_pb2.ToolCall] = []
        self._finished: generate_pb2.Finished | None = None
        self._error: dict[str, str | None] | None = None
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """True if nothing more will come."""
        return self.status in _ENDED

    @property
    def has_started(self) -> bool:
        """True once a worker has it, or it has ended."""
        return self.status != "queued"

    @property
    def num_bytes(self) -> int:
        """The bytes of its output, and of what it tells of its request, about."""
        texts = sum(len(str(text).encode()) for text in self._texts.values())
        return self._builder.num_bytes + texts + sum(call.ByteSize() for call in self._calls)

    @property
    def answer(self) -> generate_pb2.ChatMessage:
        """Its output as a turn of a conversation."""
        turn = generate_pb2.ChatMessage(role="assistant", reasoning=str(self._texts["reasoning"]))
        if len(self._texts["message"]):
            turn.parts.add(text=str(self._texts["message"]))
        for call in self._calls:
            turn.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        return turn

    # What comes.

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Takes the next message of the pipeline; none once it has ended, as while it is being cancelled."""
        if self.has_ended:
            return
        match message.WhichOneof("event"):
            case "token":
                self._texts["reasoning"].add(message.token.reasoning)
                self._texts["message"].add(message.token.text)
                self._calls.extend(message.token.tool_calls)
            case "started":
                self._start(message.started)
            case "resumed":
                self._start(message.resumed.started)
            case "finished":
                self._finished = message.finished
                self.status = status_of(message.finished)
                self.ended()
        self._notify()

    def fail(self, error: BatonError, names: FieldNames = PLAIN_NAMES) -> None:
        """Ends it with an error."""
        described = describe(error, names)
        self._error = {"code": described["code"], "message": described["message"]}
        self._end("failed")

    def cancel(self) -> None:
        """Ends it, as far as it has come."""
        self._end("cancelled")

    def leave(self) -> None:
        """Another router goes on with it."""
        self.has_left = True
        self._notify()

    async def change(self) -> None:
        """Waits for the next change. It ends at the latest with the request's deadline."""
        await self._changed.wait()

    def _start(self, started: generate_pb2.Started) -> None:
        self.status, self._model = "in_progress", started.model
        self.handle = started.resumption.handle

    def _end(self, status: str) -> None:
        if not self.has_ended:
            self.status = status
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # What it is.

    def response(self) -> bytes:
        """The object `response` as JSON, as far as it has come."""
        return self._builder.encoded(self._response(self.status, list(self._items())))

    def text_before(self, num_bytes: int) -> bytes:
        """The first bytes of its reasoning and its text together."""
        return "".join(map(str, self._texts.values())).encode()[:num_bytes]

    def events(self, after: int) -> Iterator[ResponseEvent]:
        """The events of a higher number than `after`; -1 gives all that have come."""
        if not self.has_started:
            return
        for event in self._all_events(after):
            if event.number > after:
                yield event

    def _all_events(self, after: int) -> Iterator[ResponseEvent]:
        begun = self._response("in_progress", [])
        yield ResponseEvent(0, "response.created", {"response": begun}, shown=self._builder.shown)
        yield ResponseEvent(1, "response.in_progress", {"response": begun}, shown=self._builder.shown)
        number, index = 2, 0
        for kind, text in self._shown():
            for event in self._text_events(kind, text, index, number, after):
                yield event
                number = event.number + 1
            index += 1
        if not self.has_ended:
            return
        for call in self._calls:
            yield from self._call_events(call, index, number)
            number, index = number + 4, index + 1
        name = "failed" if self.status == "cancelled" else self.status
        ended = {"response": self._response(self.status, list(self._items()))}
        yield ResponseEvent(number, f"response.{name}", ended, shown=self._builder.shown)

    def _shown(self) -> Iterator[tuple[ItemKind, GrowingText]]:
        """The items of text; at the end an empty message, if there is nothing else."""
        reasoning, message = self._texts["reasoning"], self._texts["message"]
        if len(reasoning):
            yield "reasoning", reasoning
        if len(message) or (self._finished is not None and not self._calls):
            yield "message", message

    def _is_open(self, kind: ItemKind) -> bool:
        return not self.has_ended and (kind == "message" or not len(self._texts["message"]))

    def _items(self) -> Iterator[dict[str, Any]]:
        index = 0
        for kind, text in self._shown():
            yield self._builder.item(index, kind, self._item_status(kind), [part(kind, str(text))])
            index += 1
        for call in self._calls if self.has_ended else ():
            yield self._builder.call(index, call)
            index += 1

    def _item_status(self, kind: ItemKind) -> str:
        if self._is_open(kind):
            return "in_progress"
        is_last = kind == "message" or not len(self._texts["message"])
        return "completed" if self.status == "completed" or not is_last else "incomplete"

    def _text_events(
        self, kind: ItemKind, text: GrowingText, index: int, number: int, after: int
    ) -> Iterator[ResponseEvent]:
        place = {"item_id": self._builder.item_id(index, kind), "output_index": index, "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = part_type(kind)
        item = self._builder.item(index, kind, "in_progress", [])
        yield ResponseEvent(number, "response.output_item.added", {"output_index": index, "item": item})
        yield ResponseEvent(number + 1, "response.content_part.added", {**place, "part": part(kind, "")})
        number += 2
        if len(text):
            new = text.after(max(0, after + 1 - number))
            delta = {**place, "delta": new, **more}
            yield ResponseEvent(number + len(text) - 1, f"response.{name}.delta", delta, new)
            number += len(text)
        if self._is_open(kind):
            return
        whole = part(kind, str(text))
        item = self._builder.item(index, kind, self._item_status(kind), [whole])
        yield ResponseEvent(number, f"response.{name}.done", {**place, "text": whole["text"], **more})
        yield ResponseEvent(number + 1, "response.content_part.done", {**place, "part": whole})
        yield ResponseEvent(number + 2, "response.output_item.done", {"output_index": index, "item": item})

    def _call_events(self, call: generate_pb2.ToolCall, index: int, number: int) -> Iterator[ResponseEvent]:
        item = self._builder.call(index, call)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        events: Sequence[tuple[str, dict[str, Any]]] = (
            ("output_item.added", {"output_index": index, "item": begun}),
            ("function_call_arguments.delta", {**place, "delta": call.arguments}),
            ("function_call_arguments.done", {**place, "arguments": call.arguments}),
            ("output_item.done", {"output_index": index, "item": item}),
        )
        for offset, (name, fields) in enumerate(events):
            yield ResponseEvent(number + offset, f"response.{name}", fields)

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        made = self._builder.response(self._model, status, items, self._finished if self.has_ended else None)
        return {**made, "error": self._error}


def _nothing() -> None:
    """No callback."""
