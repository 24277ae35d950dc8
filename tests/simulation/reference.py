"""What the simulated engine has to generate, written again: each id is a function of the seed and all ids before."""

import hashlib
from array import array
from io import BytesIO

from PIL import Image

from simulation.plan import Request

_LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz ")


def prompt_of(asked: Request) -> list[int]:
    """The ids of a prompt without an image. Prompts of one prefix begin alike."""
    return [(position * 7 + asked.prefix * 31) % 200 + 20 for position in range(asked.length)]


def reference(asked: Request) -> list[int]:
    """The whole answer to a request without an image."""
    state = hashlib.blake2b(asked.seed.to_bytes(8, "little"), digest_size=8)
    state.update(array("I", prompt_of(asked)).tobytes())
    ids: list[int] = []
    for _ in range(asked.tokens):
        value = int.from_bytes(state.digest(), "little")
        ids.append(_LETTERS[(value >> 32) % len(_LETTERS)])
        state.update(array("I", ids[-1:]).tobytes())
    return ids


def _picture(index: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (32 + index, 24), (index * 60, 10, 20)).save(file, "PNG")
    return file.getvalue()


PICTURES = [_picture(index) for index in range(3)]
