"""The replies that workers may give. Each is checked before it is used, and a wrong one is its worker's failure."""

import math
from collections.abc import Sequence

import structlog

from baton.engine.v1 import decode_pb2, encode_pb2, handoff_pb2, prompt_pb2
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    HandoffLost,
    InvalidReply,
    InvalidRequest,
    LayoutMismatch,
    LoraNotHere,
    NoWorker,
    Overloaded,
    PositionInvalid,
    SlowReader,
    StaleEpoch,
    StreamAdopted,
    StreamDiverged,
    Unavailable,
    Unsupported,
    WorkerTimeout,
)
from baton.inference.v1 import embed_pb2, generate_pb2
from discovery.record import WorkerRecord
from engine_protocol.fault_injection import FAULT_KEY
from router.routing.retry import DoubtedFeature, DoubtedRequest
from router.telemetry import metrics
from router.workers.handle import WorkerHandle
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

# A worker ends a call with one of these for its own or for the request's sake; all others are for callers of a router.
_OF_WORKERS = (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    HandoffLost,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    SlowReader,  # of this router's client
    StaleEpoch,
    StreamAdopted,
    StreamDiverged,  # of this router's client, too
    Unavailable,
    Unsupported,
)
# Fields of requests to workers that clients have no part in, by their beginnings.
_ROUTERS_FIELDS = frozenset({"emitted", "handoff", "destination", "data_parallel_rank"})
# What the router has checked against the worker's record and card: the worker is another one than those say.
_CHECKED_FIELDS = frozenset({"prompt.token_ids"})
# What only an engine can find wrong: all else a router has checked before. Fields, and the beginnings of fields.
_ENGINES_FIELDS = frozenset({"prompt", "options", "sampling.bad_sequences", "sampling.stop_token_ids", FAULT_KEY})
_ENGINES_PREFIXES = ("guided", "media", "prompt.lora")
# How much earlier than at the deadline a worker may find that it has passed.
_EARLY_SECONDS = 1.0
# After so many refusals in a row that only an engine can know, a worker's next one is doubted, at most so often: each
# takes a retry from the budget of all.
_BELIEVED_IN_A_ROW, _DOUBT_SECONDS = 3, 1.0
_LONGEST_EMBEDDING = 2**20  # tokens
_MOST_READERS = 2**31  # of one answer, one after the other
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # the types that can be read


class Suspects:
    """The workers that have given one request a reply that they may not give, or none in time.

    Once another worker has answered the request, the fault was theirs, and they get no requests for a while. Before
    that it may be the request's own: one that every worker fails would otherwise stop them all.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: list[tuple[WorkerHandle, str]] = []

    def add(self, worker: WorkerHandle, stage: str, error: BatonError) -> None:
        """Counts a failure that was the worker's own doing; ignores others."""
        if isinstance(error, (InvalidReply, WorkerTimeout)):
            metrics.WORKER_FAULTS.labels(stage).inc()
            log.warning("invalid reply", worker_id=worker.record.worker_id, stage=stage, reason=error.message)
            self._found.append((worker, error.message))

    def answered(self, by: WorkerHandle) -> None:
        """Notes that a worker has answered the request."""
        if self._found:
            for worker, reason in self._found:
                if worker is not by:
                    worker.health.suspend(f"its replies are wrong: {reason}")
            self._found.clear()


def is_lost_by(error: BatonError) -> bool:
    """True if a worker's call has ended with this because its process or the connection was lost."""
    return isinstance(error, Unavailable) and not isinstance(error, (Draining, LoraNotHere, NoWorker, WorkerTimeout))


