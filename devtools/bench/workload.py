"""The requests of a benchmark: when each is sent, its prompt and images, and the length of its answer."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from baton.errors import ConfigError
from baton.files import read_file
from devtools.bench.traces import BLOCK_TOKENS, TracedRequest, prompt_ids

# Ids from 0 on that a model of any vocabulary has, without special tokens in those that are common.
_IDS = (32, 127)


_LARGEST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """A request: when it is sent, in seconds from the start, and what it asks for."""

    at_seconds: float
    token_ids: tuple[int, ...]
    output_tokens: int
    images: tuple[bytes, ...] = ()  # PNG files

    @property
    def text(self) -> str:
        """The prompt as text, beside images: a character for each id."""
        return "".join(map(chr, self.token_ids))


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a request: how many, squares of how many pixels, and which share of them was sent before."""

    number: int = 0
    pixels: tuple[int, int] = (256, 256)  # the least and the most
    repeated: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, drawn at random from pairs of a prompt's and an answer's."""

    pairs: tuple[tuple[int, int], ...] = ()
    prompt: tuple[int, int] = (512, 512)  # the least and the most; used if there are no pairs
    answer: tuple[int, int] = (128, 128)

    def draw(self, source: random.Random) -> tuple[int, int]:
        """The length of a prompt and of its answer."""
        if self.pairs:
            return source.choice(self.pairs)
        return source.randint(*self.prompt), source.randint(*self.answer)


def read_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Pairs from a file with two whole numbers a line. Raises ConfigError naming a wrong line."""
    pairs = []
    try:
        text = read_file(path, _LARGEST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"{path}:{number}: expected the lengths of a prompt and of its answer")
        pairs.append((int(words[0]), int(words[1])))
    if not pairs:
        raise ConfigError(f"{path}: has no lengths")
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of these lengths with these images. Equal seeds plan the same times and lengths.

    `prompts` is a second seed, of the contents: servers that are compared get equal lengths, and none of them a prompt
    that another one, or the same one under another name, has in its cache.
    """

    lengths: Lengths
    images: Images = Images()
    prompts: int = 0

    def at_rate(self, rate: float, requests: int, seed: int) -> list[Planned]:
        """Requests that arrive at random (Poisson), `rate` a second on average."""
        times = random.Random(f"{seed}/times")
        at, planned = 0.0, []
        for each in self.all_at_once(requests, seed):
            planned.append(replace(each, at_seconds=at))
            at += times.expovariate(rate)
        return planned

    def all_at_once(self, requests: int, seed: int) -> list[Planned]:
        """Requests without times, to be sent as others end."""
        lengths, contents = random.Random(seed), random.Random(f"{seed}/{self.prompts}")
        pictures = self._pictures(requests * self.images.number, contents)
        planned = []
        for number in range(requests):
            prompt, answer = self.lengths.draw(lengths)
            ids = tuple(contents.randrange(*_IDS) for _ in range(prompt))
            images = pictures[number * self.images.number : (number + 1) * self.images.number]
            planned.append(Planned(0.0, ids, answer, tuple(images)))
        return planned

    def _pictures(self, number: int, source: random.Random) -> list[bytes]:
        """PNG files; those that are repeated are of the ones before them."""
        made: list[bytes] = []
        for _ in range(number):
            is_repeated = made and source.random() < self.images.repeated
            made.append(source.choice(made) if is_repeated else _picture(source, self.images.pixels))
        return made


def of_trace(trace: Sequence[TracedRequest], speedup: float, block_tokens: int, most_output: int) -> list[Planned]:
    """The requests of a trace, so many times as fast, with `block_tokens` for each block of its prompts."""
    return [
        Planned(
            request.at_seconds / speedup,
            tuple(_IDS[0] + each % (_IDS[1] - _IDS[0]) for each in prompt_ids(request, block_tokens)),
            min(most_output, max(1, request.output_tokens * block_tokens // BLOCK_TOKENS)),
        )
        for request in trace
    ]


def _picture(source: random.Random, pixels: tuple[int, int]) -> bytes:
    """A square of coloured stripes, as small a file as that of a drawing."""
    side, file = source.randint(*pixels), io.BytesIO()
    stripes = Image.frombytes("RGB", (8, 8), source.randbytes(8 * 8 * 3))
    stripes.resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
