"""The choice to pull the beginning of a prompt from another worker's prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.clock import ManualClock
from support.router.worker_views import worker

from baton.engine.v1 import handoff_pb2, prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2, timing_pb2
from discovery.record import PREFIX_LOANS, WorkerRecord
from router.routing.policy import Candidates, IgnoredProgress, KnownLoras, Placement, PromptBlocks, RoutingRequest
from router.routing.prefix.cost import Priors
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache
from router.workers.destinations import prefix_source, report_loan

SIZE, BLOCK_BYTES = 16, 1 << 20
PRIORS = Priors(prefill_base_seconds=0.0, prefill_tokens_per_second=1000.0, transfer_base_seconds=0.0)


@dataclass
class Seen:
    """A worker as the policy sees it."""

    record: WorkerRecord
    requests: int = 0
    load: cluster_service_pb2.WorkerLoad = field(default_factory=cluster_service_pb2.WorkerLoad)
    problem: str = ""
    others_tokens: int = 0
    wake_seconds: float = 0.0
    waiting_tokens: int = 0
    embedding_layout: str = ""
    encoder: str = ""
    token_seconds: float | None = None
    loras: KnownLoras = field(default_factory=KnownLoras)


def seen(worker_id: str, *roles: str, capabilities: Sequence[str] = (PREFIX_LOANS,)) -> Seen:
    return Seen(replace(worker(worker_id), roles=roles or ("prefill",), capabilities=tuple(capabilities)))


def policy(*, bytes_per_second: float = 1e9, prefix_loans: bool = True) -> PredictedSeconds:
    priors = replace(PRIORS, transfer_bytes_per_second=bytes_per_second)
    return PredictedSeconds(priors=priors, clock=ManualClock(), seed=1, prefix_loans=prefix_loans)


def request(blocks: int = 100, own_tokens: int = 8) -> RoutingRequest:
    tokens = blocks * SIZE + own_tokens
    prompt = prompt_pb2.Prompt(token_ids=range(tokens))
    keys = PromptBlocks(list(range(1, blocks + 1)), SIZE, BLOCK_BYTES)
    return RoutingRequest("demo", prompt, generate_pb2.RoutingOptions(), answer_tokens=1, blocks=keys)


def choose(chosen: PredictedSeconds, prefills: Sequence[Seen], lender: Seen) -> Placement[Seen]:
    """A placement where prefill workers must compute what the decode worker has."""
    chosen.caches.replace(Cache(lender.record.process), range(1, 101))
    return chosen.choose(request(), Candidates([lender], prefills, requires_prefill=True))


def test_what_is_sooner_pulled_than_computed_is_pulled() -> None:
    lender = seen("d", "decode")
    placement = choose(policy(), [seen("p")], lender)
    assert placement.prediction is not None
    peer = placement.prediction.load.peer
    assert peer is not None
    assert (peer.record.worker_id, peer.num_blocks, peer.tokens) == ("d", 100, 1600)
    assert placement.prediction.cached_tokens == 1600
    assert placement.prediction.load.seconds == pytest.approx(100 * BLOCK_BYTES / 1e9)
    assert placement.prediction.prefill == pytest.approx(8 / 1000 + 100 * BLOCK_BYTES / 1e9)
    assert "pulls 1600 from d" in placement.explain()[0]


@pytest.mark.parametrize("why", ["off", "slow link", "no lender", "no borrower"])
def test_otherwise_all_is_computed(why: str) -> None:
    chosen = policy(bytes_per_second=1e6 if why == "slow link" else 1e9, prefix_loans=why != "off")
    lender = seen("d", "decode", capabilities=() if why == "no lender" else (PREFIX_LOANS,))
    borrower = seen("p", capabilities=() if why == "no borrower" else (PREFIX_LOANS,))
    placement = choose(chosen, [borrower], lender)
    assert placement.prediction is not None
    assert placement.prediction.load.peer is None
    assert placement.prediction.cached_tokens == 0
    assert prefix_source(placement, borrower) is None  # type: ignore[arg-type]


def test_a_worker_that_has_the_prefix_itself_pulls_nothing() -> None:
    chosen, owner = policy(), seen("p")
    chosen.caches.replace(Cache(owner.record.process), range(1, 101))
    placement = choose(chosen, [owner], seen("d", "decode"))
    assert placement.prediction is not None
    assert placement.prediction.load.peer is None
    assert placement.prediction.cached_tokens == 1600


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_a_lender_has_in_host_memory_is_lent_after_its_load_and_nothing_of_its_disk(*, on_disk: bool) -> None:
    chosen, lender = policy(), seen("d", "decode")
    chosen.caches.replace(Cache(lender.record.process), range(1, 101))
    chosen.caches.move(Cache(lender.record.process), range(61, 101), on_disk=on_disk)
    placement = chosen.choose(request(), Candidates([lender], [seen("p")], requires_prefill=True))
    assert placement.prediction is not None
    peer = placement.prediction.load.peer
    assert peer is not None
    loading = PRIORS.load_base_seconds + 40 * BLOCK_BYTES / PRIORS.host_bytes_per_second
    assert peer.num_blocks == (60 if on_disk else 100)
    assert peer.loading_seconds == pytest.approx(0.0 if on_disk else loading)
    assert peer.seconds == pytest.approx(peer.num_blocks * BLOCK_BYTES / 1e9 + peer.loading_seconds)


def test_what_a_lender_takes_to_load_is_no_cost_of_the_link() -> None:
    chosen, lender, borrower = policy(), seen("d", "decode"), seen("p")
    chosen.caches.replace(Cache(lender.record.process), range(1, 101))
    chosen.caches.move(Cache(lender.record.process), range(2, 101), on_disk=False)
    link = chosen.costs.of(lender.record).loan_to(chosen.costs.of(borrower.record))
    before = link.seconds(100 * BLOCK_BYTES)
    for _ in range(20):
        placement = chosen.choose(request(), Candidates([lender], [borrower], requires_prefill=True))
        assert placement.prediction is not None
        assert placement.prediction.load.peer is not None
        placement.progress.borrowed(1600, placement.prediction.load.peer.seconds)
        placement.progress.close()
        chosen.caches.drop(borrower.record.process)
    assert link.seconds(100 * BLOCK_BYTES) == pytest.approx(before, rel=0.05)


def test_a_free_worker_with_a_loan_is_chosen_before_a_busy_one_that_has_the_prefix() -> None:
    chosen, busy, free = policy(), seen("busy"), seen("free")
    chosen.caches.replace(Cache(busy.record.process), range(1, 101))
    decode = seen("d", "decode")
    for _ in range(4):  # prompts of 1.6 s each that it is given
        long = request(own_tokens=1600)
        chosen.choose(long, Candidates([decode], [busy], requires_prefill=True))
    placement = chosen.choose(request(), Candidates([decode], [busy, free], requires_prefill=True))
    assert placement.prefill is free
    assert placement.prediction is not None
    assert placement.prediction.load.peer is not None
    assert placement.prediction.load.peer.record.worker_id == "busy"


def test_the_worker_is_told_where_and_how_long() -> None:
    borrower = seen("p")
    placement = choose(policy(), [borrower], lender := seen("d", "decode"))
    source = prefix_source(placement, borrower)  # type: ignore[arg-type]
    assert source is not None
    assert (source.worker_id, source.epoch, source.address) == ("d", lender.record.epoch, lender.record.address)
    assert source.num_blocks == 100
    assert source.patience.ToSeconds() == 1
    assert prefix_source(placement, lender) is None  # type: ignore[arg-type]


def test_measured_loans_correct_the_cost_of_the_link() -> None:
    chosen, lender, borrower = policy(), seen("d", "decode"), seen("p")
    for _ in range(20):
        placement = choose(chosen, [borrower], lender)
        usage = handoff_pb2.PromptUsage(cached_tokens=1600, peer_cached_tokens=1600)
        usage.peer_seconds.FromMilliseconds(400)
        report_loan(placement.progress, usage)
        placement.progress.close()
        chosen.caches.drop(borrower.record.process)
    assert placement.prediction is not None
    assert placement.prediction.load.seconds == pytest.approx(0.4, rel=0.2)


def test_late_loans_make_a_link_slow_until_it_is_not_used() -> None:
    chosen, lender, borrower = policy(), seen("d", "decode"), seen("p")
    loans = 0
    for _ in range(20):
        placement = choose(chosen, [borrower], lender)
        assert placement.prediction is not None
        if placement.prediction.load.peer is not None:
            loans += 1
            usage = handoff_pb2.PromptUsage()
            usage.peer_seconds.FromMilliseconds(1600)
            report_loan(placement.progress, usage)
        placement.progress.close()
        chosen.caches.drop(borrower.record.process)
    assert 0 < loans < 10


def test_what_an_estimated_lender_did_not_have_is_not_expected_there() -> None:
    chosen, lender, borrower = policy(), seen("d", "decode"), seen("p")
    cache = Cache(lender.record.process)
    chosen.caches.expect(cache, range(1, 101), 0.0)
    placement = chosen.choose(request(), Candidates([lender], [borrower], requires_prefill=True))
    usage = handoff_pb2.PromptUsage()
    usage.peer_seconds.FromMilliseconds(1)
    # As for a loan that this worker did not need any more, or had no room for.
    report_loan(placement.progress, usage)
    assert chosen.caches.match(range(1, 101))[cache] == 100
    usage.peer_has_none = True
    report_loan(placement.progress, usage)
    assert chosen.caches.match(range(1, 101)).get(cache, 0) == 0


def test_a_request_without_a_loan_reports_none() -> None:
    class Refusing(IgnoredProgress):
        def borrowed(self, tokens: int, seconds: float) -> None:
            raise AssertionError(tokens, seconds)

    report_loan(Refusing(), handoff_pb2.PromptUsage(cached_tokens=5))


def test_a_lender_that_has_left_is_not_known_again_by_what_its_loan_took() -> None:
    chosen, lender, borrower = policy(), seen("d", "decode"), seen("p")
    placement = choose(chosen, [borrower], lender)
    for gone in (lender, borrower):
        chosen.forget(gone.record.process)
    placement.progress.borrowed(1600, 0.2)
    placement.progress.accepted([timing_pb2.StageTiming(stage=timing_pb2.STAGE_HANDOFF_TRANSFER, num_bytes=1)])
    placement.progress.close()
    assert chosen.costs.num_workers == 0
