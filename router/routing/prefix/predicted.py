"""The policy predicted_seconds: a request goes where it costs the fewest seconds.

The cost counts the request's own time until it decodes, and the time that it takes from running streams. For each pair
of a prefill and a decode worker, and for each decode worker alone, the prediction is a sum of terms that a person can
check. The costs are learnt from the requests that this router has sent.
"""

import hashlib
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TypeAlias

from baton.inference.v1 import generate_pb2
from router.routing.latency import Clock
from router.routing.policy import Candidates, Placement, Prediction, RoutingRequest, W
from router.routing.prefix.cost import Costs, Priors
from router.routing.prefix.forecast import Forecast
from router.routing.prefix.places import Place, add_decoding, places_of
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from router.routing.prefix.work import ArrivalRate

# How many workers of each role are combined into pairs: the best ones by their own terms.
_PAIRED = 3
# Predictions are equal if they differ by less than this share of the least, or by less than so many seconds.
_EQUAL_SHARE = 0.1
_EQUAL_SECONDS = 0.001

# The total, a place to prefill unless the prompt runs on the decode worker, and a place to decode. Plain tuples: dozens
# are made for each request.
Option: TypeAlias = tuple[float, Place[W] | None, Place[W]]
_total = itemgetter(0)
# The order in which places are combined into pairs: those that were given less work come first among equals.
_by_first_token = attrgetter("first_token", "work.given_seconds")
_by_decode = attrgetter("decode", "work.given_seconds")


class PredictedSeconds:
    """Predicts what a request costs on each pair of workers, and learns from what it did.

    `temperature_seconds` is 0 to take the best place, or more to take others too, the less often the more they cost.
    """

    def __init__(
        self,
        temperature_seconds: float = 0.0,
        *,
        caches: PrefixCaches | None = None,
        priors: Priors | None = None,
        clock: Clock = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.caches = caches or PrefixCaches(clock)
        self.costs = Costs(priors, clock)
        self._temperature_seconds = temperature_seconds
        self._clock = clock
        self._arrivals = ArrivalRate(clock)
        self._random = random.Random(seed)

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """The best place, which counts as busy with the prompt until the placement's progress is closed."""
        matched = self.caches.match(request.blocks.keys)
        self._arrivals.count()
        self.costs.fade()
        options = self._options(request, candidates, matched)
        chosen = self._predict(self._pick(options, request.session_key), request)
        forecast = Forecast(self.caches, self.costs, request, chosen, matched, self._clock)
        explain = partial(self._explain, chosen, options, request)
        return Placement(chosen.decode_worker, chosen.prefill_worker, explain, chosen, forecast)

    def predictions(self, request: RoutingRequest, candidates: Candidates[W]) -> list[Prediction[W]]:
        """The predictions for the most promising pairs and, unless prefill is required, each decode worker alone."""
        matched = self.caches.match(request.blocks.keys)
        return [self._predict(option, request) for option in self._options(request, candidates, matched)]

    def cache_view(self, process: str) -> generate_pb2.CacheView.ValueType:
        """See PredictingPolicy."""
        is_reported = self.caches.reports(process)
        return generate_pb2.CACHE_VIEW_REPORTED if is_reported else generate_pb2.CACHE_VIEW_ESTIMATED

    def forget(self, process: str) -> None:
        """Forgets a worker that has left."""
        self.caches.drop(process)
        self.costs.forget(process)

    def _pick(self, options: Sequence[Option[W]], session_key: str) -> Option[W]:
        least = min(options, key=_total)[0]
        if self._temperature_seconds:
            weights = [math.exp((least - option[0]) / self._temperature_seconds) for option in options]
            return self._random.choices(options, weights)[0]
        bound = least + max(_EQUAL_SECONDS, least * _EQUAL_SHARE)
        equals = [option for option in options if option[0] <= bound]
        if len(equals) == 1:
            return equals[0]
        if session_key:
            return max(equals, key=partial(_affinity, session_key))
        # Of the prefill workers, if one is among them, that which was given the least work: so they compute and cache
        # about the same, and decode workers have a prompt only where that gains something.
        return min(equals, key=_preference)

    def _options(
        self, request: RoutingRequest, candidates: Candidates[W], matched: Mapping[Cache, int]
    ) -> list[Option[W]]:
        now = self._clock()
        decodes = places_of(candidates.decode, request, matched, self.costs, now)
        add_decoding(decodes, request, self.costs.priors.stream_seconds, self._arrivals.per_second / len(decodes))
        options = []
        if candidates.prefill:
            prefills = places_of(candidates.prefill, request, matched, self.costs, now)
            best = sorted(prefills, key=_by_first_token)[:_PAIRED], sorted(decodes, key=_by_decode)[:_PAIRED]
            options = _pairs(*best, request) or _pairs(prefills, decodes, request)
        if not candidates.requires_prefill:
            # Where streams wait for memory already, a prompt of its own would only make them wait longer.
            able = [place for place in decodes if place.has_room] if options else decodes
            options += [(place.first_token + place.decode + place.stall, None, place) for place in able]
        return options

    def _predict(self, option: Option[W], request: RoutingRequest) -> Prediction[W]:
        _, prefill, decode = option
        place = prefill or decode
        transfer = prefill.cost.way_to(decode.cost).seconds(_moved_bytes(decode, request)) if prefill else 0.0
        return Prediction(
            prefill_worker=prefill.worker if prefill else None,
            decode_worker=decode.worker,
            wait=place.wait,
            prefill=place.prefill,
            transfer=transfer,
            decode=decode.decode + (decode.late(place.first_token + transfer) if prefill else 0.0),
            stall=0.0 if prefill else decode.stall,
            cached_tokens=place.cached_tokens,
            uncached_tokens=request.prompt_tokens - place.cached_tokens,
            has_kv_events=self.caches.reports(place.cost.process),
            rank=place.rank,
            decode_rank=decode.rank,
        )

    def _explain(self, chosen: Prediction[W], options: Sequence[Option[W]], request: RoutingRequest) -> list[str]:
        """The chosen place, then all others, the best first."""
        found = [self._predict(option, request) for option in sorted(options, key=_total)]
        return [chosen.describe(), *(each.describe() for each in found if each != chosen)]


def _pairs(prefills: Sequence[Place[W]], decodes: Sequence[Place[W]], request: RoutingRequest) -> list[Option[W]]:
    options: list[Option[W]] = []
    for decode in decodes:
        moved, process, wait, joins = _moved_bytes(decode, request), decode.cost.process, decode.wait, decode.decode
        for prefill in prefills:
            way = prefill.cost.ways.get(process) or prefill.cost.way_to(decode.cost)
            if way.exists:
                arrival = prefill.first_token + way.seconds(moved)
                # As `decode.late(arrival)`.
                options.append(((wait if wait > arrival else arrival) + joins, prefill, decode))
    return options


def _moved_bytes(decode: Place[W], request: RoutingRequest) -> float:
    """What a handoff to a decode worker moves: the blocks that it does not have."""
    blocks = request.blocks
    return (request.prompt_tokens - decode.cached_tokens) / blocks.block_tokens * blocks.block_bytes


def _preference(option: Option[W]) -> tuple[bool, float]:
    _, prefill, decode = option
    return prefill is None, (prefill or decode).work.given_seconds


def _affinity(session_key: str, option: Option[W]) -> bytes:
    """Highest for one place of each session (rendezvous hashing)."""
    workers = [place.worker.record.worker_id for place in option[1:] if place]
    return hashlib.blake2b("\0".join([session_key, *workers]).encode(), digest_size=8).digest()
