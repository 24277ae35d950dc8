"""What became of a request, filled as it goes on: the source of its last message, its metrics and its log line."""

from dataclasses import dataclass, field

from baton.inference.v1 import generate_pb2, sampling_pb2

from router.ledger import Ledger


@dataclass(slots=True, eq=False)
class Account:
    """A request's facts so far. `topology` is where it really ran, seen from its end."""

    request_id: str
    model: str = ""
    outcome: str = "CANCELLED"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # the answer's own, shared with it
    finish_reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    migrations: int = 0
    topology: generate_pb2.Topology.ValueType = generate_pb2.TOPOLOGY_AGGREGATED
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    ledger: Ledger = field(default_factory=Ledger)

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
        )
