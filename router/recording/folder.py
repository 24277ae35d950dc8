"""Records in files: each a bundle of its own. Together they are bounded by bytes, and the oldest go first."""

import os
from contextlib import suppress
from pathlib import Path

from baton import records
from baton.errors import ConfigError
from baton.inference.v1 import record_pb2

_PATTERN = "record-*"
_LEAST_BYTES = 4096  # of a file, as disks have them: it bounds their number, too
_PARTS = 16


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
