"""Bundles of records: `baton record` writes one; the request of a record that is read from one."""

import argparse
import sys

from google.protobuf import json_format

from baton import records
from baton.errors import InvalidRequest
from baton.files import LARGEST_REQUEST_BYTES, read_file
from baton.images import user_message
from baton.inference.v1 import generate_pb2, record_pb2
from cli.connection import connect
from cli.outputs import write_text
from cli.request import text_of


async def write_record(arguments: argparse.Namespace) -> int:
    """Writes the bundle to a file, or to standard output."""
    request_id = text_of("REQUEST_ID", arguments.request_id)
    async with connect(arguments, arguments.tenant) as client:
        found = await client.records(request_id)
    bundle = records.write_bundle(found)
    if arguments.output == "-":
        sys.stdout.write(bundle)
        return 0
    write_text("--output", arguments.output, bundle)
    print(f"{arguments.output}: {len(found)} {'record' if len(found) == 1 else 'records'} of {request_id}")
    return 0


_OPTION = "--prompt-file"


def read_records(path: str) -> list[record_pb2.RequestRecord]:
    """The records of a bundle. Raises InvalidRequest."""
    return records.read_bundle(_read("BUNDLE", path, records.LARGEST_BUNDLE_BYTES), "BUNDLE")


def request_of(record: record_pb2.RequestRecord, prompt_file: str | None) -> generate_pb2.GenerateRequest:
    """The request, to be run again. What was not kept of it is read from the file, and checked against its digest.

    Raises InvalidRequest.
    """
    request = generate_pb2.GenerateRequest()
    request.CopyFrom(record.request)
    request.response.ClearField("min_tokens_per_message")
    if not record.redacted:
        return request
    parts = ", ".join(record.redacted)
    if not record.content_digest:
        text = f"was recorded by a router that took the answer over, and never had its {parts}"
        raise InvalidRequest.of("BUNDLE", f"{text}: replay the record of the router that it was sent to")
    if prompt_file is None:
        raise InvalidRequest.of(_OPTION, f"is needed: the record has a digest of {parts}, and nothing else")
    text = _read(_OPTION, prompt_file, LARGEST_REQUEST_BYTES)
    for content in _contents(record, text, is_json=prompt_file.endswith(".json")):
        if records.content_digest(content) == record.content_digest:
            request.MergeFrom(content)
            return request
    raise InvalidRequest.of(_OPTION, f"{prompt_file} is not what was sent: the digest of {parts} differs")


def _contents(record: record_pb2.RequestRecord, text: str, *, is_json: bool) -> list[generate_pb2.GenerateRequest]:
    """The meanings that the file may have: the request in JSON, or the prompt, with or without its last line's end."""
    if is_json:
        try:
            return [records.content_of(json_format.Parse(text, generate_pb2.GenerateRequest()))]
        except json_format.ParseError as error:
            raise InvalidRequest.of(_OPTION, f"is no GenerateRequest in JSON: {error!s:.200}") from None
    return [_content(record, one) for one in dict.fromkeys((text, text.removesuffix("\n")))]


def _content(record: record_pb2.RequestRecord, text: str) -> generate_pb2.GenerateRequest:
    match list(record.redacted):
        case ["prompt"]:
            return generate_pb2.GenerateRequest(prompt=text)
        case ["chat"]:
            return generate_pb2.GenerateRequest(chat=generate_pb2.ChatInput(messages=[user_message(text, [])]))
        case ["token_ids"]:
            words = text.replace(",", " ").split()
            if not all(word.isascii() and word.isdigit() and len(word) <= 10 and int(word) < 2**32 for word in words):
                raise InvalidRequest.of(_OPTION, "must be token ids, separated by commas or spaces")
            return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=[int(word) for word in words]))
    parts = ", ".join(record.redacted)
    raise InvalidRequest.of(_OPTION, f"must be a GenerateRequest in JSON, named *.json, since it has {parts}")


def _read(option: str, path: str, most: int) -> str:
    try:
        return read_file(path, most).decode()
    except OSError as error:
        raise InvalidRequest.of(option, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest.of(option, f"{path} is not UTF-8") from None
