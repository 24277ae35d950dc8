"""The effect of a request's options on ids that are all equally likely."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from baton.errors import InvalidRequest
from services.engines.bad_words import BadWords
from services.engines.prompt import Sampling


class Preferences:
    """Bans, biases and penalties of one request, over a model whose logits are 0 for `ordinary` ids.

    A bias above 0 adds an id that is not ordinary. The other options change nothing among equal logits: a repetition
    penalty multiplies 0, and of ids that are equally likely top_k, top_p and min_p may keep any.
    """

    def __init__(self, ordinary: Sequence[int], eos_token_id: int, sampling: Sampling, emitted: Sequence[int]) -> None:
        self._ordinary = ordinary
        self._possible = frozenset(ordinary) if sampling.bad_sequences or _weighs(sampling) else frozenset()
        self._sampling = sampling
        self._ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | {eos_token_id}
        self._generated = len(emitted)
        self._counts = Counter(emitted)
        self._bad_words = BadWords(sampling.bad_sequences, emitted) if sampling.bad_sequences else None
        self._check_ids_are_left()

    def append(self, token_id: int) -> None:
        """Records the id that was generated."""
        self._generated += 1
        self._counts[token_id] += 1
        if self._bad_words is not None:
            self._bad_words = self._bad_words.after((token_id,))

    def banned(self) -> set[int]:
        """The ids that must not come now: those that end the answer too early, or complete bad words."""
        banned = set(self._ends) if self._generated < self._sampling.min_tokens else set()
        return banned if self._bad_words is None else banned | self._bad_words.banned()

    def choose(self, value: int) -> int:
        """Returns an id, for a random number of 32 bits."""
        banned = self.banned()
        logits = self._logits(banned)
        others = len(self._ordinary) - len(self._possible & (banned | logits.keys())) if self._possible else 1
        if logits and (self._sampling.temperature == 0 or self._sampling.top_k == 1):
            best = max(logits.values())
            if best > 0 or not others:
                likeliest = [token_id for token_id, logit in logits.items() if logit == best]
                return likeliest[value % len(likeliest)]
        elif logits:
            drawn = _draw(logits, self._sampling.temperature, others, value / 2**32)
            if drawn is not None:
                return drawn
        return self._next_other(value, banned | logits.keys())

    def _next_other(self, value: int, excluded: set[int]) -> int:
        """Returns the ordinary id of this number, or the first one after it that is not excluded."""
        count = len(self._ordinary)
        places = (self._ordinary[(value + step) % count] for step in range(count))
        return next(token_id for token_id in places if token_id not in excluded)

    def _logits(self, banned: set[int]) -> dict[int, float]:
        """Returns the logits that are not 0, of ids that are not banned."""
        sampling = self._sampling
        if not _weighs(sampling):
            return {}
        logits = {key: bias for key, bias in sampling.logit_bias.items() if bias > 0 or key in self._possible}
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token_id, count in self._counts.items():
                if token_id in self._possible or token_id in logits:
                    penalty = sampling.presence_penalty + sampling.frequency_penalty * count
                    logits[token_id] = logits.get(token_id, 0.0) - penalty
        equal = {key for key, logit in logits.items() if not logit and key in self._possible}
        return {key: logit for key, logit in logits.items() if key not in banned | equal}

    def _check_ids_are_left(self) -> None:
        """Raises InvalidRequest if every ordinary id could be banned at one position."""
        ends = self._ends if self._sampling.min_tokens else frozenset()
        banned = ends | {sequence[-1] for sequence in self._sampling.bad_sequences}
        if len(banned) >= len(self._ordinary) and banned.issuperset(self._ordinary):
            field = "sampling.bad_sequences" if self._sampling.bad_sequences else "sampling.stop_token_ids"
            raise InvalidRequest.of(field, f"could ban all {len(self._ordinary)} tokens that are generated")


def preferences_of(
    ordinary: Sequence[int], eos_token_id: int, sampling: Sampling, emitted: Sequence[int]
) -> Preferences | None:
    """Returns the preferences of a request; None if it has none. Raises InvalidRequest if it could ban every id."""
    if sampling.bad_sequences or sampling.min_tokens > len(emitted) or _weighs(sampling):
        return Preferences(ordinary, eos_token_id, sampling, emitted)
    return None


def _weighs(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty)


def _draw(logits: Mapping[int, float], temperature: float, others: int, fraction: float) -> int | None:
    """Returns one of these ids by its probability beside `others` ids with the logit 0; None for one of those."""
    highest = max(0.0, *logits.values())
    weights = {token_id: math.exp((logit - highest) / temperature) for token_id, logit in logits.items()}
    point = fraction * (sum(weights.values()) + others * math.exp(-highest / temperature))
    for token_id, weight in weights.items():
        point -= weight
        if point < 0:
            return token_id
    # Rounding may pass the end of the last weight.
    return None if others else max(weights, key=lambda token_id: weights[token_id])
