"""The speed of a model on some hardware, as `baton bench profile` measures it: a file of a few points.

The simulated engine takes its timing from it, and routers what they assume before they have measured anything.
"""

import json
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import ConfigError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """The time to the first token of a prompt of so many tokens, alone and without anything cached."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """The time from one token to the next while `batch` sequences of about `context` tokens decode."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """Measured points; between them and beyond them lie straight lines. At least one point of each kind."""

    model: str
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]

    def prefill_seconds(self, start: int, count: int) -> float:
        """The time to compute `count` tokens of a prompt after `start` tokens whose KV is there; 0 for none."""
        if not count:
            return 0.0
        return max(0.0, self._until(start + count) - (self._until(start) if start else 0.0))

    @property
    def prefill_base_seconds(self) -> float:
        """The seconds that a step with prompts takes, however short they are: where the line through all points begins.

        The two shortest prompts would say less: their times differ by little more than the error of measuring them.
        """
        return max(0.0, self._prefill_line()[0])

    @property
    def prefill_token_seconds(self) -> float:
        """The seconds that each token of a prompt adds: the slope of the line through all points."""
        return max(0.0, self._prefill_line()[1])

    def _prefill_line(self) -> tuple[float, float]:
        points = self.prefill
        if len(points) == 1:
            return 0.0, points[0].seconds / points[0].tokens
        x, y = [float(point.tokens) for point in points], [point.seconds for point in points]
        slope, base = statistics.linear_regression(x, y)
        return base, slope

    @property
    def stream_seconds(self) -> float:
        """The seconds that each further sequence adds to a step."""
        batches = sorted({point.batch for point in self.decode})
        if len(batches) == 1:
            return 0.0
        context = statistics.median_low([point.context for point in self.decode])
        low, high = self.decode_seconds(batches[0], context), self.decode_seconds(batches[-1], context)
        return max(0.0, (high - low) / (batches[-1] - batches[0]))

    def decode_seconds(self, batch: int, context: float) -> float:
        """The time of a step of so many sequences, of so many tokens on average."""
        batches = sorted({point.batch for point in self.decode})
        line = [(float(size), self._at_context(size, context)) for size in batches]
        return max(0.0, _interpolated(line, batch))

    def _at_context(self, batch: int, context: float) -> float:
        points = sorted((float(point.context), point.seconds) for point in self.decode if point.batch == batch)
        return _interpolated(points, context)

    def _until(self, tokens: float) -> float:
        return _interpolated([(float(point.tokens), point.seconds) for point in self.prefill], tokens)

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2) + "\n"


def read_timing_profile(path: Path) -> TimingProfile:
    """Reads a profile. Raises ConfigError naming the file and what is wrong in it."""
    try:
        fields = json.loads(path.read_text())
        if fields["version"] != _VERSION:
            raise ConfigError(f"{path}: is of version {fields['version']!r:.20}; this release reads {_VERSION}")
        prefill = {int(each["tokens"]): float(each["seconds"]) for each in fields["prefill"]}
        decode = {(int(each["batch"]), int(each["context"])): float(each["seconds"]) for each in fields["decode"]}
        model = str(fields["model"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a profile of `baton bench profile`: {error!r:.200}") from error
    numbers = [*prefill, *(number for place in decode for number in place)]
    seconds = [*prefill.values(), *decode.values()]
    if not prefill or not decode or min(numbers) < 1 or not all(0 <= each < float("inf") for each in seconds):
        raise ConfigError(f"{path}: prefill and decode need points of at least 1 token and 0 seconds")
    return TimingProfile(
        model,
        tuple(PrefillPoint(tokens, prefill[tokens]) for tokens in sorted(prefill)),
        tuple(DecodePoint(batch, context, decode[batch, context]) for batch, context in sorted(decode)),
    )


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` of the lines between points, which are in order; the first and the last line go on."""
    if len(points) == 1:
        return points[0][1]
    index = min(max(1, bisect_right(points, (x, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
