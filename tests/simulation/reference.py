"""The right ids of the simulated engine, written again: each id is a function of the seed and all ids before."""

import hashlib
import struct
from array import array
from io import BytesIO

from PIL import Image

from simulation.guided import END_ID, Follower
from simulation.plan import KSERVE_APIS, Request

_LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz ")
_IMAGE_ID, _IMAGE_TOKENS = 257, 4


def prompt_of(asked: Request) -> list[int]:
    """The ids of a prompt without an image. Prompts of one prefix begin alike."""
    if asked.api == "chat":
        return list(f"user: {letters_of(asked)}assistant: ".encode())
    if asked.api in KSERVE_APIS:
        return list(letters_of(asked).encode())
    return [(position * 7 + asked.prefix * 31) % 200 + 20 for position in range(asked.length)]


def letters_of(asked: Request) -> str:
    """The prompt for an API that has text."""
    return bytes(97 + (position * 7 + asked.prefix * 31) % 26 for position in range(asked.length)).decode()


def text_of(asked: Request) -> str:
    """The prompt with an image. Of three prefixes each the text is the same, and the image is not."""
    return "<image>" + chr(97 + asked.prefix // len(PICTURES)) * asked.length


def picture_of(asked: Request) -> bytes:
    """The image of a request that has one."""
    return PICTURES[asked.prefix % len(PICTURES)]


def reference(asked: Request) -> list[int]:
    """The whole answer to a request, with the end of the sequence if it is guided and ends before its last token."""
    state = hashlib.blake2b(asked.seed.to_bytes(8, "little"), digest_size=8)
    prompt = prompt_of(asked)
    if asked.image:
        digest = hashlib.sha256(b"simulated image" + picture_of(asked)).digest()
        state.update(struct.pack("<qqI", 0, _IMAGE_TOKENS, len(digest)) + digest)
        prompt = [_IMAGE_ID] * _IMAGE_TOKENS + list(text_of(asked).removeprefix("<image>").encode())
    state.update(array("I", prompt).tobytes())
    ids: list[int] = []
    follower = Follower(asked.guided) if asked.guided else None
    while len(ids) < asked.tokens and ids[-1:] != [END_ID]:
        value = int.from_bytes(state.digest(), "little")
        possible = follower.after(ids[-1:]) if follower else _LETTERS
        ids.append(possible[(value >> 32) % len(possible)])
        state.update(array("I", ids[-1:]).tobytes())
    return ids


def text_of_ids(ids: list[int]) -> str:
    """The text of an answer, of which the end of the sequence is no part."""
    return bytes(ids[:-1] if ids[-1:] == [END_ID] else ids).decode()


def _picture(index: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (32 + index, 24), (index * 60, 10, 20)).save(file, "PNG")
    return file.getvalue()


PICTURES = [_picture(index) for index in range(3)]