def of_worker(error: BatonError, remaining_seconds: float) -> BatonError:
    """The error with which a worker has ended a call, as what it is to the request: mostly the same one.

    An error that only a router gives its callers is an InvalidReply, and so is one about what the router sent itself.
    A refusal for another reason than one that only a worker can know is doubted until a second worker says the same.
    """
    if isinstance(error, DeadlineExceeded) and remaining_seconds > _EARLY_SECONDS:
        return InvalidReply("the worker says that the deadline has passed, long before it")
    if not isinstance(error, _OF_WORKERS):
        return InvalidReply(f"the worker ended the call with {error.reason}: {error.message}")
    if isinstance(error, InvalidRequest):
        fields = {violation.field.split("[")[0].split(".")[0].split("_id")[0] for violation in error.violations}
        if fields and fields <= {"handoff"}:
            return HandoffLost(f"the worker cannot use the handoff: {error.message}")
        if fields and fields <= _ROUTERS_FIELDS:
            return InvalidReply(f"the worker cannot use what this router has chosen: {error.message}")
        if error.violations and {violation.field.split("[")[0] for violation in error.violations} <= _CHECKED_FIELDS:
            return InvalidReply(f"the worker is not what its record and card say: {error.message}")
        if error.is_bare or not (isinstance(error, PositionInvalid) or _is_engines(error)):
            return DoubtedRequest(error.violations)
    if isinstance(error, Unsupported) and error.is_bare:
        return DoubtedFeature(error.message)
    return error


def of_this_worker(error: BatonError, worker: WorkerHandle, remaining_seconds: float) -> BatonError:
    """The same, where a worker that has refused many requests in a row, and answered none, is doubted now and then."""
    found = of_worker(error, remaining_seconds)
    if type(found) not in (InvalidRequest, Unsupported):
        return found
    worker.refusals += 1
    if worker.refusals <= _BELIEVED_IN_A_ROW or monotonic() < worker.doubted_at + _DOUBT_SECONDS:
        return found
    worker.doubted_at = monotonic()
    return DoubtedRequest(found.violations) if isinstance(found, InvalidRequest) else DoubtedFeature(found.message)


def _is_engines(error: InvalidRequest) -> bool:
    fields = [violation.field for violation in error.violations]
    return any(field in _ENGINES_FIELDS or field.startswith(_ENGINES_PREFIXES) for field in fields)


def check_handoff(handoff: handoff_pb2.KvHandoff, record: WorkerRecord, tokens: int) -> None:
    """Raises InvalidReply unless a prefill worker may answer this for a prompt of so many tokens."""
    if not handoff.HasField("first_token"):
        raise InvalidReply("the handoff has no first token")
    if not handoff.handoff_id:
        if not handoff.first_token.finish_reason:
            raise InvalidReply("nothing is held for a request that goes on")
        return
    _check_owner("handoff", handoff, record)
    if handoff.layout_digest != record.layout_digest:
        raise InvalidReply(f"the handoff has the KV layout {handoff.layout_digest[:12]!r}")
    if handoff.num_tokens not in (0, tokens):
        raise InvalidReply(f"the handoff has {handoff.num_tokens} tokens of {tokens}")


def _check_owner(name: str, held: handoff_pb2.KvHandoff | encode_pb2.EmbeddingLease, record: WorkerRecord) -> None:
    """Raises InvalidReply for what another worker holds, and Unavailable if this one has been restarted.

    A new process listens at the address of the old one before every router has seen its record.
    """
    if held.worker_id != record.worker_id:
        raise InvalidReply(f"the {name} is of {held.worker_id[:80]!r}")
    if held.epoch != record.epoch:
        raise Unavailable(f"worker {record.worker_id} has been restarted: the {name} is of epoch {held.epoch}")


def check_yielded(handoff: handoff_pb2.KvHandoff, record: WorkerRecord, tokens: int, newest: int) -> None:
    """Raises InvalidReply unless a decode of so many ids, the last one `newest`, may yield this."""
    check_handoff(handoff, record, tokens - 1)
    if handoff.first_token.token_id != newest:
        raise InvalidReply(f"the decode yields after {handoff.first_token.token_id}, and the last id was {newest}")


