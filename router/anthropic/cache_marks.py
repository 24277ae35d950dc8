"""`cache_control`: up to four marks, each at the end of a part to retain. The last one covers all before it."""

from typing import Final, Literal

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.openai.fields import Fields

_MOST_MARKS: Final = 4
_SECONDS: Final = {"5m": 300, "1h": 3600}


class CacheControl(Fields):
    """A mark: retain the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class CacheMarks:
    """The marks of a body, in its order. The longest ttl is that of all."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0
        self._end = generate_pb2.ChatPosition()

    def add(self, place: str, mark: CacheControl | None, chat: generate_pb2.ChatInput) -> None:
        """Notes the mark of the block at `place`, if it has one: here the chat ends with it. That of the body is at "".

        Raises InvalidRequest for a fifth mark.
        """
        if mark is None:
            return
        self._count += 1
        if self._count > _MOST_MARKS:
            field = f"{place}.cache_control" if place else "cache_control"
            raise InvalidRequest.of(field, f"is mark {self._count} of at most {_MOST_MARKS}")
        self._seconds = max(self._seconds, _SECONDS[mark.ttl])
        turns = chat.messages
        self._end = generate_pb2.ChatPosition(messages=len(turns), parts=len(turns[-1].parts) if turns else 0)

    def set_in(self, request: generate_pb2.GenerateRequest) -> None:
        """Asks for what is marked to be retained."""
        if self._count:
            request.cache.retain.ttl.FromSeconds(self._seconds)
            request.cache.retain.chat.CopyFrom(self._end)
