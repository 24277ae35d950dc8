"""A kept decode: its ids, what its routers need of it, and who reads it now.

Its generation is owned by a task of `KeptStreams`, not by a call: a call that ends leaves it as it is.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.v1 import decode_pb2, prompt_pb2
from baton.errors import StreamAdopted
from engine_protocol.lane import TokenSource
from services.engines.answer import Tokens
from services.engines.journal.slots import Slot
from services.resume.logprobs import KeptLogprobs

# Of a stream, beside its request, its responses and its ids: what its own objects take.
_OBJECT_BYTES = 736


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """The request of a kept decode, for the router that takes it over. The prompt has no embeddings.

    Messages are kept as their bytes: a part of a message keeps the memory of all of it. `rest` is a DecodeRequest of
    its `sampling` and its `keep`.
    """

    request_id: str
    prompt: bytes
    rest: bytes

    @classmethod
    def of(cls, request: decode_pb2.DecodeRequest, most_seconds: float) -> "KeptRequest":
        """Of a request that has `keep`."""
        prompt, rest = request.prompt, decode_pb2.DecodeRequest(sampling=request.sampling, keep=request.keep)
        rest.keep.grace.FromNanoseconds(min(int(most_seconds * 1e9), rest.keep.grace.ToNanoseconds()))
        if prompt.media:
            prompt = prompt_pb2.Prompt()
            prompt.CopyFrom(request.prompt)
            for span in prompt.media:
                span.ClearField("embedding")
        return cls(request.request_id, prompt.SerializeToString(), rest.SerializeToString())

    def read(self) -> decode_pb2.DecodeRequest:
        """Its sampling, and of its `keep` the record, the secret's and the owner's digests, the grace and the hop."""
        return decode_pb2.DecodeRequest.FromString(self.rest)

    @property
    def grace_seconds(self) -> float:
        """The time that it goes on without a reader."""
        return self.read().keep.grace.ToNanoseconds() / 1e9


class StreamListener(Protocol):
    """The reader of a stream, as the stream knows it."""

    ready: Callable[[], None]


class KeptStream:
    """One kept decode. `has_ended` once its generation has: then it has a `finished`, an `error`, or was settled.

    `is_over` says that no more ids will come, which may be known before.
    """

    __slots__ = (
        "_changed",
        "_source_ended",
        "accepted",
        "attachment",
        "attempt",
        "deadline_at",
        "error",
        "finished",
        "free_yielded",
        "has_ended",
        "has_yielded",
        "ids",
        "is_over",
        "is_told",
        "kept",
        "logprobs",
        "read_tokens",
        "reader",
        "slot",
        "source",
    )

    def __init__(self, kept: KeptRequest, logprob_bytes: int, emitted: Sequence[int] = ()) -> None:
        self.kept = kept
        self.ids = array("I", emitted)
        self.read_tokens = len(emitted)  # the first of them, which its readers have been given
        self.attempt = self.attachment = 0
        # The first and the last response, as bytes.
        self.accepted: bytes | None = None
        self.finished: bytes | None = None
        self.has_yielded = False
        self.is_told = False  # of its end: a reader has got all of it
        self.free_yielded: Callable[[], None] | None = None  # frees the KV that its last response gives, unless freed
        self.error: Exception | None = None
        self.has_ended = self.is_over = False
        self.deadline_at: float | None = None  # of the event loop's clock
        self.slot: Slot | None = None  # in the journal, if it outlives this process
        # Of tokens that are more than their ids. An empty one of its own would take as much as all else here.
        self.logprobs = KeptLogprobs.of(kept.read().sampling, logprob_bytes)
        self.source: TokenSource | None = None  # until its end
        self._source_ended: asyncio.Future[None] | None = None
        self.reader: StreamListener | None = None
        self._changed: Callable[[], None] | None = None  # of the reader, told of what comes

    @property
    def size(self) -> int:
        """The bytes that it takes, without its prompt."""
        told = len(self.kept.rest) + len(self.accepted or b"") + len(self.finished or b"")
        told += self.logprobs.size if self.logprobs is not None else 0
        return _OBJECT_BYTES + told + self.ids.itemsize * len(self.ids)

    @property
    def is_parked(self) -> bool:
        """True if no router reads it."""
        return self.reader is None

    # Its owner.

    async def send(self, source: TokenSource) -> int:
        """Takes the ids of a source until its last ones; see SendTokens."""
        self.source, before = source, len(self.ids)
        self._source_ended = asyncio.get_running_loop().create_future()
        try:
            await source.subscribe(self._wake)
            await self._source_ended
            return len(self.ids) - before
        finally:
            self.source, self._source_ended, self.is_over = None, None, True

    def add(self, tokens: Tokens) -> None:
        """Takes tokens that are more than their ids."""
        self.ids.extend(tokens.ids)
        if self.logprobs is not None:
            self.logprobs.add(tokens, is_read=not self.is_parked)
        self.notify()

    def accept(self, accepted: decode_pb2.DecodeResponse) -> None:
        """Notes that its KV is here, or its prompt queued."""
        self.accepted = accepted.SerializeToString()
        self.notify()

    def finish(self, finished: decode_pb2.DecodeResponse, free_yielded: Callable[[], None] | None = None) -> None:
        """Notes the last response, and how to free the KV that it gives, if it does."""
        self.free_yielded = free_yielded
        self.finished, self.has_yielded = finished.SerializeToString(), finished.HasField("yielded")

    def end(self, error: Exception | None = None) -> None:
        """Notes that its generation has ended; by itself if it has `finished`."""
        self.error, self.source, self.deadline_at = error, None, None
        self.has_ended = self.is_over = True
        self.ids = array("I", self.ids)  # without room to grow
        self.notify()

    def pop_error(self) -> Exception | None:
        """The error that ended it, once: after it was raised it has frames that know the stream."""
        error, self.error = self.error, None
        return error

    def notify(self) -> None:
        """Tells the reader that there is something new."""
        if self._changed is not None:
            self._changed()

    # Its reader.

    def attach(self, reader: StreamListener) -> None:
        """Makes `reader` the only one: the one before, if there is one, gets StreamAdopted."""
        before, self.reader = self.reader, reader
        self._changed = reader.ready
        self.attachment += 1
        if before is not None:
            before.ready()

    def leave(self, reader: StreamListener) -> bool:
        """The reader has gone. False if it was not the present one."""
        if self.reader is not reader:
            return False
        self.reader = self._changed = None
        # What comes from now on is taken as it comes.
        self.drain()
        return True

    def subscribe(self, reader: StreamListener) -> None:
        """The reader is told by another `ready` from now on."""
        if self.reader is reader:
            self._changed = reader.ready
        reader.ready()

    def require(self, reader: StreamListener) -> None:
        """Raises StreamAdopted for a reader that is not the present one."""
        if self.reader is not reader:
            raise StreamAdopted("another router has taken the answer over")

    def drain(self) -> Sequence[int]:
        """Takes what has come. Returns it."""
        if self.source is None:
            return ()
        try:
            ids, end = self.source.pull()
        except Exception as error:  # whatever it is, the owner raises it
            self.end_source(error)
            return ()
        self.ids.extend(ids)
        if end:
            self.end_source()
        return ids

    def end_source(self, error: Exception | None = None) -> None:
        """Notes that the source has given its last ids, or has failed."""
        self.source, self.is_over = None, True
        if self._source_ended is None or self._source_ended.done():
            return
        if error is None:
            self._source_ended.set_result(None)
        else:
            self._source_ended.set_exception(error)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed()
        else:
            self.drain()
