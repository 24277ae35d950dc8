"""The choice of the requests that are recorded, and the task that makes their records, away from the requests.

The records of a request are found at all routers of the fleet.
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from baton import records
from baton.connection.credentials import RECORD_KEY
from baton.engine.v1 import peer_pb2
from baton.errors import BatonError, ConfigError, InvalidRequest, RequestNotFound, Unavailable, Unsupported
from baton.inference.v1 import record_pb2
from router.config import RecordsConfig
from router.context import RequestContext
from router.peers.link import PeerLink
from router.recording.notes import AnswerNotes
from router.recording.record import Ended, RecordMaker
from router.recording.table import RecordTable, latest
from router.routing.policy import WorkerView
from router.telemetry import metrics
from router.telemetry.stats import GENERATE
from rpc.auth.caller import current_caller
from rpc.status import outcome_of
from runtime.aio import timeout
from runtime.clock import wall_time_ns

_PATTERN = "record-*"
_LEAST_BYTES = 4096  # of a file, as disks have them: it bounds their number, too
_PARTS = 16
log = structlog.get_logger(__name__)

_MOST_WAITING = 256  # requests that have ended, and whose records are not made yet
_LARGE = 16 * 1024  # of Ended.size, above which a record is made in a thread
_SETTLE_SECONDS = 1.0  # for records that are being made when one is asked for

_CAUSES = {
    record_pb2.RECORD_CAUSE_FAILED: "failed",
    record_pb2.RECORD_CAUSE_SLOW: "slow",
    record_pb2.RECORD_CAUSE_SAMPLED: "sampled",
    record_pb2.RECORD_CAUSE_ASKED: "asked",
}


class RecordFolder:
    """A folder of records, of one router or several. Its files can be read by its owner alone."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError if nothing can be written there."""
        self._path = path
        self._max_bytes = max_bytes
        self._room = 0  # what may be written until the files are listed again
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"records.folder: {path}: {error.strerror}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"records.folder: {path}: cannot be written")

    def write(self, record: record_pb2.RequestRecord) -> None:
        """Writes a record, and removes the oldest ones beyond the bound. Raises OSError."""
        # By the router's own id of the record: a client's id of the request is no name of a file.
        path = self._path / f"record-{record.arrived.ToNanoseconds():020d}-{record.record_id}.json"
        partial = path.with_suffix(".partial")
        bundle = records.write_bundle([record])
        self._make_room(max(len(bundle), _LEAST_BYTES))
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(bundle)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        """Removes the oldest files once a part of the bound has been written: to list them takes long."""
        self._room -= size
        if self._room >= 0:
            return
        part = self._max_bytes // _PARTS
        # By their names, which begin with the time. A process that has ended may have left partial ones.
        for file in sorted(self._path.glob(_PATTERN), reverse=True):
            with suppress(FileNotFoundError):  # another router has removed it
                size += max(file.stat().st_size, _LEAST_BYTES)
                if size > self._max_bytes - part:
                    file.unlink()
        self._room = part


