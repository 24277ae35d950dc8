"""Which requests are checked in a thread: those whose check would hold the event loop."""

from dataclasses import replace

import pytest
from support.router.contexts import request_context

from baton.inference.v1 import generate_pb2


def is_large(request: generate_pb2.GenerateRequest) -> bool:
    return replace(request_context(), request=request, message_bytes=request.ByteSize()).is_large


def with_ids(count: int, **fields: str) -> generate_pb2.GenerateRequest:
    ids = generate_pb2.TokenIds(ids=range(100_000, 100_000 + count))
    return generate_pb2.GenerateRequest(token_ids=ids, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("characters", "expected"), [(4000, False), (8000, True)])
def test_a_long_text_is_large(characters: int, expected: bool) -> None:
    assert is_large(generate_pb2.GenerateRequest(prompt="a" * characters)) == expected


@pytest.mark.parametrize(("count", "expected"), [(4000, False), (4096, False), (4097, True)])
def test_a_long_prompt_of_ids_is_large_later_than_a_text_of_so_many_bytes(count: int, expected: bool) -> None:
    assert is_large(with_ids(count)) == expected


def test_what_comes_beside_the_ids_counts() -> None:
    assert is_large(with_ids(4000, lora_name="a" * 5000))
