"""All kept decodes of a worker: their owners, how long each stays, and what they may take together."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from hashlib import sha256

from typing_extensions import Self

from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, Cancelled, DeadlineExceeded, StreamLost
from runtime.aio import forget_frames, wait_until_done
from services.config import KeepConfig
from services.engines.base import EngineLoad
from services.engines.journal.journal import Journal
from services.engines.journal.slots import Slot
from services.resume.attaching import is_last, require_last
from services.resume.graces import Graces
from services.resume.reader import StreamReader
from services.resume.stream import KeptRequest, KeptStream
from services.resume.takeover import LeftStream, open_slot
from services.telemetry import metrics

Own = Callable[[KeptStream], Awaitable[None]]

# A parked decode ends once requests have found no room for so long, looked at so often.
_ROOM_SECONDS, _LOOK_SECONDS = 1.0, 0.25
# What ended ones take is counted in units: small numbers are no objects of their own.
_UNIT_BYTES = 256
# Cancelled answers of which a decode may still come; of more the first are forgotten.
_MOST_CANCELLED = 1024
_NO_DIGEST = bytes(sha256().digest_size)
_CANCELLED = "the answer was cancelled by its handle"


@dataclass(slots=True, eq=False)
class _Entry:
    """A stream in the table, its owner, and when it goes."""

    stream: KeptStream
    owner: "asyncio.Task[None] | None" = None
    stopped_by: BatonError | None = None
    grace: int | None = None  # its tick
    deadline: asyncio.TimerHandle | None = None

    def stop(self, error: BatonError | None = None) -> None:
        """Ends the generation; what it gave stays."""
        if self.owner is not None and not self.owner.done():
            self.stopped_by = error
            self.owner.cancel()

    def cancel_deadline(self) -> None:
        """It has ended, or goes."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


@dataclass(frozen=True, slots=True)
class KeptUsage:
    """The numbers of streams: that generate with a reader and without one, and that have ended."""

    attached: int = 0
    parked: int = 0
    finished: int = 0


NOTHING_KEPT = KeptUsage()


