"""What became of a request, filled as it goes on: the source of its last message, its metrics and its log line."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.inference.v1 import generate_pb2, sampling_pb2

from router.embeddings import Use
from router.ledger import Ledger


@dataclass(slots=True, eq=False)
class Account:
    """A request's facts so far. `topology` is where it really ran, seen from its end."""

    request_id: str
    model: str = ""
    outcome: str = "CANCELLED"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: int = 0
    cached_embeddings: int = 0
    encoding: generate_pb2.Encoding.ValueType = generate_pb2.ENCODING_NONE
    encode_worker_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # the answer's own, shared with it
    finish_reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    migrations: int = 0
    topology: generate_pb2.Topology.ValueType = generate_pb2.TOPOLOGY_AGGREGATED
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    is_first_token_timed: bool = False
    ledger: Ledger = field(default_factory=Ledger)

    def embedded(self, uses: Sequence[Use]) -> None:
        """Media have become embeddings: for the first time, or again because they were needed again."""
        if not self.media_tokens:
            self.media_tokens = sum(use.num_tokens for use in uses)
            self.cached_embeddings = sum(use.was_cached for use in uses)
            self.encoding = _encoding(uses)
        for use in uses:
            if not use.was_cached and use.worker_id not in self.encode_worker_ids:
                self.encode_worker_ids.append(use.worker_id)

    def prefilled_on(self, worker_id: str, cached_tokens: int) -> None:
        """A prefill worker has run the prompt."""
        self.prefill_worker_id = worker_id
        self.cached_tokens = cached_tokens
        self.topology = generate_pb2.TOPOLOGY_DISAGGREGATED

    def decoding_on(self, worker_id: str, has_handoff: bool) -> None:
        """A decode worker has been asked to go on, or to run the prompt too."""
        self.decode_worker_id = worker_id
        if not has_handoff:
            self.topology = generate_pb2.TOPOLOGY_AGGREGATED

    def decoded(self, cached_tokens: int) -> None:
        """The decode worker has ended. Its cache counts only if it was the first to run the prompt."""
        if not self.prefill_worker_id:
            self.cached_tokens = cached_tokens

    def usage(self) -> generate_pb2.Usage:
        """What the request cost so far."""
        return generate_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.token_ids),
            media_tokens=self.media_tokens,
            cached_embeddings=self.cached_embeddings,
        )


def _encoding(uses: Sequence[Use]) -> generate_pb2.Encoding.ValueType:
    """How media became embeddings, all of them seen together."""
    workers = [use.encoded.worker for use in uses if not use.was_cached]
    if not workers:
        return generate_pb2.ENCODING_CACHED
    is_inline = any(len(worker.record.roles) > 1 for worker in workers)
    return generate_pb2.ENCODING_INLINE if is_inline else generate_pb2.ENCODING_WORKER
