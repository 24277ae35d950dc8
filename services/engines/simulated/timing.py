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
    """The costs of a measured model: of prompts by their lengths, of decoding by batch and context."""

    def __init__(self, profile: TimingProfile) -> None:
        self._profile = profile

    def seconds(self, batch: Batch) -> float:
        contexts, seconds = [], 0.0
        for sequence, count in batch:
            if sequence.decoding:
                contexts.append(len(sequence.ids))
            else:
                seconds += self._prefill(sequence, count)
        if contexts:
            seconds += self._profile.decode_seconds(len(contexts), sum(contexts) / len(contexts))
        return seconds

    def _prefill(self, sequence: Sequence, count: int) -> float:
        """Each prompt pays once for being begun, also if a part of it is cached."""
        seconds = self._profile.prefill_seconds(sequence.computed, count)
        if sequence.computed and sequence.computed == sequence.cached_tokens:
            seconds += self._profile.prefill_base_seconds
        return seconds


def step_timing(config: SimulatedConfig) -> StepTiming:
    """The timing of an engine. Raises ConfigError if the profile cannot be read."""
    if config.timing is None:
        return ConfiguredTiming(config)
    return ProfiledTiming(read_timing_profile(Path(config.timing.profile)))
