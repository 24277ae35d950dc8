"""Records in files: each a bundle of its own. Together they are bounded by bytes, and the oldest go first."""

import os
from pathlib import Path

from baton import records
from baton.errors import ConfigError
from baton.inference.v1 import record_pb2

_PATTERN = "record-*.json"


class RecordFolder:
    """A folder of records, of one router or several. Its files can be read by its owner alone."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError if nothing can be written there."""
        self._path = path
        self._max_bytes = max_bytes
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
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(records.write_bundle([record]))
        partial.replace(path)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        # By their names, which begin with the time.
        files = sorted(self._path.glob(_PATTERN), reverse=True)
        total = 0
        for file in files:
            try:
                total += file.stat().st_size
                if total > self._max_bytes:
                    file.unlink()
            except FileNotFoundError:
                continue  # another router has removed it