class Recorder:
    """The records of a router. `workers` gives the workers that it knows."""

    def __init__(self, config: RecordsConfig, router: str, policy: str, workers: Callable[[], Sequence[WorkerView]]):
        """Raises ConfigError if the folder cannot be written."""
        self._config = config
        self._workers = workers
        self._maker = RecordMaker(router, policy, config.prompts, config.max_prompt_bytes)
        self._folder = RecordFolder(Path(config.folder), config.folder_bytes) if config.folder else None
        self._waiting: asyncio.Queue[Ended] = asyncio.Queue(_MOST_WAITING)
        self._waiting_bytes = 0
        self._has_failed = False  # to write the last record to the folder
        self.table = RecordTable(config)

    def begin(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> AnswerNotes | None:
        """The notes of a request that may be recorded. Raises InvalidRequest for wrong metadata."""
        config, cause = self._config, record_pb2.RECORD_CAUSE_UNSPECIFIED
        if config.asked and _asks(metadata):
            cause = record_pb2.RECORD_CAUSE_ASKED
        elif config.share and random.random() < config.share:
            cause = record_pb2.RECORD_CAUSE_SAMPLED
        elif not config.depends_on_end:
            return None
        return AnswerNotes(self._workers, cause)

    def ended(self, ctx: RequestContext, error: BaseException | None) -> None:
        """Takes a request that has ended. Its record is made later."""
        if ctx.notes is None or ctx.stats.operation != GENERATE:
            return
        cause = ctx.notes.cause or self._cause(ctx)
        if not cause:
            return
        arrived_ns = wall_time_ns() - round(ctx.stats.timings.total_seconds * 1e9)
        ended = Ended(ctx, ctx.notes, cause, error, arrived_ns)
        if self._waiting.full() or self._waiting_bytes + ended.size > self._config.max_bytes:
            metrics.RECORDS_DROPPED.labels("busy").inc()
            return
        self._waiting_bytes += ended.size
        self._waiting.put_nowait(ended)

    async def run(self) -> None:
        """Makes records, one after the other, until cancelled."""
        while True:
            ended = await self._waiting.get()
            try:
                await self._keep(ended)
            finally:
                self._waiting_bytes -= ended.size
                self._waiting.task_done()

    async def find(self, request_id: str, tenant: str | None) -> list[record_pb2.RequestRecord]:
        """The records of a tenant's request, or of any tenant's; the oldest first."""
        try:
            async with timeout(_SETTLE_SECONDS):
                await self._waiting.join()
        except TimeoutError:
            pass  # more and more requests end: what is there is all that can be told
        found = []
        for serialized in self.table.find(request_id, tenant):
            found.append(record_pb2.RequestRecord.FromString(serialized))
            await asyncio.sleep(0)  # to read one takes milliseconds if its prompt is kept
        return found

    def _cause(self, ctx: RequestContext) -> record_pb2.RecordCause.ValueType:
        config, timings = self._config, ctx.stats.timings
        if config.failed and outcome_of(ctx.stats.outcome) == "failed":
            return record_pb2.RECORD_CAUSE_FAILED
        first = timings.first_token_seconds or 0.0
        is_late = 0 < config.slow_first_token_seconds < first
        if is_late or 0 < config.slow_seconds < timings.total_seconds:
            return record_pb2.RECORD_CAUSE_SLOW
        return record_pb2.RECORD_CAUSE_UNSPECIFIED

    async def _keep(self, ended: Ended) -> None:
        if ended.size > _LARGE:
            record = await asyncio.to_thread(self._maker.make, ended)
        else:
            record = self._maker.make(ended)
        if not self.table.add(record):
            metrics.RECORDS_DROPPED.labels("large").inc()
            return
        metrics.RECORDS.labels(_CAUSES[ended.cause]).inc()
        if self._folder is not None:
            await self._write(self._folder, record)

    async def _write(self, folder: RecordFolder, record: record_pb2.RequestRecord) -> None:
        try:
            await asyncio.to_thread(folder.write, record)
            self._has_failed = False
        except OSError as error:
            metrics.RECORDS_DROPPED.labels("folder").inc()
            if not self._has_failed:
                self._has_failed = True
                log.warning("records cannot be written", folder=self._config.folder, error=error.strerror)


def _asks(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    values = [value for key, value in metadata or () if key == RECORD_KEY]
    if values and values != ["1"]:
        raise InvalidRequest.of(RECORD_KEY, "must be 1, or not be sent")
    return bool(values)


_LONGEST_ID = 256


async def find_here(request: peer_pb2.FindRecordsRequest, recorder: Recorder | None) -> peer_pb2.FindRecordsResponse:
    """The records that this router has. Raises InvalidRequest."""
    _check(request.request_id)
    tenant = request.tenant if request.HasField("tenant") else None
    found = await recorder.find(request.request_id, tenant) if recorder else []
    return peer_pb2.FindRecordsResponse(records=found)


async def find_everywhere(
    request_id: str, tenant: str, recorder: Recorder | None, links: Iterable[PeerLink]
) -> record_pb2.GetRecordsResponse:
    """The records of a request of the caller's tenant, or, for operators, of any.

    Raises RequestNotFound, and Unavailable if a router that may have one did not answer.
    """
    _check(request_id)
    if recorder is None:
        raise RequestNotFound("this router keeps no records: `records` of its configuration is off")
    caller = current_caller()
    is_operator = caller is not None and caller.role == "operator"
    asked = peer_pb2.FindRecordsRequest(request_id=request_id, tenant=None if is_operator else tenant)
    here, *others = await asyncio.gather(find_here(asked, recorder), *(_ask(link, asked) for link in links))
    found = [record for answer in (here, *others) if answer is not None for record in answer.records]
    found = [one for one in found if one.request_id == request_id and (is_operator or one.tenant == tenant)]
    if not found and None in others:
        raise Unavailable(f"no record of {request_id!r} was found, and {others.count(None)} routers did not answer")
    if not found:
        raise RequestNotFound(f"no record of {request_id!r} is kept for this tenant")
    return record_pb2.GetRecordsResponse(records=latest(found))


async def _ask(link: PeerLink, request: peer_pb2.FindRecordsRequest) -> peer_pb2.FindRecordsResponse | None:
    """The records of another router; None if it does not answer."""
    try:
        return await link.find_records(request)
    except Unsupported:
        return peer_pb2.FindRecordsResponse()  # it is of a version without records
    except BatonError:
        return None


def _check(request_id: str) -> None:
    if not request_id or len(request_id) > _LONGEST_ID or not request_id.isprintable():
        raise InvalidRequest.of("request_id", f"must be 1 to {_LONGEST_ID} printable characters")
