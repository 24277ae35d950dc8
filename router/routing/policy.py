"""The interface of a routing policy: what it sees of a request and of the workers, and what it returns.

A policy chooses among workers that can run the request (filters.py). docs/extending.md shows how to add one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from baton.engine.v1 import prompt_pb2
from baton.errors import InvalidReply
from baton.inference.v1 import cluster_service_pb2, generate_pb2, lora_pb2, timing_pb2
from discovery.pairing import can_hand_over
from discovery.record import BAD_WORDS, Domain
from discovery.registry import WorkerRecord

# A router keeps an inventory for as long as its worker is there, and looks through it for each request of an adapter.
_MOST_ADAPTERS = 4096


_MOST_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class KnownLoras:
    """The adapters that a worker has reported, by digest and name. Not `is_reported` before, or if it serves none."""

    loaded: frozenset[tuple[str, str]] = frozenset()
    adapters: tuple[lora_pb2.LoraAdapter, ...] = field(default=(), compare=False)
    usable: frozenset[tuple[str, str]] = frozenset()
    is_reported: bool = False

    @classmethod
    def of(cls, inventory: lora_pb2.LoraInventory) -> "KnownLoras":
        """Reads a worker's report. Raises InvalidReply if it is too large to keep."""
        count = len(inventory.loaded) + len(inventory.available)
        if count > _MOST_ADAPTERS:
            raise InvalidReply(f"an inventory of {count} adapters; the most is {_MOST_ADAPTERS}")
        if (size := inventory.ByteSize()) > _MOST_BYTES:
            raise InvalidReply(f"an inventory of adapters of {size} bytes; the most is {_MOST_BYTES}")
        adapters = (*inventory.loaded, *inventory.available)
        loaded = frozenset(map(_key, inventory.loaded))
        return cls(loaded, adapters, frozenset(map(_key, adapters)), is_reported=True)

    def can_use(self, adapter: lora_pb2.LoraAdapter) -> bool:
        """True if the worker has the adapter, or can load it."""
        return _key(adapter) in self.usable

    def has_loaded(self, adapter: lora_pb2.LoraAdapter) -> bool:
        """True if the worker has the adapter in memory."""
        return _key(adapter) in self.loaded


def _key(adapter: lora_pb2.LoraAdapter) -> tuple[str, str]:
    return adapter.digest, adapter.name


class WorkerView(Protocol):
    """A worker as a policy sees it."""

    @property
    def record(self) -> WorkerRecord: ...

    @property
    def problem(self) -> str:
        """The reason that it cannot be used now; empty if it is ready."""

    @property
    def embedding_layout(self) -> str:
        """The layout of the embeddings that it makes or reads; empty if unknown."""

    @property
    def encoder(self) -> str:
        """The fingerprint of the encoder that makes its embeddings; empty if unknown."""

    @property
    def loras(self) -> KnownLoras:
        """The adapters that it has told of."""

    @property
    def requests(self) -> int:
        """An estimate of the requests that it runs or queues."""

    @property
    def waiting_tokens(self) -> int:
        """An estimate of the prompt tokens in its queue."""

    @property
    def others_tokens(self) -> int:
        """An estimate of the prompt tokens in its queue that other routers have sent."""

    @property
    def token_seconds(self) -> float | None:
        """Its recent inter-token latency; None if unknown."""

    @property
    def load(self) -> cluster_service_pb2.WorkerLoad:
        """The load that it reported last."""

    @property
    def wake_seconds(self) -> float:
        """The seconds until its model is awake, at least; 0 if it does not sleep."""


W = TypeVar("W", bound=WorkerView)


# What follows is not frozen, since freezing triples what it costs to create one, for each request. Nothing changes it.
@dataclass(slots=True, eq=False)
class PromptBlocks:
    """The full KV blocks of a prompt, in their order.

    `keys` are the first eight bytes of each block's hash in the chain of `engine_protocol.prefix_hash`, as a number.
    """

    keys: Sequence[int]
    block_tokens: int
    block_bytes: int


NO_BLOCKS = PromptBlocks((), 1, 0)


@dataclass(slots=True)
class RoutingRequest:
    """A request as a policy sees it. The prompt has its ids and the spans of its media, without embeddings.

    `blocks` is empty unless the policy predicts (`PredictingPolicy`).
    """

    model: str
    prompt: prompt_pb2.Prompt
    routing: generate_pb2.RoutingOptions
    embedding_layout: str = ""  # of its media
    answer_tokens: int = 0  # at most
    blocks: PromptBlocks = NO_BLOCKS
    token_ids: Sequence[int] = ()  # of the prompt once more: to read them from the message takes longer
    needs: tuple[str, ...] = ()  # capabilities of workers, without which they would ignore a part of the request

    @property
    def lora(self) -> lora_pb2.LoraAdapter | None:
        """The adapter to compute with."""
        return self.prompt.lora if self.prompt.HasField("lora") else None

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.token_ids or self.prompt.token_ids)

    def with_blocks(self, blocks: PromptBlocks) -> "RoutingRequest":
        """The same request with the blocks of its prompt. `replace` would take five times as long."""
        return RoutingRequest(
            self.model,
            self.prompt,
            self.routing,
            self.embedding_layout,
            self.answer_tokens,
            blocks,
            self.token_ids,
            self.needs,
        )

    @property
    def session_key(self) -> str:
        """Requests with the same key share a prefix, and should go to the same workers; empty for none."""
        return self.routing.session_key


