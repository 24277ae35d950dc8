"""The policy predicted_seconds: a request goes where it costs the fewest seconds.

The cost counts the request's own time until it decodes, and the time that it takes from running streams. For each pair
of a prefill and a decode worker, and for each decode worker alone, the prediction is a sum of terms that a person can
check. The costs are learnt from the requests that this router has sent.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeAlias

from baton.inference.v1 import generate_pb2
from router.routing.latency import Clock
from router.routing.policy import NO_LOAD, Candidates, LoadPlan, Placement, Prediction, RoutingRequest, W
from router.routing.prefix.cost import Costs, Nearness, Priors, WorkerCost
from router.routing.prefix.forecast import Forecast
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.routing.prefix.rank_costs import DecodeFields, Matched, PrefillFields, RankCosts
from router.routing.prefix.work import ArrivalRate
from runtime.clock import monotonic

# How many workers of each role are combined into pairs: the best ones by their own terms.
_PAIRED = 3
# Predictions are equal if they differ by less than this share of the time to compute the prompt where that is least, or
# by less than so many seconds. Of that time, not of the total: behind a long queue a cached prefix is worth as much.
_EQUAL_SHARE = 0.1
_EQUAL_SECONDS = 0.001

# The total, a rank to prefill unless the prompt runs on the decode worker, and a rank to decode. Plain tuples: dozens
# are made for each request.
Option: TypeAlias = tuple[float, PrefillFields[W] | None, DecodeFields[W]]
_total = itemgetter(0)


class PredictedSeconds:
    """Predicts what a request costs on each pair of workers, and learns from what it did.

    `temperature_seconds` is 0 to take the best rank, or more to take others too, the less often the more they cost.
    With `prefix_loans` workers are to pull what others have of a prompt, where that is sooner than computing it.
    """

    def __init__(
        self,
        temperature_seconds: float = 0.0,
        *,
        caches: PrefixCaches | None = None,
        priors: Priors | None = None,
        clock: Clock = monotonic,
        seed: int | None = None,
        nearness: Nearness | None = None,
        prefix_loans: bool = False,
    ) -> None:
        self._prefix_loans = prefix_loans
        self.caches = caches or PrefixCaches(clock)
        self.costs = Costs(priors, clock, nearness)
        self._rank_costs = RankCosts(self.costs)
        self._looks_at_places = nearness is not None and nearness != Nearness()
        self._temperature_seconds = temperature_seconds
        self._clock = clock
        self._arrivals = ArrivalRate(clock)
        self._random = random.Random(seed)

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """The best rank, which counts as busy with the prompt until the placement's progress is closed."""
        matched = self._match(request, candidates)
        self._arrivals.count()
        self.costs.fade()
        options = self._options(request, candidates, matched)
        chosen = self._predict(self._pick(options, request.session_key), request, matched)
        forecast = Forecast(self.caches, self.costs, request, chosen, matched.blocks, self._clock)
        compared = partial(self._compared, chosen, options, request, matched)
        explain = partial(_describe, compared, len(options))
        return Placement(chosen.decode_worker, chosen.prefill_worker, explain, chosen, forecast, compared)

    def predictions(self, request: RoutingRequest, candidates: Candidates[W]) -> list[Prediction[W]]:
        """The predictions for the most promising pairs and, unless prefill is required, each decode worker alone."""
        matched = self._match(request, candidates)
        return [self._predict(option, request, matched) for option in self._options(request, candidates, matched)]

    def cache_view(self, process: str) -> generate_pb2.CacheView.ValueType:
        is_reported = self.caches.reports(process)
        return generate_pb2.CACHE_VIEW_REPORTED if is_reported else generate_pb2.CACHE_VIEW_ESTIMATED

    def forget(self, process: str) -> None:
        """Forgets a worker that has left."""
        self.caches.drop(process)
        self.costs.forget(process)
        self._rank_costs.forget()

    def _match(self, request: RoutingRequest, candidates: Candidates[W]) -> Matched:
        keys = request.blocks.keys
        blocks = self.caches.match(keys)
        matched = Matched(blocks, self.caches.below(keys, blocks))
        if not self._prefix_loans or not blocks:
            return matched
        groups = candidates.prefill, candidates.decode
        return matched._replace(lenders=self._rank_costs.lenders(groups, request, matched))

    def _pick(self, options: Sequence[Option[W]], session_key: str) -> Option[W]:
        totals = [total for total, _, _ in options]
        least = min(totals)
        if self._temperature_seconds:
            weights = [math.exp((least - total) / self._temperature_seconds) for total in totals]
            return self._random.choices(options, weights)[0]
        _, apart, (_, _, _, here, _, _) = options[totals.index(least)]
        bound = least + max(_EQUAL_SECONDS, _EQUAL_SHARE * (apart or here)[4])
        equals = [option for option in options if option[0] <= bound]
        if len(equals) == 1:
            return equals[0]
        if session_key:
            return max(equals, key=partial(_affinity, session_key))
        # Of the prefill workers, if one is among them, that which was given the least work: so they compute and cache
        # about the same, and decode workers have a prompt only where that gains something. Then the decode worker that
        # was given the fewest streams.
        pairs = [option for option in equals if option[1] is not None]
        return min(pairs or equals, key=_given)

    def _options(self, request: RoutingRequest, candidates: Candidates[W], matched: Matched) -> list[Option[W]]:
        now, ranks = self._clock(), self._rank_costs
        decodes = ranks.to_decode(candidates.decode, request, matched, now, self._arrivals.per_second)
        options: list[Option[W]] = []
        if candidates.prefill:
            prefills = ranks.to_prefill(candidates.prefill, request, matched, now)
            best = sorted(decodes)[:_PAIRED]
            if self._looks_at_places:
                options = [
                    each for decode in best for each in _pairs(_nearest(prefills, decode), [decode], request, matched)
                ]
            else:
                options = _pairs(sorted(prefills)[:_PAIRED], best, request, matched)
            options = options or _pairs(prefills, decodes, request, matched)
        if not candidates.requires_prefill:
            # Where streams wait for memory already, a prompt of its own would only make them wait longer.
            needs_no_memory = not options
            for rank in decodes:
                decode, _, _, here, stall, has_memory = rank
                if has_memory or needs_no_memory:
                    options.append((here[0] + decode + stall, None, rank))
        return options

    def _predict(self, option: Option[W], request: RoutingRequest, matched: Matched) -> Prediction[W]:
        _, apart, (joins, _, _, here, stall, _) = option
        first_token, _, _, wait, prefill, cached, worker, cost, work = apart or here
        _, _, _, held_up, _, have, reader, reader_cost, reader_work = here
        transfer = late = distance = 0.0
        if apart is not None:
            link = cost.link_to(reader_cost)
            have_in_pool = _in_pool(have, matched, reader_work.cache, request)
            transfer, distance = link.seconds(_moved_bytes(have_in_pool, request)), link.distance
            late = max(0.0, held_up - (first_token + transfer))
        return Prediction(
            prefill_worker=None if apart is None else worker,
            decode_worker=reader,
            wait=wait,
            prefill=prefill,
            transfer=transfer,
            decode=joins + late,
            stall=stall if apart is None else 0.0,
            cached_tokens=cached,
            uncached_tokens=request.prompt_tokens - cached,
            has_kv_events=self.caches.reports(cost.process),
            rank=work.cache.rank,
            decode_rank=reader_work.cache.rank,
            distance=distance,
            load=self._load(cost, request, matched, work.cache, wait),
        )

    def _load(self, cost: WorkerCost, request: RoutingRequest, matched: Matched, cache: Cache, wait: float) -> LoadPlan:
        if not matched.below and not matched.lenders:
            return NO_LOAD
        return self._rank_costs.plan(cost, request, matched, cache, wait)[1]

    def _compared(
        self, chosen: Prediction[W], options: Sequence[Option[W]], request: RoutingRequest, matched: Matched, most: int
    ) -> list[Prediction[W]]:
        """The chosen rank, then others, the best first."""
        found = (self._predict(option, request, matched) for option in sorted(options, key=_total)[:most])
        return [chosen, *(each for each in found if each != chosen)][:most]


