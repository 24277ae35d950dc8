"""The bytes of a long prompt, made in a thread: the requests to workers are put together from them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from baton.engine.v1 import prompt_pb2
from router.text.token_messages import varint
from runtime.threads import in_pieces


@dataclass(frozen=True, slots=True)
class SerializedPrompt:
    """A long prompt with its bytes: copying and serializing a million ids would hold the event loop for 20 ms."""

    message: prompt_pb2.Prompt
    content: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int], rest: prompt_pb2.Prompt) -> "SerializedPrompt":
        """A prompt of these ids, and what `rest` has beside its ids, which it gets. Call it in a thread."""
        pieces = [rest.SerializeToString()]
        for ids in in_pieces(token_ids):
            rest.token_ids.extend(ids)
            # Bytes of one message after the other are those of both together.
            pieces.append(prompt_pb2.Prompt(token_ids=ids).SerializeToString())
            time.sleep(0)
        return cls(rest, b"".join(pieces))

    def within(self, request: Message, field: str) -> bytes:
        """The bytes of a request that has this prompt in a field of its own."""
        number = request.DESCRIPTOR.fields_by_name[field].number
        head = varint(number << 3 | 2), varint(len(self.content))
        return b"".join((request.SerializeToString(), *head, self.content))
