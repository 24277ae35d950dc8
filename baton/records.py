"""Records of requests: the part of a request that a client wrote, digests of it and of answers, and bundles of records.

Routers keep records; `baton record`, `baton replay` and `baton why` read them. docs/replay.md describes the formats.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from google.protobuf import json_format
from google.protobuf.message import Message

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, record_pb2

BUNDLE_VERSION = 1
LARGEST_BUNDLE_BYTES = 64 * 2**20

_DIGEST_BYTES = 8
_FEWEST_TOKENS = 16  # of a digest
_MOST_DIGESTS = 64

_OPTIONS = ("sampling", "stopping")  # whose texts and ids a client wrote; the rest are numbers


def content_of(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """The part of a request that a client wrote: its input, media, grammar, and the texts and ids of its options."""
    content = generate_pb2.GenerateRequest()
    content.CopyFrom(request)
    content.DiscardUnknownFields()
    for field in ("request_id", "model", "response", "lora_name", "routing", "cache"):
        content.ClearField(field)
    for name in _OPTIONS:
        _clear(content, name, _numbers_of(getattr(content, name)))
    return content


def options_of(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """The numbers and switches of a request, and its names: together with `content_of`, it is run again."""
    kept = generate_pb2.GenerateRequest(model=request.model, lora_name=request.lora_name)
    for name in (*_OPTIONS, "response"):
        options = getattr(request, name)
        for field in _numbers_of(options):
            setattr(getattr(kept, name), field, getattr(options, field))
    if request.routing.topology:
        kept.routing.topology = request.routing.topology
    return kept


def parts_of(content: generate_pb2.GenerateRequest) -> list[str]:
    """The names of the fields that a `content_of` has."""
    names = []
    for field, value in content.ListFields():
        nested = [f"{field.name}.{one.name}" for one, _ in value.ListFields()] if field.name in _OPTIONS else []
        names += nested or [field.name]
    return names


def _numbers_of(options: Message) -> list[str]:
    """The fields of a message that are set, and are a number or a switch: no list, text or message."""
    return [field.name for field, value in options.ListFields() if isinstance(value, int | float)]


def _clear(content: generate_pb2.GenerateRequest, name: str, fields: Iterable[str]) -> None:
    if not content.HasField(name):  # type: ignore[arg-type]
        return
    options = getattr(content, name)
    for field in fields:
        options.ClearField(field)
    if not options.ListFields():
        content.ClearField(name)  # type: ignore[arg-type]


def content_digest(content: generate_pb2.GenerateRequest) -> bytes:
    """SHA-256 of a `content_of`."""
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()


def ids_digest(ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids."""
    return hashlib.sha256(_packed(ids)).digest()


def tokens_a_digest(tokens: int) -> int:
    """The number of tokens that each digest of an answer of this length is of."""
    each = _FEWEST_TOKENS
    while tokens > each * _MOST_DIGESTS:
        each *= 2
    return each


def digests(ids: Sequence[int], each: int) -> list[bytes]:
    """The chain of digests of an answer: each is of its tokens and of the one before."""
    packed, last, chain = _packed(ids), b"", []
    for start in range(0, len(packed), 4 * each):
        last = hashlib.sha256(last + packed[start : start + 4 * each]).digest()[:_DIGEST_BYTES]
        chain.append(last)
    return chain


def write_bundle(records: Sequence[record_pb2.RequestRecord]) -> str:
    """The JSON of a bundle: its version, and the records, the oldest first."""
    texts = [json_format.MessageToJson(one, preserving_proto_field_name=True, indent=1) for one in records]
    return f'{{"version": {BUNDLE_VERSION}, "records": [\n{",".join(texts)}\n]}}\n'


def read_bundle(text: str, name: str) -> list[record_pb2.RequestRecord]:
    """The records of a bundle, at least one. Raises InvalidRequest naming the file."""
    try:
        bundle = json.loads(text)
        if bundle["version"] != BUNDLE_VERSION:
            raise InvalidRequest.of(name, f"has version {bundle['version']!r:.20}; this command reads {BUNDLE_VERSION}")
        # Fields that a newer router has added are left out.
        parse = partial(json_format.ParseDict, ignore_unknown_fields=True)
        records = [parse(dict(one), record_pb2.RequestRecord()) for one in bundle["records"]]
    except (KeyError, TypeError):
        text = "is no bundle of `baton record`: expected an object with `version` and `records`, a list of objects"
        raise InvalidRequest.of(name, text) from None
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidRequest.of(name, f"is no bundle of `baton record`: {error!s:.200}") from None
    if not records:
        raise InvalidRequest.of(name, "has no records")
    if not all(_is_whole(answer) for one in records for answer in one.answers):
        raise InvalidRequest.of(name, "has an answer whose ids or digests are not those of its tokens")
    return records


def _is_whole(answer: record_pb2.RecordedAnswer) -> bool:
    each, tokens = answer.digest_tokens, answer.tokens
    has_digests = each > 0 and len(answer.digests) == -(-tokens // each)
    return (has_digests or not tokens) and len(answer.token_ids) in (0, tokens)


def _packed(ids: Sequence[int]) -> bytes:
    numbers = array("I", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