def _describe(compared: Callable[[int], list[Prediction[W]]], most: int) -> list[str]:
    return [each.describe() for each in compared(most)]


def _nearest(prefills: Sequence[PrefillFields[W]], decode: DecodeFields[W]) -> Sequence[PrefillFields[W]]:
    """The best ones for this decode worker, of those that are near enough, with what their distance costs."""
    reader = decode[3][7]
    links = [(prefill[7].link_to(reader), prefill) for prefill in prefills]
    near = [(prefill[0] + link.distance, prefill) for link, prefill in links if link.exists]
    return [prefill for _, prefill in sorted(near, key=itemgetter(0))[:_PAIRED]]


def _given(option: Option[W]) -> tuple[float, float]:
    """The tokens that the rank which would run the prompt was given, and the streams of that which would decode."""
    _, apart, (_, streams, _, here, _, _) = option
    return (apart or here)[1], streams


def _pairs(
    prefills: Sequence[PrefillFields[W]], decodes: Sequence[DecodeFields[W]], request: RoutingRequest, matched: Matched
) -> list[Option[W]]:
    options: list[Option[W]] = []
    for decode in decodes:
        joins, _, _, (_, _, _, wait, _, cached, _, reader, work), _, _ = decode
        if work.cache in matched.below:
            cached = _in_pool(cached, matched, work.cache, request)
        moved, process = _moved_bytes(cached, request), reader.process
        for prefill in prefills:
            first_token, _, _, _, _, _, _, cost, _ = prefill
            link = cost.links.get(process) or cost.link_to(reader)
            if link.exists:
                usual = link.usual
                # As `link.seconds(moved)`; it waits for the prompts that still run there when it arrives.
                arrival = first_token + link.slowness * (usual.base + moved * usual.rate)
                options.append(((wait if wait > arrival else arrival) + joins + link.distance, prefill, decode))
    return options


def _moved_bytes(cached_tokens: int, request: RoutingRequest) -> float:
    """The bytes that a handoff moves to a decode worker that has `cached_tokens`: the blocks that it does not have."""
    blocks = request.blocks
    return (request.prompt_tokens - cached_tokens) / blocks.block_tokens * blocks.block_bytes


def _in_pool(cached_tokens: int, matched: Matched, cache: Cache, request: RoutingRequest) -> int:
    """Of the tokens that a decode worker has, those in the pool of its device: only they are not moved."""
    below = matched.below.get(cache)
    if below is None:
        return cached_tokens
    in_pool = matched.blocks[cache] - below.host - below.disk
    return min(cached_tokens, in_pool * request.blocks.block_tokens)


def _affinity(session_key: str, option: Option[W]) -> bytes:
    """Highest for one rank of each session (rendezvous hashing)."""
    _, prefill, (_, _, _, here, _, _) = option
    workers = [rank[6].record.worker_id for rank in (prefill, here) if rank]
    return hashlib.blake2b("\0".join([session_key, *workers]).encode(), digest_size=8).digest()
