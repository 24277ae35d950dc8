"""The worker record as JSON: read back as it was written, and refused by name when it is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router.worker_views import worker

from discovery.registry import WorkerRecord

_TEXTS = st.text()
_INTEGERS = st.integers(min_value=0, max_value=2**64 - 1)


@given(
    st.builds(
        WorkerRecord,
        worker_id=_TEXTS,
        epoch=_INTEGERS,
        address=_TEXTS,
        roles=st.lists(_TEXTS).map(tuple),
        model=_TEXTS,
        engine=_TEXTS,
        layout_digest=_TEXTS,
        max_context_tokens=_INTEGERS,
        capabilities=st.lists(_TEXTS).map(tuple),
        data_parallel_ranks=st.integers(1, 512),
        draining=st.booleans(),
        certificate=_TEXTS,
        layout=_TEXTS,
        offers=st.none() | st.lists(_TEXTS).map(tuple),
        reads=st.none() | st.lists(_TEXTS).map(tuple),
    )
)
def test_a_record_is_read_as_it_was_written(record: WorkerRecord) -> None:
    assert WorkerRecord.from_json(record.to_json()) == record


def test_the_json_is_an_object_with_the_names_of_the_fields() -> None:
    assert json.loads(worker("w1").to_json()) == {
        "worker_id": "w1",
        "epoch": 1,
        "address": "127.0.0.1:5000",
        "roles": ["prefill", "decode"],
        "model": "demo",
        "engine": "simulated",
        "layout_digest": "digest",
        "max_context_tokens": 2048,
        "capabilities": [],
        "data_parallel_ranks": 1,
        "draining": False,
        "certificate": "",
        "layout": "",
        "offers": None,
        "reads": None,
        "location": {"zone": "", "rack": "", "host": ""},
    }


def without(key: str) -> bytes:
    """A record's JSON without that key."""
    fields = json.loads(worker("w1").to_json())
    del fields[key]
    return json.dumps(fields).encode()


def with_value(key: str, value: object) -> bytes:
    """A record's JSON with another value at that key."""
    return json.dumps({**json.loads(worker("w1").to_json()), key: value}).encode()


@pytest.mark.parametrize(
    "key", ["worker_id", "epoch", "address", "roles", "model", "engine", "layout_digest", "max_context_tokens"]
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        WorkerRecord.from_json(without(key))


@pytest.mark.parametrize("key", ["capabilities", "data_parallel_ranks", "draining"])
def test_a_key_with_a_default_may_be_missing(key: str) -> None:
    assert WorkerRecord.from_json(without(key)) == worker("w1")


def test_an_unknown_key_is_ignored() -> None:
    assert WorkerRecord.from_json(with_value("from_the_future", [1])) == worker("w1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker_id", 7),
        ("worker_id", None),
        ("model", "\ud800"),
        ("epoch", "1"),
        ("epoch", True),
        ("epoch", 1.0),
        ("epoch", -1),
        ("epoch", 2**64),
        ("data_parallel_ranks", 0),
        ("data_parallel_ranks", 513),
        ("data_parallel_ranks", 2**63),
        ("roles", "decode"),
        ("roles", ["decode", 1]),
        ("capabilities", {}),
        ("draining", 0),
        ("address", "a" * 5000),
        ("roles", ["decode"] * 257),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        WorkerRecord.from_json(with_value(key, value))


def test_a_record_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ValueError, match="has 70000 of at most 65536 bytes"):
        WorkerRecord.from_json(b"[" * 70_000)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b"1" * 10_000])
def test_what_is_no_json_object_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="not"):
        WorkerRecord.from_json(text)