def needed_capabilities(request: generate_pb2.GenerateRequest) -> tuple[str, ...]:
    """The capabilities that a worker must state for this request: a worker of an older version ignores new fields."""
    return (BAD_WORDS,) if request.sampling.bad_words else ()


@dataclass(slots=True)
class Candidates(Generic[W]):
    """The workers that are able to run a request now. There is at least one that decodes. Nothing changes it."""

    decode: Sequence[W]
    prefill: Sequence[W] = ()  # empty if the decode worker is to run the prompt
    requires_prefill: bool = False  # then each decode worker has at least one prefill worker
    within: Domain | None = None  # which handoffs must not leave
    # The pairs that were asked for, by the decode worker's `id`: many requests have the same candidates.
    _paired: dict[int, tuple[W, list[W]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def prefill_for(self, decode: W) -> Sequence[W]:
        """The prefill workers that can hand over to this decode worker, as `can_hand_over` says."""
        paired = self._paired.get(id(decode))
        if paired is None:
            able = [worker for worker in self.prefill if can_hand_over(worker.record, decode.record, self.within)]
            paired = self._paired[id(decode)] = decode, able
        return paired[1]

    def allow(self, decode: W, prefill: W | None) -> bool:
        """True if the request can run on these two, or on the decode worker alone if `prefill` is None."""
        if decode not in self.decode:
            return False
        if prefill is None:
            return not self.requires_prefill
        return prefill in self.prefill_for(decode)


class PeerPlan(NamedTuple):
    """A worker that lends the first blocks of a prompt: how many it has, and the tokens of those that are pulled.

    `seconds` is how long the pull takes, of which the peer needs `loading_seconds` to load blocks from its host memory,
    and `saved_seconds` how long it would take to compute what it brings.
    """

    record: WorkerRecord
    rank: int
    num_blocks: int
    tokens: int
    seconds: float
    saved_seconds: float
    loading_seconds: float = 0.0


class LoadPlan(NamedTuple):
    """The tokens that a worker loads from its tiers below the pool, or pulls from a peer, and the time that this adds
    to computing.
    """

    host_tokens: int = 0
    disk_tokens: int = 0
    seconds: float = 0.0
    peer: PeerPlan | None = None


NO_LOAD = LoadPlan()


@dataclass(slots=True)
class Prediction(Generic[W]):
    """The predicted cost of a request, in seconds, on a decode worker and, unless it runs the prompt, a prefill worker.

    `wait` is the time in the queue, `prefill` the time to compute the uncached tokens, `transfer` the time to move the
    KV. `decode` is the time until decoding starts, and how much the request slows down the streams of the decode worker
    and they slow it down. `stall` is what other streams, running or to come, lose while a decode worker runs it.
    """

    prefill_worker: W | None
    decode_worker: W
    wait: float
    prefill: float
    transfer: float
    decode: float
    stall: float
    cached_tokens: int
    uncached_tokens: int
    has_kv_events: bool  # whether the worker that runs the prompt reports what it has cached
    rank: int = 0  # the data-parallel rank that runs the prompt
    decode_rank: int = 0
    distance: float = 0.0  # `routing.far_seconds` for each step that the two are apart
    load: LoadPlan = NO_LOAD  # a part of `prefill`, and of the cached tokens

    @property
    def total(self) -> float:
        """The cost that policies compare."""
        return self.wait + self.prefill + self.transfer + self.decode + self.stall + self.distance

    @property
    def first_token(self) -> float:
        """The time to the first token, which prefill returns before the KV moves."""
        return self.wait + self.prefill

    @property
    def runs_on(self) -> W:
        """The worker that runs the prompt."""
        return self.decode_worker if self.prefill_worker is None else self.prefill_worker

    def describe(self) -> str:
        """One line, in milliseconds."""
        where = self.prefill_worker.record.worker_id + " > " if self.prefill_worker else ""
        terms = ("wait", "prefill", "transfer", "decode", "stall", "distance")
        parts = " + ".join(f"{name} {getattr(self, name) * 1e3:.3g}" for name in terms if getattr(self, name))
        tokens = f"{self.cached_tokens} cached, {self.uncached_tokens} not"
        if self.load.seconds and not self.load.peer:
            loaded = f"{self.load.host_tokens} from host, {self.load.disk_tokens} from disk"
            tokens += f"; loads {loaded} in {self.load.seconds * 1e3:.3g} ms of prefill"
        if peer := self.load.peer:
            lender, saved = peer.record.worker_id, peer.saved_seconds * 1e3
            tokens += f"; pulls {peer.tokens} from {lender} in {peer.seconds * 1e3:.3g} ms instead of {saved:.3g}"
        return f"{where}{self.decode_worker.record.worker_id}: {self.total * 1e3:.3g} ms = {parts or 0} ({tokens})"


class Progress(Protocol):
    """Receives what happens to a request after its placement, so that a policy can learn from it."""

    def first_token(self, cached_tokens: int | None) -> None:
        """The prompt is computed. `cached_tokens` were in the worker's prefix cache; None if not reported yet."""

    def found_cached(self, cached_tokens: int) -> None:
        """The decode worker has finished, and reports how many tokens of the prompt were in its prefix cache."""

    def borrowed(self, tokens: int, seconds: float) -> None:
        """So many tokens of the prompt, perhaps none, came from the prediction's peer after so many seconds."""

    def peer_has_none(self) -> None:
        """The prediction's peer was asked, and has nothing of what it was expected to have."""

    def accepted(self, timings: Iterable[timing_pb2.StageTiming]) -> None:
        """The decode worker has taken the KV over."""

    def close(self) -> None:
        """The request has ended, or was placed again."""


class IgnoredProgress:
    """The Progress of policies that do not learn."""

    def first_token(self, cached_tokens: int | None) -> None:
        """No-op (Progress)."""

    def found_cached(self, cached_tokens: int) -> None:
        """No-op (Progress)."""

    def borrowed(self, tokens: int, seconds: float) -> None:
        """No-op (Progress)."""

    def peer_has_none(self) -> None:
        """No-op (Progress)."""

    def accepted(self, timings: Iterable[timing_pb2.StageTiming]) -> None:
        """No-op (Progress)."""

    def close(self) -> None:
        """No-op (Progress)."""


def _no_candidates(most: int) -> list[Prediction[Any]]:
    del most
    return []


@dataclass(slots=True)
class Placement(Generic[W]):
    """The worker that decodes, and the one that prefills. Without the latter the decode worker runs the prompt.

    `prediction` is set by policies that predict. Their `candidates` gives up to a number of the predictions that were
    compared, as they were: the chosen one, then the best. `progress` is told what happens to the request, and closed in
    the end.
    """

    decode: W
    prefill: W | None = None
    # Says in a few lines why these were chosen, for the request's trace. Called only if the trace is recorded.
    explain: Callable[[], list[str]] = field(default=list, compare=False)
    prediction: Prediction[W] | None = None
    progress: Progress = field(default=IgnoredProgress(), compare=False)
    candidates: Callable[[int], list[Prediction[W]]] = field(default=_no_candidates, compare=False)

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that runs the prompt; None to leave it to the load of the ranks."""
        return self.prediction.rank if self.prediction else None

    @property
    def decode_rank(self) -> int | None:
        """The rank of the decode worker; None to leave it to the load of the ranks."""
        return self.prediction.decode_rank if self.prediction else None

    @property
    def cache_view(self) -> generate_pb2.CacheView.ValueType:
        """The policy's source of knowledge about the prefix cache."""
        if self.prediction is None:
            return generate_pb2.CACHE_VIEW_NONE
        is_reported = self.prediction.has_kv_events
        return generate_pb2.CACHE_VIEW_REPORTED if is_reported else generate_pb2.CACHE_VIEW_ESTIMATED

    @property
    def topology(self) -> generate_pb2.Topology.ValueType:
        """The topology as clients see it."""
        return generate_pb2.TOPOLOGY_DISAGGREGATED if self.prefill else generate_pb2.TOPOLOGY_AGGREGATED


class Policy(Protocol):
    """Chooses the workers of a request. One object serves all requests of a router."""

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """Returns one of `candidates.decode`, and one of `candidates.prefill_for` it or None.

        None is not allowed if `candidates.requires_prefill`. Called on the event loop for each request, and again with
        fewer candidates when a worker has failed it: it must not block, and take well under a millisecond.
        """


@runtime_checkable
class PredictingPolicy(Policy, Protocol):
    """A policy that predicts what a request costs. It gets the blocks of prompts in `RoutingRequest.blocks`."""

    def predictions(self, request: RoutingRequest, candidates: Candidates[W]) -> list[Prediction[W]]:
        """The predictions for the most promising candidates."""

    def cache_view(self, process: str) -> generate_pb2.CacheView.ValueType:
        """The policy's source of knowledge about the prefix cache of a worker (`WorkerRecord.process`)."""
