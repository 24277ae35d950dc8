"""Parses a JSON body without a long hold of the interpreter, which would delay every stream whatever the thread.

The number of its values is bounded first. Of a large body the long strings are read by themselves, in pieces, and
bounded in length; what is left of it is small.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from router.text.json_values import WrongValue, load_unique_json, located, refuse_constant
from rpc.interceptors.counting import TextLimits

MAX_VALUES = 65_536
MAX_BYTES_BESIDE_TEXTS = 2 * 2**20
_PIECE = 64 * 1024  # takes at most a millisecond, whatever is in it, and has no more values than may be
_LONG_STRING = 64  # bytes; a longer one is read by itself
_STRUCTURE = (b",", b"[", b"{", b":")
_FIRST_OF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..")
_IS_NAME = re.compile(rb"[ \t\r\n]*:")  # what follows the name of a field
_ESCAPE_BYTES = 6  # the longest, as \u00e4
# Stands for a long string. No JSON that is right has it.
_STAND_IN = b"-Infinity"
# What is up to the content of an image: of a data: URL, and of an object of the type base64.
_IMAGE = re.compile(rb'"(?:url|image_url)"[ \t\r\n]*:[ \t\r\n]*"data:$')
_BASE64 = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"$')


@dataclass(frozen=True, slots=True)
class _TooLong:
    """Stands for a string over its limit."""

    description: str


@dataclass(frozen=True, slots=True)
class _Base64:
    """Stands for a string that is an image's if its object is of the type base64, and else counts as a text."""

    text: str


def parse(body: bytes, texts: TextLimits | None = None) -> dict[str, Any]:
    """The object in a body. Call it in a thread for a large one.

    Raises InvalidRequest, of the field `body`, or of the one whose text is over the limits.
    """
    try:
        value = load_unique_json(body) if len(body) <= _PIECE else _LargeBody(body, texts).load()
    except UnicodeError:
        raise InvalidRequest.of("body", "is not valid UTF-8, or has half of a surrogate pair") from None
    except WrongValue as error:
        raise InvalidRequest.of(error.path or "body", error.problem) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of("body", f"is not valid JSON: {str(error).partition('; use sys')[0]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest.of("body", "must be a JSON object")
    return value


class _LargeBody:
    """A body that is read in pieces, between which other threads run."""

    def __init__(self, body: bytes, texts: TextLimits | None) -> None:
        self._body = body
        self._texts = texts
        self._characters_left = texts.together if texts else 0
        self._strings: list[str | _TooLong | _Base64] = []  # the long ones, in order
        self._values = 0

    def load(self) -> Any:
        """Raises InvalidRequest, or ValueError for what is no JSON."""
        rest = self._without_long_strings()
        strings = iter(self._strings)

        def stand_in(constant: str) -> str | _TooLong | _Base64:
            found = next(strings, None) if constant.encode() == _STAND_IN else None
            return refuse_constant(constant) if found is None else found

        value = load_unique_json(rest, stand_in)
        if next(strings, None) is not None:
            raise ValueError("a string is where none may be")
        value = self._with_images(value)
        for path, found in located(value, lambda one: isinstance(one, _TooLong)):
            raise InvalidRequest.of(path or "body", found.description)
        return value

    def _without_long_strings(self) -> bytes:
        body, rest, copied, begin, count = self._body, bytearray(), 0, -1, 0
        for start, piece in self._pieces():
            at = 0
            while True:
                quote = piece.find(b'"', at)
                if begin < 0:
                    self._count(piece, at, len(piece) if quote < 0 else quote)
                if quote < 0:
                    break
                at = quote + 1
                if begin < 0:
                    begin = start + at
                    continue
                count += 1
                end = start + quote
                if end - begin > _LONG_STRING and not _IS_NAME.match(body, end + 1):
                    rest += body[copied : begin - 1] + _STAND_IN
                    copied = end + 1
                    self._strings.append(self._string(begin, end))
                begin = -1
            self._bound(count, len(rest) + (begin if begin >= 0 else start + len(piece)) - copied)
        if begin >= 0:
            raise ValueError("a string has no end")
        return bytes(rest + body[copied:])

    def _bound(self, strings: int, bytes_beside_texts: int) -> None:
        if max(self._values, strings - 1) > MAX_VALUES:
            raise InvalidRequest.of("body", f"has more than {MAX_VALUES} values")
        if bytes_beside_texts > MAX_BYTES_BESIDE_TEXTS:
            raise InvalidRequest.of("body", f"has more than {MAX_BYTES_BESIDE_TEXTS} bytes beside its long strings")

    def _count(self, piece: bytes, begin: int, end: int) -> None:
        self._values += sum(piece.count(one, begin, end) for one in _STRUCTURE)

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """The body in pieces that end with no part of an escape, and where each begins; without escaped quotes."""
        body, at = self._body, 0
        while at < len(body):
            piece = body[at : at + _PIECE]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece = body[at : at + _PIECE + 1]
            yield at, piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            at += len(piece)
            time.sleep(0)

    def _string(self, begin: int, end: int) -> "str | _TooLong | _Base64":
        """The string between two quotes, or what it has too much of."""
        texts, most, is_base64 = self._texts, end - begin, False
        if texts is not None:
            before = self._body[max(0, begin - 64) : begin + 5]
            is_base64 = bool(texts.media and _BASE64.search(before[:-5]))
            is_image = is_base64 or (texts.media and _IMAGE.search(before))
            most = texts.media_bytes if is_image else min(texts.each, self._characters_left)
        parts, characters = [], 0
        while begin < end and characters <= most:
            stop = end if end - begin <= _PIECE else self._end_of_part(begin, begin + _PIECE)
            part = json.loads(f'"{self._body[begin:stop].decode()}"')
            part.encode()  # raises for half of a pair
            parts.append(part)
            characters += len(part)
            begin = stop
            if begin < end:
                time.sleep(0)
        if characters > most:
            return _TooLong(_too_many(most))
        if is_base64:
            return _Base64("".join(parts))
        if texts is not None and not is_image:
            self._characters_left -= characters
        return "".join(parts)

    def _with_images(self, value: Any) -> Any:
        """The value with the images in objects of the type base64. As deep as json.loads can read."""
        match value:
            case _Base64(text=text):
                return self._counted(text)
            case {"type": "base64", "data": _Base64(text=text)}:
                return {**self._with_images({**value, "data": None}), "data": text}
            case dict():
                for name, inner in value.items():
                    value[name] = self._with_images(inner)
            case list():
                value[:] = map(self._with_images, value)
        return value

    def _counted(self, text: str) -> str | _TooLong:
        most = min(self._texts.each, self._characters_left) if self._texts else len(text)
        self._characters_left -= len(text)
        return text if len(text) <= most else _TooLong(_too_many(most))

    def _end_of_part(self, begin: int, stop: int) -> int:
        """The last place up to `stop` that is within no escape, pair of surrogates, or character."""
        plain = self._body[begin:stop].replace(b"\\\\", b"__")
        escape = plain.rfind(b"\\", len(plain) - _ESCAPE_BYTES)
        if escape >= 0:
            before = plain[escape - _ESCAPE_BYTES : escape]
            return begin + escape - (_ESCAPE_BYTES if _FIRST_OF_A_PAIR.fullmatch(before) else 0)
        for back in range(4):
            if self._body[stop - back] & 0xC0 != 0x80:
                return stop - back
        return stop


def _too_many(most: int) -> str:
    return f"is too long: with the texts before it, no model here takes more than {most} characters"
