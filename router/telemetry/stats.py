"""The facts about a request that its last message, metrics, span and log line are made from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.v1 import handoff_pb2
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.telemetry.timings import Timings
from rpc.status import OK

GENERATE = "generate"
_LAST_SECOND = 253402300799  # of the year 9999
_CACHE_FIELDS = ("host_cached_tokens", "disk_cached_tokens", "peer_cached_tokens", "retained_tokens")
_MOST_DRAFTED = 2**27  # of one answer: the field has 32 bits, and a request may have several answers


@dataclass(slots=True, eq=False)
class RequestStats:
    """The facts so far. `topology` is how the request really ran, which is known at its end."""

    request_id: str
    timings: Timings = field(default_factory=Timings)
    operation: str = GENERATE  # or a role, whose answers have no tokens, no topology and no reason to end
    model: str = ""
    outcome: str = "CANCELLED"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_caches: generate_pb2.Usage | None = None  # cached tokens by tier, and what is retained, if there is any
    media_tokens: int = 0
    cached_embeddings: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completion_tokens: int = 0
    charged_tokens: int = 0  # of them, those that the tenant has paid for before: see router/resume
    encoding: generate_pb2.Encoding.ValueType = generate_pb2.ENCODING_NONE
    encode_worker_ids: list[str] = field(default_factory=list)
    finish_reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    migrations: int = 0
    moves: int = 0
    topology: generate_pb2.Topology.ValueType = generate_pb2.TOPOLOGY_AGGREGATED
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    is_first_token_timed: bool = False

    def record_end(self, error: BaseException | None) -> None:
        """Sets `outcome` to OK, or to the reason of the error that ended the request.

        A cancellation leaves it as it is: CANCELLED, or what the canceller has set.
        """
        match error:
            case None:
                self.outcome = OK
            case BatonError():
                self.outcome = error.reason
            case Exception():
                self.outcome = BatonError.reason

    def add_encode_workers(self, worker_ids: Sequence[str]) -> None:
        """Notes the workers that have encoded media of the request."""
        self.encode_worker_ids += [one for one in dict.fromkeys(worker_ids) if one not in self.encode_worker_ids]

    def prefilled_on(self, worker_id: str, cached_tokens: int) -> None:
        """Notes the prefill worker that has run the prompt."""
        self.prefill_worker_id = worker_id
        self.cached_tokens = cached_tokens
        self.topology = generate_pb2.TOPOLOGY_DISAGGREGATED

    def decoding_on(self, worker_id: str, has_handoff: bool) -> None:
        """Notes the decode worker that is called. Without a handoff it runs the prompt, too."""
        self.decode_worker_id = worker_id
        if not has_handoff:
            self.topology = generate_pb2.TOPOLOGY_AGGREGATED

    def decoded(self, cached_tokens: int) -> None:
        """Notes the end of decoding. The decode worker's cache counts only if no prefill worker ran the prompt."""
        if not self.prefill_worker_id:
            self.cached_tokens = cached_tokens

    def found_in_caches(self, usage: handoff_pb2.PromptUsage) -> None:
        """Notes what the worker that ran the prompt found in each tier, and what it retains. Wrong values are cut."""
        tiers = (usage.host_cached_tokens, usage.disk_cached_tokens, usage.peer_cached_tokens)
        if not (usage.retained_tokens or any(tiers)):
            return
        host, disk, peer = (min(tokens, self.cached_tokens) for tokens in tiers)
        self.prompt_caches = caches = generate_pb2.Usage(
            host_cached_tokens=host, disk_cached_tokens=disk, peer_cached_tokens=peer
        )
        if usage.retained_tokens and 0 <= usage.retained_until.seconds <= _LAST_SECOND:
            caches.retained_tokens = min(usage.retained_tokens, self.prompt_tokens)
            caches.retained_until.seconds = usage.retained_until.seconds

    def speculated(self, drafted_tokens: int, accepted_tokens: int) -> None:
        """Notes the tokens that a decode worker guessed, and those of them that are part of the answer."""
        most = _MOST_DRAFTED - self.drafted_tokens
        self.drafted_tokens += min(drafted_tokens, most)
        self.accepted_tokens = min(self.accepted_tokens + accepted_tokens, self.completion_tokens)

    def add_answer(self, answer: "RequestStats") -> None:
        """Adds what one more answer to the same prompt took. The prompt counts once."""
        self.completion_tokens += answer.completion_tokens
        self.charged_tokens += answer.charged_tokens
        self.drafted_tokens += answer.drafted_tokens
        self.accepted_tokens += answer.accepted_tokens
        self.migrations += answer.migrations
        self.moves += answer.moves

    def fill_known(self, finished: generate_pb2.Finished) -> None:
        """Fills what is known before an answer is decoded."""
        finished.migrations, finished.topology = self.migrations, self.topology
        finished.moves = self.moves
        finished.prefill_worker_id = self.prefill_worker_id
        usage = finished.usage
        usage.prompt_tokens, usage.cached_tokens = self.prompt_tokens, self.cached_tokens
        usage.media_tokens, usage.cached_embeddings = self.media_tokens, self.cached_embeddings
        if self.prompt_caches is not None:
            usage.MergeFrom(self.prompt_caches)

    def restore(self, finished: generate_pb2.Finished) -> None:
        """Takes over what `fill_known` of another router has filled."""
        usage = finished.usage
        self.migrations, self.topology = finished.migrations, finished.topology
        self.moves = finished.moves
        self.prefill_worker_id = finished.prefill_worker_id
        self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self.media_tokens, self.cached_embeddings = usage.media_tokens, usage.cached_embeddings
        caches = generate_pb2.Usage()
        for name in _CACHE_FIELDS:
            if getattr(usage, name):
                setattr(caches, name, getattr(usage, name))
        if caches.retained_tokens:
            caches.retained_until.CopyFrom(usage.retained_until)
        self.prompt_caches = caches if caches.ByteSize() else None

    def fill(self, finished: generate_pb2.Finished) -> None:
        """Fills the last message, but for what stopped the answer."""
        finished.reason, finished.migrations, finished.topology = self.finish_reason, self.migrations, self.topology
        if self.moves:
            finished.moves = self.moves
        usage = finished.usage
        usage.prompt_tokens, usage.cached_tokens = self.prompt_tokens, self.cached_tokens
        usage.completion_tokens = self.completion_tokens
        if self.media_tokens or self.cached_embeddings:
            usage.media_tokens, usage.cached_embeddings = self.media_tokens, self.cached_embeddings
        if self.prompt_caches is not None:
            usage.MergeFrom(self.prompt_caches)
        if self.drafted_tokens:
            usage.drafted_tokens, usage.accepted_tokens = self.drafted_tokens, self.accepted_tokens
        finished.timings.MergeFrom(self.timings.message().stages)
        finished.prefill_worker_id, finished.decode_worker_id = self.prefill_worker_id, self.decode_worker_id

    def log_fields(self) -> dict[str, object]:
        """The fields of the request's log line."""
        first_token_seconds = self.timings.first_token_seconds
        return {
            "model": self.model,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_seconds": first_token_seconds and round(first_token_seconds, 6),
            "total_seconds": round(self.timings.total_seconds, 6),
            "migrations": self.migrations,
            "prefill_worker_id": self.prefill_worker_id,
            "decode_worker_id": self.decode_worker_id,
        }
