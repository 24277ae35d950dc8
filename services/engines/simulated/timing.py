"""The seconds of a step of the simulated engine: from the configured costs, or from the profile of a measured model."""

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Protocol

from engine_protocol.timing_profile import TimingProfile, read_timing_profile
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.sequence import Sequence

# Sequences, and how many tokens of each the step computes.
Batch = Items[tuple[Sequence, int]]


class StepTiming(Protocol):
    """Says how long a step takes."""

    def seconds(self, batch: Batch) -> float:
        """The time of a step, before its tokens are computed."""


class ConfiguredTiming:
    """The costs of the configuration: a base and a rate for prompts, and the same time for every decode step."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config

    def seconds(self, batch: Batch) -> float:
        config = self._config
        prefilled = sum(count for sequence, count in batch if not sequence.decoding)
        seconds = config.decode_step_seconds if any(sequence.decoding for sequence, _ in batch) else 0.0
        if prefilled:
            seconds += config.prefill_base_seconds
        if prefilled and config.prefill_tokens_per_second:
            seconds += prefilled / config.prefill_tokens_per_second
        return seconds


class ProfiledTiming:
    """The costs of a measured model: of prompts by their lengths, of decoding by batch and context.

    A step reads the weights once. So of several prompts one costs what it would alone, and the others what their tokens
    add; and beside prompts a decoding sequence costs what it adds to a batch.
    """

    def __init__(self, profile: TimingProfile) -> None:
        self._profile = profile
        self._base_seconds = profile.prefill_base_seconds
        self._token_seconds = profile.prefill_token_seconds

    def seconds(self, batch: Batch) -> float:
        contexts = [len(sequence.ids) for sequence, _ in batch if sequence.decoding]
        prompts = self._prompts([(sequence, count) for sequence, count in batch if not sequence.decoding])
        if not contexts:
            return prompts
        context = sum(contexts) / len(contexts)
        decode = self._profile.decode_seconds
        return decode(len(contexts), context) + max(0.0, prompts - decode(1, context))

    def _prompts(self, batch: Batch) -> float:
        alone = sorted((self._alone(sequence, count), count) for sequence, count in batch)
        if not alone:
            return 0.0
        beside = (
            min(max(0.0, seconds - self._base_seconds), count * self._token_seconds) for seconds, count in alone[:-1]
        )
        return alone[-1][0] + sum(beside)

    def _alone(self, sequence: Sequence, count: int) -> float:
        """A prompt that begins behind a cached part takes a step like any other."""
        seconds = self._profile.prefill_seconds(sequence.computed, count)
        if sequence.computed and sequence.computed == sequence.cached_tokens:
            seconds += self._base_seconds
        return seconds


def step_timing(config: SimulatedConfig) -> StepTiming:
    """The timing of an engine. Raises ConfigError if the profile cannot be read."""
    if config.timing is None:
        return ConfiguredTiming(config)
    return ProfiledTiming(read_timing_profile(Path(config.timing.profile)))