class KeptStreams:
    """The table of kept streams, by their requests' ids. An asynchronous context manager: leaving it ends them all.

    A stream goes once no router has read it for its grace, whether it has ended or not; one that failed goes at once.
    """

    def __init__(self, config: KeepConfig, load: Callable[[], EngineLoad], journal: Journal | None = None) -> None:
        self._config = config
        self._load = load
        self._journal = journal
        # Of timers: that of a request has its fields for the log, and its span.
        self._context = copy_context()
        self._graces: Graces[_Entry] = Graces(self._end_grace, self._context)
        self._entries: dict[str, _Entry] = {}
        self._parked: dict[_Entry, None] = {}  # those that generate, the longest parked first
        self._finished: dict[_Entry, int] = {}  # the units of those that have ended, in that order
        self._finished_units = 0
        self._cancelled: dict[bytes, None] = {}
        # Told with each load of the worker: kept up to date, so that telling it takes nothing.
        self.usage = NOTHING_KEPT
        self._look: asyncio.TimerHandle | None = None
        self._full_since: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        owners = [entry.owner for entry in self._entries.values() if entry.owner is not None]
        self.forget_all()
        if self._look is not None:
            self._look.cancel()
        await wait_until_done(*owners)

    @property
    def streams(self) -> list[KeptStream]:
        """All of them."""
        return [entry.stream for entry in self._entries.values()]

    @property
    def num_bytes(self) -> int:
        """The bytes of all."""
        return sum(stream.size for stream in self.streams)

    def _note_usage(self) -> None:
        running, parked = len(self._entries) - len(self._finished), len(self._parked)
        self.usage = KeptUsage(running - parked, parked, len(self._finished))

    def forget_all(self) -> None:
        """Ends them all."""
        for entry in tuple(self._entries.values()):
            self._drop(entry)

    async def start(self, request: decode_pb2.DecodeRequest, own: Own, seconds: float | None) -> KeptStream:
        """Begins a decode: `own` runs it, in its own task, for `seconds` at most. One of the same id ends first.

        Raises Cancelled if its client has cancelled it, while its router was between two workers.
        """
        while (before := self._entries.get(request.request_id)) is not None:
            self._drop(before)
            if before.owner is not None:
                await wait_until_done(before.owner)
        if _digests(request.keep) in self._cancelled:
            raise Cancelled(_CANCELLED)
        stream = self._stream(request)
        self._enter(stream, own, seconds)
        return stream

    def _stream(self, request: decode_pb2.DecodeRequest) -> KeptStream:
        kept = KeptRequest.of(request, self._config.max_seconds)
        return KeptStream(kept, self._config.logprob_bytes, request.emitted)

    def take_over(self, left: LeftStream, own: Own) -> None:
        """Goes on with a decode of the worker's last process. No router reads it until one attaches to it."""
        stream = self._stream(left.request)
        stream.slot = left.decode.slot
        stream.attempt, stream.attachment = left.decode.slot.last_reader
        entry: _Entry

        async def go_on(stream: KeptStream) -> None:
            # Not before its task has begun: there may be more of them than may be parked, and one that is cancelled
            # earlier frees nothing.
            self._context.run(self._park, entry)
            await own(stream)

        entry = self._enter(stream, go_on, left.remaining_seconds)

    def _enter(self, stream: KeptStream, own: Own, seconds: float | None) -> _Entry:
        entry = self._entries[stream.kept.request_id] = _Entry(stream)
        # Before a deadline that has passed already: a task that is cancelled before it begins frees nothing.
        entry.owner = asyncio.create_task(self._run(entry, own))
        if seconds is not None:
            loop = asyncio.get_running_loop()
            stream.deadline_at = loop.time() + seconds
            passed = DeadlineExceeded("the request's deadline has passed")
            entry.deadline = loop.call_later(seconds, entry.stop, passed, context=self._context)
        self._note_usage()
        return entry

    def slot_for(self, stream: KeptStream) -> Slot | None:
        """The slot in the journal of a stream that begins to generate; None if it ends with this process."""
        if stream.slot is None and self._journal is not None:
            stream.slot = open_slot(self._journal, stream, self._free_a_finished)
            if stream.slot is not None:
                stream.slot.note(stream.attempt, stream.attachment)
        return stream.slot

    def _free_a_finished(self) -> bool:
        """Frees the slot of the stream that ended first: if the process dies, its end is computed again."""
        entry = next((entry for entry in self._finished if entry.stream.slot is not None), None)
        if entry is not None:
            self._free_slot(entry)
        return entry is not None

    def _free_slot(self, entry: _Entry) -> None:
        slot, entry.stream.slot = entry.stream.slot, None
        if slot is not None and self._journal is not None:
            self._journal.free_slot(slot)

    def authorized(self, request: decode_pb2.AttachRequest) -> KeptStream:
        """The stream that a router asks for. Raises StreamLost, also if the secret or the owner is another."""
        return self._authorized(request).stream

    def _authorized(self, request: decode_pb2.AttachRequest | decode_pb2.SettleRequest) -> _Entry:
        entry = self._entries.get(request.request_id)
        keep = entry.stream.kept.read().keep if entry else None
        knows = hmac.compare_digest(sha256(request.secret).digest(), keep.secret_sha256 if keep else _NO_DIGEST)
        owns = hmac.compare_digest(request.owner_sha256, keep.owner_sha256 if keep else _NO_DIGEST)
        if entry is None or not (knows and owns):
            raise StreamLost("no such answer is kept here")
        return entry

    @contextmanager
    def reading(self, stream: KeptStream, at: int) -> Iterator[StreamReader]:
        """The stream's reader from `at` on, while the context is open."""
        entry = self._entries.get(stream.kept.request_id)
        reader = StreamReader(stream, at)
        stream.attach(reader)
        if stream.slot is not None:
            stream.slot.note(stream.attempt, stream.attachment)
        if entry is not None and entry.stream is stream:
            self._unpark(entry)
        try:
            yield reader
        finally:
            if stream.leave(reader) and entry is not None:
                self._park(entry)

    def require_reader(self, request: decode_pb2.YieldRequest | decode_pb2.LendBlocksRequest) -> None:
        """Raises StreamAdopted unless the stream, if it is kept, has this reader."""
        entry = self._entries.get(request.request_id)
        if entry is not None:
            require_last(entry.stream, request)

    def settle(self, request: decode_pb2.SettleRequest) -> bool:
        """Ends the generation of a stream, or forgets all of it. False if the caller is not its last reader.

        A client that cancels needs not be. Raises StreamLost if its secret is wrong, or it is not the owner.
        """
        if request.secret:
            self._cancel(self._authorized(request))
            return True
        entry = self._entries.get(request.request_id)
        if entry is None or not is_last(entry.stream, request):
            return False
        entry.stop()
        # Its router has ended: no worker goes on with it elsewhere, whether it has read of that or not.
        _free_yielded(entry.stream)
        if request.forget:
            self._drop(entry)
        return True

    def _cancel(self, entry: _Entry) -> None:
        entry.stop(Cancelled(_CANCELLED))
        _free_yielded(entry.stream)
        self._drop(entry)

    def find(self, request: decode_pb2.FindStreamsRequest) -> Iterator[decode_pb2.FoundStream]:
        """Those of these ids that are here. Cancelled answers that are not begin no more."""
        for answer in request.cancelled:
            self._cancelled[_digests(answer)] = None
        while len(self._cancelled) > _MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        for request_id in request.request_ids:
            if (entry := self._entries.get(request_id)) is not None:
                stream = entry.stream
                stream.drain()
                yield decode_pb2.FoundStream(
                    request_id=request_id,
                    hop=stream.kept.read().keep.hop,
                    tokens=len(stream.ids),
                    has_yielded=stream.has_yielded,
                )

    # Its owners.

    async def _run(self, entry: _Entry, own: Own) -> None:
        error: Exception | None = None
        try:
            await own(entry.stream)
        except asyncio.CancelledError:
            error = entry.stopped_by
        except Exception as failure:  # whatever it is, the reader raises it
            error = failure
        finally:
            if error is not None:
                forget_frames(error)  # they know the stream, which knows the error
                self._drop(entry)
            entry.stream.end(error)
            self._note_end(entry)
            if entry not in self._finished or entry.stream.finished is None:
                self._free_slot(entry)  # only now: the engine has written into it until here

    def _note_end(self, entry: _Entry) -> None:
        self._parked.pop(entry, None)
        # They keep the variables of the request's context.
        entry.owner = None
        entry.cancel_deadline()
        if self._entries.get(entry.stream.kept.request_id) is not entry:
            return
        units = -(-(entry.stream.size + len(entry.stream.kept.prompt)) // _UNIT_BYTES)
        self._finished[entry] = units
        self._finished_units += units
        self._note_usage()
        while self._finished_units * _UNIT_BYTES > self._config.max_finished_bytes:
            self._drop(next(iter(self._finished)))
            metrics.KEPT_DROPPED.labels("bytes").inc()

    # How long they stay.

    def _park(self, entry: _Entry) -> None:
        if self._entries.get(entry.stream.kept.request_id) is not entry:
            return
        self._cancel_grace(entry)
        entry.grace = self._graces.begin(entry, entry.stream.kept.grace_seconds)
        if entry.stream.has_ended:
            return
        self._parked[entry] = None
        self._note_usage()
        if len(self._parked) > self._config.max_parked:
            self._drop(next(iter(self._parked)))
            metrics.KEPT_DROPPED.labels("parked").inc()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._make_room)

    def _unpark(self, entry: _Entry) -> None:
        self._parked.pop(entry, None)
        self._note_usage()
        self._cancel_grace(entry)

    def _cancel_grace(self, entry: _Entry) -> None:
        if entry.grace is not None:
            self._graces.cancel(entry, entry.grace)
            entry.grace = None

    def _end_grace(self, entry: _Entry) -> None:
        if not entry.stream.has_ended:
            metrics.KEPT_DROPPED.labels("grace").inc()
        self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Ends a stream, and forgets it."""
        self._cancel_grace(entry)
        entry.cancel_deadline()
        entry.stop(entry.stopped_by)
        self._parked.pop(entry, None)
        if (units := self._finished.pop(entry, None)) is not None:
            self._finished_units -= units
            self._free_slot(entry)
        if not entry.stream.is_told:
            _free_yielded(entry.stream)  # the router that has been told of it frees it, or has it read
        if self._entries.get(entry.stream.kept.request_id) is entry:
            del self._entries[entry.stream.kept.request_id]
        self._note_usage()

    def _make_room(self) -> None:
        """Ends the generation of the longest parked stream once requests have waited too long for room."""
        self._look = None
        if not self._parked:
            self._full_since = None
            return
        loop = asyncio.get_running_loop()
        if not self._load().waiting:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = loop.time()
        elif loop.time() - self._full_since >= _ROOM_SECONDS:
            self._full_since = None
            entry = next(iter(self._parked))
            del self._parked[entry]
            entry.stop()
            self._note_usage()
            metrics.KEPT_DROPPED.labels("room").inc()
        self._look = loop.call_later(_LOOK_SECONDS, self._make_room)


def _digests(answer: decode_pb2.StreamKeep | decode_pb2.CancelledAnswer) -> bytes:
    return answer.secret_sha256 + answer.owner_sha256


def _free_yielded(stream: KeptStream) -> None:
    if stream.free_yielded is not None:
        stream.free_yielded()
        stream.free_yielded = None
