"""The bytes of a long prompt are those of its message, in whatever request they are."""

import pytest

from baton.engine.v1 import decode_pb2, prefill_pb2, prompt_pb2
from router.workers.serialized_prompt import SerializedPrompt

IDS = tuple((number * 7919) % 200_000 for number in range(100_000))


@pytest.mark.parametrize(
    "kind",
    [prefill_pb2.PrefillRequest, decode_pb2.DecodeRequest, decode_pb2.AllocateRequest, decode_pb2.PrefetchRequest],
)
def test_a_request_with_a_serialized_prompt_is_read_as_one_with_the_message(kind: type) -> None:
    rest = prompt_pb2.Prompt(cache_salt="salt", cache={"session": b"s"}, lora={"name": "a"})
    serialized = SerializedPrompt.of(IDS, rest)
    assert tuple(serialized.message.token_ids) == IDS
    request = kind(request_id="r", model="m")
    found = kind.FromString(serialized.within(request, "prompt"))
    request.prompt.CopyFrom(serialized.message)
    assert found == request


def test_the_message_is_given_what_the_rest_has() -> None:
    salted = prompt_pb2.Prompt(cache_salt="salt")
    serialized = SerializedPrompt.of((), salted)
    assert serialized.message is salted
    assert prompt_pb2.Prompt.FromString(serialized.content) == salted
