"""The errors of the system: each class says what the caller should do, each message says which thing it is about."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path, such as `sampling.temperature`, and what is wrong with it."""

    field: str
    description: str


class BatonError(Exception):
    """Base of every error that may cross a process boundary.

    `reason` is stable and machine-readable (`google.rpc.ErrorInfo.reason`). `stage` and `worker_id` say where it
    happened and are empty where that is not known; whoever passes the error on may fill them, never overwrite them.
    """

    reason: ClassVar[str] = "INTERNAL_ERROR"

    def __init__(self, message: str, *, stage: str = "", worker_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.worker_id = worker_id


class InvalidRequest(BatonError):
    """The request is wrong and will be wrong again: mend the named fields. Never retried."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[FieldViolation], *, stage: str = "", worker_id: str = "") -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), stage=stage, worker_id=worker_id)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """The error for a single wrong field."""
        return cls([FieldViolation(field, description)])


class Unsupported(BatonError):
    """The API names it and this model or worker cannot do it. The message lists what it can do."""

    reason = "UNSUPPORTED"


class Unauthenticated(BatonError):
    """Who calls is not known: send valid credentials."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    """Who calls is known and may not do this."""

    reason = "PERMISSION_DENIED"


class ModelNotFound(BatonError):
    """No worker serves this model. The message lists the models that are served."""

    reason = "MODEL_NOT_FOUND"


class RequestNotFound(BatonError):
    """No request of this id runs here: it has ended, or never came."""

    reason = "REQUEST_NOT_FOUND"


class RequestExists(BatonError):
    """A request of this id is running: choose another id."""

    reason = "REQUEST_EXISTS"


class RoleMismatch(BatonError):
    """The worker does not have the role that the call needs."""

    reason = "ROLE_MISMATCH"


class LayoutMismatch(BatonError):
    """Two workers' KV layouts differ: they can never hand over to one another."""

    reason = "KV_LAYOUT_MISMATCH"


class StaleEpoch(BatonError):
    """The handoff is of an earlier life of its owner's process: run the prompt again."""

    reason = "STALE_EPOCH"


class HandoffLost(BatonError):
    """The handoff's lease did not hold, or its owner is gone: run the prompt again. Nothing was computed from it."""

    reason = "HANDOFF_LOST"


class EmbeddingLost(HandoffLost):
    """The lease on a medium's embedding did not hold, or its owner is gone: encode the medium again."""

    reason = "EMBEDDING_LOST"


class Overloaded(BatonError):
    """There is no room now. Retry after `retry_after_seconds`."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_seconds: float, stage: str = "", worker_id: str = "") -> None:
        super().__init__(message, stage=stage, worker_id=worker_id)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(BatonError):
    """The tenant has used up what it may. Retry after `retry_after_seconds`."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, subject: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.subject = subject
        self.retry_after_seconds = retry_after_seconds


class DeadlineUnreachable(Overloaded):
    """As busy as everything is, the request would not be done in time, and was not begun: allow more, or wait."""

    reason = "DEADLINE_UNREACHABLE"


class SlowReader(BatonError):
    """The answer was not read for so long that the request was ended: read faster, or ask for less at once."""

    reason = "SLOW_READER"


class Unavailable(BatonError):
    """The peer could not be reached or went away: retry, elsewhere if there is an elsewhere."""

    reason = "WORKER_UNAVAILABLE"


class NoWorker(Unavailable):
    """No worker that could do this is ready. The message says what was looked for and why each one was left out."""

    reason = "NO_WORKER"


class Draining(Unavailable):
    """The worker takes no new work: go elsewhere."""

    reason = "DRAINING"


class MediaUnavailable(Unavailable):
    """A media item could not be fetched from where its URI points: retry later. No worker is at fault."""

    reason = "MEDIA_UNAVAILABLE"


class DeadlineExceeded(BatonError):
    """The caller's time is over; the message says at which stage."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    """The caller, or somebody in its name, has stopped the request."""

    reason = "CANCELLED"


class EngineFailed(BatonError):
    """The engine failed on this request, or altogether. The same request may succeed elsewhere."""

    reason = "ENGINE_FAILED"


class ConfigError(BatonError):
    """A configuration is wrong; the message names the path of the key. Raised at start, before anything listens."""

    reason = "INVALID_CONFIG"
