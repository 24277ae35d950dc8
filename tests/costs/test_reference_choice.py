"""The quick choice of predicted_seconds is that of the plain sums of docs/routing.md, in random states."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from support.clock import ManualClock

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from discovery.record import WorkerRecord
from router.routing.policy import Candidates, KnownLoras, Prediction, PromptBlocks, RoutingRequest, can_hand_over
from router.routing.prefix.cost import RelativeCost
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache

SIZE, BLOCK_BYTES = 16, 1 << 20
LAYOUTS = ("a" * 64, "b" * 64)


@dataclass
class Seen:
    """A worker as the policy sees it."""

    record: WorkerRecord
    load: cluster_service_pb2.WorkerLoad
    requests: int = 0
    others_tokens: int = 0
    wake_seconds: float = 0.0
    problem: str = ""
    waiting_tokens: int = 0
    embedding_layout: str = ""
    encoder: str = ""
    token_seconds: float | None = None
    loras: KnownLoras = KnownLoras()  # noqa: RUF009  # it has none


@dataclass(frozen=True)
class Sum:
    """The cost of a request at one place, by terms, and the work that the place of the prompt was given."""

    prefill: tuple[str, int] | None  # worker and rank
    decode: tuple[str, int]
    wait: float
    compute: float
    transfer: float
    joining: float
    stall: float
    cached: int
    given: tuple[float, float]  # tokens where it is computed, and streams where it is decoded

    @property
    def total(self) -> float:
        return self.wait + self.compute + self.transfer + self.joining + self.stall


class State:
    """A policy with a random past, and what its caches were told."""

    def __init__(self, seed: int) -> None:
        self.source, self.clock = random.Random(seed), ManualClock()
        self.policy = PredictedSeconds(clock=self.clock, seed=seed)
        layouts = LAYOUTS[: self.source.choice([1, 1, 2])]
        self.prefill = [self._worker(f"p{index}", "prefill", layouts) for index in range(self.source.randrange(6))]
        self.decode = [self._worker(f"d{index}", "decode", layouts) for index in range(self.source.randrange(1, 6))]
        self.cached: dict[Cache, set[int]] = {}
        for worker in self.prefill + self.decode:
            for rank in range(worker.record.data_parallel_ranks):
                self.cached[Cache(worker.record.process, rank)] = set()
        self.prompts = [[self.source.getrandbits(64) for _ in range(self.source.randrange(60))] for _ in range(6)]
        for cache in self.cached:
            self.policy.caches.replace(cache, ())
        for _ in range(30):
            self.change()

    def _worker(self, name: str, role: str, layouts: Sequence[str]) -> Seen:
        ranks, layout = self.source.choice([1, 1, 2]), self.source.choice(layouts)
        record = WorkerRecord(name, 1, "x:1", (role,), "m", "e", layout, 10_000, data_parallel_ranks=ranks)
        return Seen(record, cluster_service_pb2.WorkerLoad(blocks_total=self.source.choice([0, 100, 5000])))

    def change(self) -> None:
        """Anything that makes the next decision another one."""
        source, costs = self.source, self.policy.costs
        self.clock.advance(source.random() * 0.2)
        worker = source.choice(self.prefill + self.decode)
        cost = costs.of(worker.record)
        rank = source.choice(cost.ranks)
        match source.randrange(8):
            case 0:
                worker.requests = source.choice([0, source.randrange(9)])
                worker.others_tokens = source.choice([0, source.randrange(5000)])
            case 1:
                running = source.randrange(5)
                used = source.randrange(worker.load.blocks_total + 1)
                total = worker.load.blocks_total
                worker.load = cluster_service_pb2.WorkerLoad(running=running, blocks_total=total, blocks_used=used)
            case 2:
                source.choice([cost.prefill, cost.entry]).add(source.randrange(2000), source.random())
            case 3:
                reader = costs.of(source.choice(self.decode).record)
                cost.link_to(reader).add(source.randrange(1 << 26), source.random())
            case 4:
                ticket = costs.shares.give(rank, rank, source.randrange(2000), source.random())
                if source.random() < 0.5:
                    rank.queue.done(ticket, 100)
            case 5:
                for _ in range(source.randrange(60)):
                    self.policy._arrivals.count()
            case 6:
                cost.coming = source.choice([0, source.randrange(4)])
            case _:
                self._store(rank.cache)

    def _store(self, cache: Cache) -> None:
        keys = self.source.choice(self.prompts)
        stored, gone = keys[: self.source.randrange(len(keys) + 1)], self.source.sample(keys, min(len(keys), 2))
        self.policy.caches.store(cache, stored)
        self.policy.caches.remove(cache, gone)
        self.cached[cache] = (self.cached[cache] | set(stored)) - set(gone)

    def request(self) -> RoutingRequest:
        keys = self.source.choice(self.prompts)
        tokens = range(len(keys) * SIZE + self.source.randrange(1, SIZE))
        session = self.source.choice(["", "", "some session"])
        return RoutingRequest(
            "m",
            prompt_pb2.Prompt(token_ids=tokens),
            generate_pb2.RoutingOptions(session_key=session),
            answer_tokens=self.source.randrange(1, 300),
            blocks=PromptBlocks(keys, SIZE, BLOCK_BYTES),
            token_ids=self.source.choice([(), tokens]),
        )

    def candidates(self) -> Candidates[Seen]:
        """All workers; only pairs, if each decode worker has one."""
        able = Candidates(tuple(self.decode), tuple(self.prefill))
        paired = all(able.prefill_for(decode) for decode in self.decode)
        return replace(able, requires_prefill=paired and self.source.random() < 0.3)


def linear(cost: RelativeCost, amount: float) -> float:
    return cost.slowness * (cost.usual.base + amount * cost.usual.rate)


def sums(state: State, request: RoutingRequest, candidates: Candidates[Seen], rate: float) -> list[Sum]:
    """The best places to decode with the best ones to prefill, and each alone, where `rate` requests a second come."""
    costs, tokens = state.policy.costs, request.prompt_tokens
    places = {
        (worker.record.worker_id, rank.cache.rank): (worker, costs.of(worker.record), rank)
        for worker in (*candidates.prefill, *candidates.decode)
        for rank in costs.of(worker.record).ranks
    }
    prefills = [key for key in places if key[0].startswith("p")]
    decodes = [key for key in places if key[0].startswith("d")]
    slower = costs.priors.stream_seconds * min(request.answer_tokens, 128)

    def cached(key: tuple[str, int]) -> int:
        have, count = state.cached[places[key][2].cache], 0
        while count < len(request.blocks.keys) and request.blocks.keys[count] in have:
            count += 1
        return min(count, (tokens - 1) // SIZE) * SIZE

    def first(key: tuple[str, int]) -> tuple[float, float]:
        worker, cost, rank = places[key]
        others = worker.others_tokens * cost.prefill.slowness * cost.prefill.usual.rate / len(cost.ranks)
        return rank.queue.wait_seconds + others, linear(cost.prefill, tokens - cached(key))

    def joining(key: tuple[str, int]) -> tuple[float, bool]:
        worker, cost, _ = places[key]
        there, load = worker.requests + cost.coming, worker.load
        waiting = max(0, there - load.running)
        free = (load.blocks_total - load.blocks_used) * SIZE
        has_capacity = not load.blocks_total or free >= tokens - cached(key) + waiting * tokens
        return linear(cost.entry, 0.0) + there * slower + (0.0 if has_capacity else 1.0 + waiting), has_capacity

    def pairs(prefills: Sequence[tuple[str, int]], decodes: Sequence[tuple[str, int]]) -> list[Sum]:
        found = []
        for decode in decodes:
            for prefill in prefills:
                if not can_hand_over(places[prefill][0].record, places[decode][0].record):
                    continue
                (wait, compute), held_up = first(prefill), first(decode)[0]
                moved = (tokens - cached(decode)) / SIZE * BLOCK_BYTES
                transfer = linear(places[prefill][1].link_to(places[decode][1]), moved)
                late = max(0.0, held_up - (wait + compute + transfer))
                terms = wait, compute, transfer, joining(decode)[0] + late, 0.0
                found.append(Sum(prefill, decode, *terms, cached(prefill), (tokens_of(prefill), streams_of(decode))))
        return found

    def tokens_of(key: tuple[str, int]) -> float:
        return places[key][2].given_tokens

    def streams_of(key: tuple[str, int]) -> float:
        return places[key][2].given_streams

    best = sorted(prefills, key=lambda key: (sum(first(key)), tokens_of(key)))[:3]
    readers = sorted(decodes, key=lambda key: (joining(key)[0], streams_of(key)))[:3]
    found = pairs(best, readers) or pairs(prefills, decodes)
    if candidates.requires_prefill:
        return found
    for key in decodes if not found else [key for key in decodes if joining(key)[1]]:
        wait, compute = first(key)
        stall = 2.0 * (places[key][0].requests + rate / len(decodes) * compute / 2) * compute
        found.append(
            Sum(None, key, wait, compute, 0.0, joining(key)[0], stall, cached(key), (tokens_of(key), streams_of(key)))
        )
    return found


def best_of(found: Sequence[Sum], session_key: str) -> Sum:
    """The least sum; of those a tenth of its computing time around it that of the session, or the least given work."""
    least = min(found, key=lambda each: each.total)
    equals = [each for each in found if each.total <= least.total + max(0.001, least.compute * 0.1)]
    if session_key and len(equals) > 1:
        return max(equals, key=lambda each: _affinity(session_key, each))
    return min(equals, key=lambda each: (each.prefill is None, each.given))


def _affinity(session_key: str, each: Sum) -> bytes:
    workers = [place[0] for place in (each.prefill, each.decode) if place]
    return hashlib.blake2b("\0".join([session_key, *workers]).encode(), digest_size=8).digest()


def terms_of(prediction: Prediction[Seen]) -> Sum:
    prefill = prediction.prefill_worker
    return Sum(
        (prefill.record.worker_id, prediction.rank) if prefill else None,
        (prediction.decode_worker.record.worker_id, prediction.decode_rank),
        prediction.wait,
        prediction.prefill,
        prediction.transfer,
        prediction.decode,
        prediction.stall,
        prediction.cached_tokens,
        (0.0, 0.0),
    )


def numbers(each: Sum) -> list[float]:
    return [each.wait, each.compute, each.transfer, each.joining, each.stall, each.cached, each.total]


@pytest.mark.parametrize("seed", range(40))
def test_the_places_their_terms_and_the_choice_are_those_of_the_plain_sums(seed: int) -> None:
    state = State(seed)
    for _ in range(8):
        for _ in range(3):
            state.change()
        request, candidates = state.request(), state.candidates()
        state.policy.costs.fade()  # as a choice does
        rate = state.policy._arrivals.per_second
        expected = sums(state, request, candidates, rate)
        # A choice counts its own request.
        best = best_of(sums(state, request, candidates, rate + 1 / 30), request.session_key)
        found = [terms_of(each) for each in state.policy.predictions(request, candidates)]
        assert [(each.prefill, each.decode) for each in found] == [(each.prefill, each.decode) for each in expected]
        for one, other in zip(found, expected, strict=True):
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-9, abs=1e-12)
        placement = state.policy.choose(request, candidates)
        assert placement.prediction is not None
        chosen = terms_of(placement.prediction)
        assert (chosen.prefill, chosen.decode) == (best.prefill, best.decode)
        assert numbers(chosen) == pytest.approx(numbers(best), rel=1e-9, abs=1e-12)
        placement.progress.close()
        state.clock.advance(200.0)  # what was sent is not expected to be cached any more
