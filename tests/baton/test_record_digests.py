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
    sampling={"seed": 3, "temperature": 0.0, "bad_words": ["bad"], "logit_bias": {7: 1.5}},
    stopping={"stop": ["end"], "stop_token_ids": [9], "max_tokens": 9, "ignore_eos": False},
    response={"logprobs": 0},
    guided={"regex": "[a-z]+"},
    routing={"session_key": "mine", "cache_salt": "salt", "topology": generate_pb2.TOPOLOGY_AGGREGATED},
    media=[{"uri": "https://example.org/a.png"}],
)


def test_a_request_is_what_its_client_wrote_and_its_options() -> None:
    content, options = records.content_of(REQUEST), records.options_of(REQUEST)
    assert records.parts_of(content) == [
        *("prompt", "sampling.logit_bias", "sampling.bad_words", "stopping.stop", "stopping.stop_token_ids"),
        *("guided", "media"),
    ]
    assert options == generate_pb2.GenerateRequest(
        model="demo",
        sampling={"seed": 3, "temperature": 0.0},
        stopping={"max_tokens": 9, "ignore_eos": False},
        response={"logprobs": 0},
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


def _with_unknown_text(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """The request of a newer client, which has a field here and in its options that this version does not know."""
    field = b"\xfa\x3f\x06secret"  # 1023, six bytes
    newer = generate_pb2.GenerateRequest.FromString(request.SerializeToString() + field)
    for part in (newer.sampling, newer.stopping, newer.response):
        part.MergeFromString(field)
    return newer


def test_a_field_of_a_newer_client_is_neither_kept_nor_digested() -> None:
    newer = _with_unknown_text(REQUEST)
    assert newer.SerializeToString().count(b"secret") == 4
    assert b"secret" not in records.options_of(newer).SerializeToString()
    assert records.content_of(newer) == records.content_of(REQUEST)
    assert records.content_digest(records.content_of(newer)) == records.content_digest(records.content_of(REQUEST))


def test_options_without_text_are_no_content() -> None:
    request = generate_pb2.GenerateRequest(prompt="x", sampling={"seed": 1}, stopping={})
    assert records.content_of(request) == generate_pb2.GenerateRequest(prompt="x")


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
        ("[]", "expected an object with"),
        ("{}", "expected an object with"),
        ('{"version": 2, "records": []}', "has version 2"),
        ('{"version": 1, "records": []}', "has no records"),
        ('{"version": 1, "records": 7}', "is no bundle"),
        ('{"version": 1, "records": "ab"}', "is no bundle"),
        ('{"version": 1, "records": [{"answers": 7}]}', "is no bundle"),
        ('{"version": 1, "records": [{"answers": [{"tokens": -1}]}]}', "is no bundle"),
        ('{"version": 1, "records": [{"total": "1e400s"}]}', "is no bundle"),
        ('{"version": 1, "records": [{"answers": [{"tokens": 40}]}]}', "ids or digests"),
        ('{"version": 1, "records": [{"answers": [{"tokens": 5, "digests": ["AAAA", "BBBB"]}]}]}', "ids or digests"),
        ('{"version": 1, "records": [{"answers": [{"tokens": 5, "digest_tokens": 16}]}]}', "ids or digests"),
        ('{"version": 1, "records": [{"answers": [{"token_ids": [5]}]}]}', "ids or digests"),
        ("[" * 100_000, "is no bundle"),
    ],
)
def test_what_is_no_bundle_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        records.read_bundle(text, "bundle")


def test_what_a_newer_router_adds_is_passed_over() -> None:
    [record] = records.read_bundle('{"version": 1, "records": [{"request_id": "a", "later": {"x": 1}}]}', "bundle")
    assert record.request_id == "a"
