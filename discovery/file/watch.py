"""Watches the workers' files in a shared folder, by listing it again and again."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import structlog

from baton.errors import BatonError, PermissionDenied
from discovery.file.folder import Lifetimes, SharedFolder, Version
from discovery.file.registration import worker_and_epoch
from discovery.membership import Latest, Membership, values_of
from discovery.record import WorkerRecord

_log = structlog.get_logger(__name__)


class FolderWatch:
    """The workers of one namespace, for one reader; the folder is listed every `poll_seconds`.

    Shared folders give no notice of what another host changed, so it has to be asked for. After the folder was away or
    was made anew, no worker is removed for `grace_seconds`.
    """

    def __init__(
        self, folder: SharedFolder, workers: Path, ttl_seconds: float, grace_seconds: float, poll_seconds: float
    ) -> None:
        self._folder = folder
        self._workers = workers
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._lifetimes = Lifetimes(ttl_seconds)
        self._membership = Membership()
        self._records: dict[str, tuple[Version, WorkerRecord | None]] = {}
        self._latest: Latest[tuple[WorkerRecord, ...]] = Latest()
        self._grace_ends = 0.0
        self._listed = False
        self._is_away = False

    def views(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        return values_of(self._latest, self._follow())

    async def _follow(self) -> None:
        while True:
            try:
                await self._scan()
            except BatonError as error:
                if not self._listed and isinstance(error, PermissionDenied):
                    raise
                if not self._is_away:
                    _log.warning("worker watch interrupted", error=error.message)
                self._is_away = True
            await asyncio.sleep(self._poll_seconds)

    async def _scan(self) -> None:
        versions = await self._folder.list(self._workers)
        if self._listed and (versions is None or self._is_away):
            self._hold_removals()
        self._lifetimes.update(versions or {})
        if self._is_away:
            self._lifetimes.extend(self._grace_seconds)
            _log.info("worker watch resumed", workers=len(versions or {}))
        self._listed, self._is_away = True, False
        await self._read(versions or {})
        if self._grace_ends and asyncio.get_running_loop().time() >= self._grace_ends:
            self._grace_ends = 0.0
            self._membership.apply_removals()
        self._membership.replace(self._newest())
        self._latest.set(self._membership.workers)
        for name, version in self._lifetimes.abandoned().items():
            await self._folder.remove(self._workers / name, version=version)

    async def _read(self, versions: dict[str, Version]) -> None:
        records: dict[str, tuple[Version, WorkerRecord | None]] = {}
        for name, version in versions.items():
            known = self._records.get(name)
            records[name] = known if known and known[0] == version else (version, await self._record(name))
        self._records = records

    async def _record(self, name: str) -> WorkerRecord | None:
        try:
            content = await self._folder.read(self._workers / name)
            if content is None:
                return None
            record = WorkerRecord.from_json(content)
            if worker_and_epoch(name) != (record.worker_id, record.epoch):
                raise ValueError(f"worker {record.worker_id!r:.100} of epoch {record.epoch} is in another one's file")
        except (ValueError, BatonError) as error:
            if name not in self._records:
                _log.warning("worker record ignored", file=name, error=str(error))
            return None
        return record

    def _newest(self) -> dict[bytes, WorkerRecord]:
        alive = [record for name in self._lifetimes.alive() if (record := self._records[name][1]) is not None]
        return {record.worker_id.encode(): record for record in sorted(alive, key=lambda record: record.epoch)}

    def _hold_removals(self) -> None:
        self._membership.hold_removals()
        self._grace_ends = asyncio.get_running_loop().time() + self._grace_seconds
