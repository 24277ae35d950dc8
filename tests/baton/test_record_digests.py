"""Digests of requests and answers, and bundles of records."""

import hashlib
import json

import pytest

from baton import records
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, record_pb2

REQUEST = generate_pb2.GenerateRequest(
    request_id="one",
    model="demo",
    prompt="hello",
    sampling={"seed": 3, "bad_words": ["bad"]},
    stopping={"stop": ["end"], "max_tokens": 9},
    guided={"regex": "[a-z]+"},
    routing={"session_key": "mine", "cache_salt": "salt", "topology": generate_pb2.TOPOLOGY_AGGREGATED},
    media=[{"uri": "https://example.org/a.png"}],
)


def test_a_request_is_what_its_client_wrote_and_its_options() -> None:
    content, options = records.content_of(REQUEST), records.options_of(REQUEST)
    assert records.parts_of(content) == ["prompt", "sampling.bad_words", "stopping.stop", "guided", "media"]
    assert options == generate_pb2.GenerateRequest(
        model="demo",
        sampling={"seed": 3},
        stopping={"max_tokens": 9},
        routing={"topology": generate_pb2.TOPOLOGY_AGGREGATED},
    )
    options.MergeFrom(content)
    options.request_id = "one"
    options.routing.MergeFrom(REQUEST.routing)
    assert options == REQUEST


def test_a_field_that_is_new_is_what_a_client_wrote_until_it_is_said_to_be_an_option() -> None:
    options = {"request_id", "model", "sampling", "stopping", "response", "lora_name", "routing", "cache"}
    written = {"prompt", "token_ids", "chat", "guided", "media"}
    assert set(generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) == options | written


def test_the_digests_of_an_answer_are_a_chain() -> None:
    ids = list(range(300, 340))
    first, second, third = records.digests(ids, 16)
    packed = b"".join(number.to_bytes(4, "little") for number in ids)
    assert first == hashlib.sha256(packed[:64]).digest()[:8]
    assert second == hashlib.sha256(first + packed[64:128]).digest()[:8]
    assert third == hashlib.sha256(second + packed[128:]).digest()[:8]
    assert records.digests(ids[:32], 16) == [first, second]
    assert records.ids_digest(ids) == hashlib.sha256(packed).digest()


def test_a_bundle_is_read_as_it_was_written() -> None:
    kept = [
        record_pb2.RequestRecord(request_id="naïve", content_digest=b"\0\xff", redacted=["prompt"]) for _ in range(2)
    ]
    text = records.write_bundle(kept)
    assert json.loads(text)["version"] == 1
    assert records.read_bundle(text, "bundle") == kept


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no bundle"),
        ("[]", "is no bundle"),
        ("{}", "is no bundle"),
        ('{"version": 2, "records": []}', "has version 2"),
        ('{"version": 1, "records": []}', "has no records"),
        ('{"version": 1, "records": 7}', "is no bundle"),
        ('{"version": 1, "records": [{"answers": 7}]}', "is no bundle"),
        ("[" * 100_000, "is no bundle"),
    ],
)
def test_what_is_no_bundle_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        records.read_bundle(text, "bundle")


def test_what_a_newer_router_adds_is_passed_over() -> None:
    [record] = records.read_bundle('{"version": 1, "records": [{"request_id": "a", "later": {"x": 1}}]}', "bundle")
    assert record.request_id == "a"
