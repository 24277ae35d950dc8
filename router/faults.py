"""What a failed call says of the worker that was called."""

from collections.abc import Iterator
from contextlib import contextmanager

from router.worker import Worker
from rpc.errors import BatonError, Draining, NoWorker, Unavailable


@contextmanager
def located(stage: str, worker: Worker) -> Iterator[None]:
    """Says of every error where it happened, and leaves a worker that is away alone for a while."""
    try:
        yield
    except BatonError as error:
        error.stage = error.stage or stage
        error.worker_id = error.worker_id or worker.record.worker_id
        if isinstance(error, Unavailable) and not isinstance(error, (Draining, NoWorker)):
            worker.suspect(f"a call to it failed: {error.message}")
        raise
