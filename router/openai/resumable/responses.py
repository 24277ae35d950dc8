"""The events of a response, numbered by its text: for clients that go on after a number, or after an id."""

from binascii import crc32
from dataclasses import replace

from baton.errors import BatonError, StreamDiverged
from baton.inference.v1 import generate_pb2
from router.openai.call import HttpCall
from router.openai.choices import EVENTS, RETRY, event
from router.openai.errors import describe
from router.openai.responses import with_shown
from router.openai.resumable.event_ids import EventIds, Position
from router.openai.stored.document import ResponseDocument, ResponseEvent


class NumberedStream:
    """Writes the events of a document as it comes, those after `had` alone. Its ids have the number as `tokens`."""

    def __init__(self, call: HttpCall, document: ResponseDocument, ids: EventIds, had: Position | None) -> None:
        self._call = call
        self._document = document
        self._ids = ids
        self._had = had
        self._position = replace(had) if had else Position()
        self._after = had.tokens if had else -1
        ids.positions = [self._position]

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Takes the next message of the pipeline. Raises StreamDiverged if the client has another text."""
        await self._document.send(message)
        match message.WhichOneof("event"):
            case "started":
                await self._start(message.started)
            case "resumed":
                await self._start(message.resumed.started)
        events = list(self._document.events(self._after))
        if self._had is not None and (events or self._document.has_ended):
            self._require_same(self._had)
            self._had = None
        written = b"".join(self._written(one) for one in events)
        if self._document.has_ended:
            await self._call.end(written)
        elif written:
            await self._call.write(written)

    async def fail(self, error: BatonError) -> None:
        """Ends a stream that has begun with an event that OpenAI's clients raise as an error."""
        described = describe(error, self._call.names)
        about = {name: value for name, value in described.items() if name != "type"}
        fields = {"type": "error", "sequence_number": self._after + 1, **about, "error": described}
        await self._call.end(event(fields, "error"))

    async def _start(self, started: generate_pb2.Started) -> None:
        self._ids.start(started)
        await self._call.begin(200, EVENTS)
        await self._call.write(RETRY)

    def _require_same(self, had: Position) -> None:
        text = self._document.text_before(had.text_bytes)
        if len(text) < had.text_bytes or crc32(text) != had.text_crc:
            raise StreamDiverged("computed again, the response is not the one that the client has")

    def _written(self, one: ResponseEvent) -> bytes:
        self._after = self._position.tokens = one.number
        text = one.text.encode()
        self._position.text_bytes += len(text)
        self._position.text_crc = crc32(text, self._position.text_crc)
        return numbered(one)[:-1] + self._ids.line()


def numbered(one: ResponseEvent) -> bytes:
    """An event of a document, as it is written."""
    made = event({"type": one.name, "sequence_number": one.number, **one.fields}, one.name)
    return with_shown(made, one.shown) if one.shown else made