def check_attached(asked: decode_pb2.AttachRequest, told: decode_pb2.DecodeAttached, worker: WorkerHandle) -> None:
    """Raises InvalidReply unless a decode worker may tell this of an answer that it has kept."""
    vocab_size = (worker.model.limits.vocab_size if worker.model else 0) or 2**32
    if (largest := max(told.token_ids, default=0)) >= vocab_size:
        raise InvalidReply(f"the answer has token {largest} of a vocabulary of {vocab_size}")
    missing = len(told.token_ids) - asked.from_tokens
    if missing < 0:
        raise InvalidReply(f"the answer has {len(told.token_ids)} tokens, and its client {asked.from_tokens}")
    if asked.peek:
        return
    if not 0 < told.attachment <= _MOST_READERS:
        raise InvalidReply(f"the answer has had {told.attachment} readers")
    if not told.prompt.token_ids:
        raise InvalidReply("the answer has no prompt")
    if told.HasField("remaining") and not told.is_over and told.remaining.ToNanoseconds() <= 0:
        raise InvalidReply("the answer goes on, and has no time left")
    if len(told.logprobs) != (missing if told.sampling.HasField("logprobs") else 0):
        raise InvalidReply(f"the answer has {len(told.logprobs)} log probabilities of {missing} tokens")


def reported_logprobs(
    found: generate_pb2.PromptLogprobs, sampling: prompt_pb2.Sampling, prompt: prompt_pb2.Prompt
) -> generate_pb2.PromptLogprobs | None:
    """The log probabilities of a prompt; None if they were not asked for. Raises InvalidReply if they do not fit it."""
    if not sampling.HasField("prompt_logprobs"):
        return None
    alternatives = len(found.logprobs) * found.top
    fits = len(found.top_token_ids) == len(found.top_logprobs) == alternatives
    if not fits or len(found.logprobs) != max(0, len(prompt.token_ids) - 1):
        raise InvalidReply(f"{len(found.logprobs)} log probabilities of a prompt of {len(prompt.token_ids)} tokens")
    return found


def check_embedding(response: encode_pb2.EncodeResponse, worker: WorkerHandle) -> encode_pb2.Embedding:
    """The embedding of the one image that an encode worker was sent. Raises InvalidReply."""
    if len(response.embeddings) != 1:
        raise InvalidReply(f"the encode worker returned {len(response.embeddings)} embeddings for 1 image")
    embedding, model = response.embeddings[0], worker.model
    expected = model.images.tokens_per_image if model and model.images else 0
    longest = min(_LONGEST_EMBEDDING, model.limits.max_context_tokens if model else _LONGEST_EMBEDDING)
    shape = embedding.shape
    if len(shape) != 2 or not all(shape) or shape[0] > longest or expected not in (0, shape[0]):
        raise InvalidReply(f"the encode worker returned an embedding of shape {list(shape)[:8]}")
    if embedding.WhichOneof("source") is None:
        raise InvalidReply("the encode worker returned an embedding without its content")
    if not embedding.digest:
        raise InvalidReply("the encode worker returned an embedding without its digest")
    if embedding.dtype not in _ITEM_BYTES:
        raise InvalidReply(f"the encode worker returned an embedding of the type {embedding.dtype[:20]!r}")
    found = len(embedding.inline) if embedding.HasField("inline") else embedding.lease.num_bytes
    if found != (size := _ITEM_BYTES[embedding.dtype] * shape[0] * shape[1]):
        raise InvalidReply(f"the encode worker returned {found} bytes for {size}")
    if embedding.HasField("lease"):
        _check_embedding_lease(embedding.lease, worker)
    return embedding


def _check_embedding_lease(lease: encode_pb2.EmbeddingLease, worker: WorkerHandle) -> None:
    _check_owner("embedding", lease, worker.record)
    if worker.embedding_layout and lease.layout_digest != worker.embedding_layout:
        raise InvalidReply(f"the embedding has the layout {lease.layout_digest[:12]!r}")


def check_vectors(
    found: Sequence[embed_pb2.TextEmbedding], inputs: Sequence[generate_pb2.TokenIds], dimensions: int | None
) -> None:
    """Raises InvalidReply unless an embed worker may answer this. Without `dimensions` they are as the model says."""
    if len(found) != len(inputs):
        raise InvalidReply(f"the worker returned {len(found)} vectors of {len(inputs)} inputs")
    expected = dimensions or len(found[0].values)
    for one in found:
        if not one.values or len(one.values) != expected:
            raise InvalidReply(f"the worker returned a vector of {len(one.values)} numbers instead of {expected}")
        if not math.isfinite(sum(one.values)):
            raise InvalidReply("the worker returned a vector with a number that is not finite")
