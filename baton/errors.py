"""The errors of Baton: each class says what the caller should do, each message says what it is about."""

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
    happened, and are empty where that is not known. Code that passes an error on may fill them, but not replace them.
    `is_bare` is set where it was a status without the details that Baton's processes send.
    """

    reason: ClassVar[str] = "INTERNAL_ERROR"
    is_bare = False

    def __init__(self, message: str, *, stage: str = "", worker_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.worker_id = worker_id


class InvalidRequest(BatonError):
    """The request is wrong and will be wrong again: correct the named fields. Never retried."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[FieldViolation], *, stage: str = "", worker_id: str = "") -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations), stage=stage, worker_id=worker_id)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """The error for a single wrong field."""
        return cls([FieldViolation(field, description)])


class PositionInvalid(InvalidRequest):
    """The client says that it has more of an answer than there is, or parts of it that are not the answer's."""

    reason = "POSITION_INVALID"


class Unsupported(BatonError):
    """The API has this feature, and the model or worker does not. The message lists what it can do."""

    reason = "UNSUPPORTED"


class Unauthenticated(BatonError):
    """The caller is unknown: send valid credentials."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    """The caller is known and may not do this."""

    reason = "PERMISSION_DENIED"


class ModelNotFound(BatonError):
    """No worker serves this model. The message lists the models that are served."""

    reason = "MODEL_NOT_FOUND"


class RequestNotFound(BatonError):
    """No request of this id runs here: it has ended, or never arrived."""

    reason = "REQUEST_NOT_FOUND"


class StreamLost(BatonError):
    """Nothing is left of the answer that was to be resumed, or the handle is not its own: send the request again."""

    reason = "STREAM_LOST"


class StreamAdopted(BatonError):
    """Another call of ResumeGeneration has taken the answer over: this one is no longer its reader."""

    reason = "STREAM_ADOPTED"


class StaleAttempt(BatonError):
    """A later attempt to resume the answer came before: count attempts up."""

    reason = "STALE_ATTEMPT"


class StreamDiverged(BatonError):
    """The answer was computed again, and its text is not the one that its client has: send the request again."""

    reason = "STREAM_DIVERGED"


class TokensLost(BatonError):
    """Some tokens of the answer were lost between a worker and its router: it has a gap. Send the request again."""

    reason = "TOKENS_LOST"


class RequestExists(BatonError):
    """A request of this id is running: choose another id."""

    reason = "REQUEST_EXISTS"


class RoleMismatch(BatonError):
    """The worker does not have the role that the call needs."""

    reason = "ROLE_MISMATCH"


class LayoutMismatch(BatonError):
    """The KV layouts of two workers differ: they can never hand over to each other."""

    reason = "KV_LAYOUT_MISMATCH"


class LoraMismatch(LayoutMismatch):
    """KV was computed with another adapter than the request's, or with none: it cannot be used for this request."""

    reason = "LORA_MISMATCH"


class StaleEpoch(BatonError):
    """A call for an earlier process of a worker; if for a handoff that it gave, run the prompt again."""

    reason = "STALE_EPOCH"


class HandoffLost(BatonError):
    """The handoff's lease did not hold, or its owner is gone: run the prompt again. Nothing was computed from it."""

    reason = "HANDOFF_LOST"


class EmbeddingLost(HandoffLost):
    """The lease on a media item's embedding did not hold, or its owner is gone: encode the item again."""

    reason = "EMBEDDING_LOST"


class Overloaded(BatonError):
    """There is no room now. Retry after `retry_after_seconds`."""

    reason = "OVERLOADED"

    def __init__(
        self, message: str, *, retry_after_seconds: float, subject: str = "", stage: str = "", worker_id: str = ""
    ) -> None:
        super().__init__(message, stage=stage, worker_id=worker_id)
        self.retry_after_seconds = retry_after_seconds
        self.subject = subject  # the tenant whose share of the queue is used up; empty if it is no tenant's


class QuotaExceeded(BatonError):
    """The tenant has used up its quota. Retry after `retry_after_seconds`."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, subject: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.subject = subject
        self.retry_after_seconds = retry_after_seconds


class DeadlineUnreachable(Overloaded):
    """At the current load the request would miss its deadline, so it was not started: allow more time, or wait."""

    reason = "DEADLINE_UNREACHABLE"


class SlowReader(BatonError):
    """The client did not read the answer for too long, and the request was ended: read faster, or ask for less."""

    reason = "SLOW_READER"


class Unavailable(BatonError):
    """The peer could not be reached or went away: retry, on another one if there is one."""

    reason = "WORKER_UNAVAILABLE"


class NoWorker(Unavailable):
    """No worker that could do this is ready. The message says why each worker was rejected."""

    reason = "NO_WORKER"


class RouterStarting(NoWorker):
    """This router has just started and does not know all workers and models yet. Retry after `retry_after_seconds`."""

    reason = "ROUTER_STARTING"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaUnavailable(Unavailable):
    """No router lends the tenant's quota, or this one does not reach it: retry after `retry_after_seconds`, best
    elsewhere.
    """

    reason = "QUOTA_UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Draining(Unavailable):
    """The worker takes no new work: use another one."""

    reason = "DRAINING"


class LoraNotHere(Unavailable):
    """The worker has no adapter of this name and content: use another one. No worker has failed."""

    reason = "LORA_NOT_HERE"


class WorkerTimeout(Unavailable):
    """A worker that is connected did not answer in time, or its answer stood still. It may be busy: retry later."""

    reason = "WORKER_TIMEOUT"


class MediaUnavailable(Unavailable):
    """A media item could not be fetched from where its URI points: retry later. No worker has failed."""

    reason = "MEDIA_UNAVAILABLE"


class DeadlineExceeded(BatonError):
    """The caller's deadline has passed; the message says at which stage."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    """The request was cancelled, by its caller or by CancelGeneration."""

    reason = "CANCELLED"


class EngineFailed(BatonError):
    """The engine failed on this request, or altogether. The same request may succeed elsewhere."""

    reason = "ENGINE_FAILED"


class InvalidReply(EngineFailed):
    """A worker's reply is not one that it may give: unreadable, inconsistent, or beyond what was asked. Another one may
    answer.
    """

    reason = "INVALID_REPLY"


class DeviceFailed(EngineFailed):
    """A GPU reported an error, after which its process can compute nothing: the worker ends, and must be restarted."""

    reason = "DEVICE_FAILED"


class OutOfMemory(EngineFailed):
    """The device had too little memory for this request; the worker goes on. Ask for less, or try another worker."""

    reason = "OUT_OF_MEMORY"


class ComputeFailed(EngineFailed):
    """The model computed NaN or infinity for this request; the worker goes on."""

    reason = "COMPUTE_FAILED"


class ConfigError(BatonError):
    """A configuration is wrong; the message names the path of the key. Raised at start, before anything listens."""

    reason = "INVALID_CONFIG"
