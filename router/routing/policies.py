"""The built-in policies, and how `routing.policy` of the configuration names one or a plug-in."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from discovery.record import steps_apart
from engine_protocol.timing_profile import read_timing_profile
from router.config import RoutingConfig
from router.routing.policy import Candidates, IgnoredProgress, Placement, Policy, RoutingRequest, W
from router.routing.prefix.cost import Nearness, Priors, priors_of
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.scoring import Preferences, Scored, pick, score_workers

_GROUP = "baton.policies"


class _ComingDecode(IgnoredProgress):
    """Counts a request at the worker that will decode it, until its prompt is computed: from then on that worker's own
    load counts it.
    """

    def __init__(self, coming: defaultdict[str, int], process: str) -> None:
        self._coming = coming
        self._process = process
        coming[process] += 1

    def first_token(self, cached_tokens: int | None) -> None:
        del cached_tokens
        self.close()

    def close(self) -> None:
        if not self._process:
            return
        self._coming[self._process] -= 1
        if not self._coming[self._process]:
            del self._coming[self._process]
        self._process = ""


class LeastLoaded:
    """The least loaded workers, by turns among equals. Sessions stay on their own workers.

    `session_slack` is how many requests busier than the least loaded a session's own worker may be, and with
    `prefers_near` the prefill worker that is nearest to the decode worker.
    """

    def __init__(self, session_slack: float = 8.0, *, prefers_near: bool = False) -> None:
        self._session_slack = session_slack
        self._prefers_near = prefers_near
        self._turns = {"prefill": itertools.count(), "decode": itertools.count()}
        # Requests that will decode once others have computed their prompts. A Counter calls Python for the first.
        self._coming: defaultdict[str, int] = defaultdict(int)

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """Chooses the decode worker first, then a prefill worker that can hand over to it."""
        decode = self._pick("decode", request, candidates.decode)
        able = candidates.prefill_for(decode)
        if self._prefers_near and len(able) > 1:
            able = self._nearest(decode, able, request)
        explain = partial(_explain, request, candidates)
        if not able:
            return Placement(decode, None, explain)
        prefill = self._pick("prefill", request, able)
        return Placement(decode, prefill, explain, progress=_ComingDecode(self._coming, decode.record.process))

    def _nearest(self, decode: W, able: Sequence[W], request: RoutingRequest) -> list[W]:
        """Of the workers that are not much busier than the least busy one, those that are nearest."""
        scored = self._scored(able, Preferences(request.prompt_tokens))
        most = min(option.score for option in scored) + self._session_slack
        free = [option.choice for option in scored if option.score <= most]
        steps = [steps_apart(worker.record.known_location, decode.record.known_location) for worker in free]
        return [worker for worker, apart in zip(free, steps, strict=True) if apart == min(steps)]

    def _pick(self, role: str, request: RoutingRequest, workers: Sequence[W]) -> W:
        turn = next(self._turns[role])
        if len(workers) == 1:
            return workers[0]
        preferences = Preferences(request.prompt_tokens, request.session_key, self._session_slack, turn)
        return pick(self._scored(workers, preferences), preferences)

    def _scored(self, workers: Sequence[W], preferences: Preferences) -> list[Scored[W]]:
        scored = score_workers(workers, preferences)
        if not self._coming:
            return scored
        coming = self._coming
        return [replace(option, score=option.score + coming.get(option.choice.record.process, 0)) for option in scored]


class RoundRobin:
    """One worker after the other, whatever their load."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """The next decode worker, and the next prefill worker that can hand over to it."""
        del request
        turn = next(self._turns)
        decode = candidates.decode[turn % len(candidates.decode)]
        able = candidates.prefill_for(decode)
        return Placement(decode, able[turn % len(able)] if able else None)


class RandomChoice:
    """Random workers."""

    def choose(self, request: RoutingRequest, candidates: Candidates[W]) -> Placement[W]:
        """A random decode worker, and a random prefill worker that can hand over to it."""
        del request
        decode = random.choice(candidates.decode)
        able = candidates.prefill_for(decode)
        return Placement(decode, random.choice(able) if able else None)


def load_policy(config: RoutingConfig) -> Policy:
    """The policy that the configuration names: a built-in one, an entry point of `baton.policies`, or module:Class.

    It is called with `routing.policy_options`. Raises ConfigError.
    """
    factory = _factory(config)
    try:
        policy = factory(**config.policy_options)
    except TypeError as error:
        raise ConfigError(f"routing.policy_options: {config.policy}: {error}") from error
    if not callable(getattr(policy, "choose", None)):
        raise ConfigError(f"routing.policy: {config.policy} has no method choose(request, candidates)")
    chosen: Policy = policy
    return chosen


def _factory(config: RoutingConfig) -> Callable[..., Any]:
    name = config.policy
    nearness = Nearness(config.handoff_within, config.far_seconds)
    predicted = partial(
        PredictedSeconds,
        config.temperature_seconds,
        priors=_priors(config),
        nearness=nearness,
        prefix_loans=config.prefix_loans,
    )
    built_in: dict[str, Callable[..., Any]] = {
        "automatic": predicted,
        "least_loaded": partial(LeastLoaded, session_slack=config.session_slack, prefers_near=config.far_seconds > 0),
        "predicted_seconds": predicted,
        "round_robin": RoundRobin,
        "random": RandomChoice,
    }
    if name in built_in:
        return built_in[name]
    installed = {entry.name: entry for entry in entry_points(group=_GROUP)}
    try:
        if name in installed:
            return _callable(installed[name].load())
        if ":" in name:
            module, _, attribute = name.partition(":")
            return _callable(getattr(import_module(module), attribute))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"routing.policy: cannot load {name!r}: {error}") from error
    known = ", ".join([*built_in, *sorted(installed.keys() - built_in.keys())])
    raise ConfigError(f"routing.policy: unknown policy {name!r}; expected one of {known}, or module:Class")


def _priors(config: RoutingConfig) -> Priors | None:
    """The costs of the configured profile; None without one. Raises ConfigError."""
    return priors_of(read_timing_profile(Path(config.profile))) if config.profile else None


def _callable(loaded: Any) -> Callable[..., Any]:
    if not callable(loaded):
        raise TypeError("it is not a class")
    factory: Callable[..., Any] = loaded
    return factory


def _explain(request: RoutingRequest, candidates: Candidates[W]) -> list[str]:
    """The score of each candidate; the least is the best."""
    lines: list[str] = []
    for role, workers in (("prefill", candidates.prefill), ("decode", candidates.decode)):
        for option in score_workers(workers, Preferences(request.prompt_tokens)):
            slow = ", slow" if option.is_slow else ""
            lines.append(f"{role} {option.key}: {option.score:.3g}{slow}")
    return lines
