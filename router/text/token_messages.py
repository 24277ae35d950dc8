"""The tokens of a vocabulary as messages have them: in messages of one token only the sequence and the token differ.

A message object of protobuf's is several objects in memory. Where streams are paced, what a token touches is no longer
in the processor's caches when its stream's next token comes, and costs more than the work itself.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from baton.inference.v1 import generate_pb2

REPLACEMENT: Final = "\ufffd"
_LENGTH_DELIMITED: Final = 2


def _tag(message: str, field: str, wire_type: int) -> bytes:
    number = generate_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].number
    return bytes((number << 3 | wire_type,))  # of a field below 16


_REQUEST_ID: Final = _tag("GenerateResponse", "request_id", _LENGTH_DELIMITED)
_SEQUENCE: Final = _tag("GenerateResponse", "sequence", 0)
_TOKEN: Final = _tag("GenerateResponse", "token", _LENGTH_DELIMITED)
_TEXT: Final = _tag("TokenDelta", "text", _LENGTH_DELIMITED)
_TOKEN_IDS: Final = _tag("TokenDelta", "token_ids", _LENGTH_DELIMITED)

# Numbers below 128, and the first bytes of those below 16,384, as varints.
LAST: Final = tuple(bytes((number,)) for number in range(128))
FIRST: Final = tuple(bytes((number | 128,)) for number in range(128))


def varint(number: int) -> bytes:
    """A number that is not negative, as protobuf writes it."""
    if number < 128:
        return LAST[number]
    if number < 16384:
        return FIRST[number & 127] + LAST[number >> 7]
    return FIRST[number & 127] + varint(number >> 7)


def message_start(request_id: str) -> bytes:
    """The beginning of a request's messages; the sequence follows, then the token."""
    encoded = request_id.encode()
    return _REQUEST_ID + varint(len(encoded)) + encoded + _SEQUENCE


def token_field(text: str, token_id: int) -> bytes:
    """The field `token`, of one id and its text."""
    encoded, ids = text.encode(), varint(token_id)
    delta = _TOKEN_IDS + varint(len(ids)) + ids
    if encoded:
        delta = _TEXT + varint(len(encoded)) + encoded + delta
    return _TOKEN + varint(len(delta)) + delta


class TokenTexts(dict[int, str | None]):
    """The text of each token of a vocabulary whose texts are joined byte by byte, decoded when it is first asked for.

    None for tokens in `hidden`, and for those that are not whole characters by themselves. `serialized` has others in
    the form in which they are sent.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Collection[int]) -> None:
        super().__init__()
        self._decode = decode
        self._hidden = hidden
        self.serialized: dict[int, bytes] = {}

    def __missing__(self, token_id: int) -> str | None:
        text = None if token_id in self._hidden else self._decode((token_id,))
        self[token_id] = found = None if text is None or REPLACEMENT in text else text
        if found is not None:
            self.serialized[token_id] = token_field(found, token_id)
        return found
