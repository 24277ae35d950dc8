"""`baton generate`: sends a prompt, and prints the answer as it comes."""

import argparse
import sys
from contextlib import aclosing

from baton.inference.v1 import generate_pb2
from google.protobuf.json_format import MessageToJson

from client.connection import connect
from client.ledger import ledger_of, ledger_table
from client.request import build
from client.terminal import errors
from rpc.errors import BatonError


async def run(arguments: argparse.Namespace) -> int:
    """Streams one answer to standard output. Ctrl-C stops it on the workers too."""
    try:
        finished = await _stream(arguments)
    except BatonError as error:
        if arguments.timing and (stages := ledger_of(error)):
            errors().print(ledger_table(stages))
        raise
    if arguments.timing:
        errors().print(ledger_table(finished.ledger, finished.usage))
    return 0


async def _stream(arguments: argparse.Namespace) -> generate_pb2.Finished:
    request = build(arguments)
    show = _print_json if arguments.json else _print_text
    finished = generate_pb2.Finished()
    async with (
        connect(arguments, arguments.tenant) as client,
        aclosing(client.generate(request, timeout_seconds=arguments.timeout, priority=arguments.priority)) as events,
    ):
        async for event in events:
            show(event)
            finished = event.finished
    return finished


def _print_text(event: generate_pb2.GenerateResponse) -> None:
    end = "\n" if event.HasField("finished") else ""
    # Written at once: whoever watches wants each token when it comes.
    print(event.token.text, end=end, flush=True)


def _print_json(event: generate_pb2.GenerateResponse) -> None:
    sys.stdout.write(MessageToJson(event, indent=None, preserving_proto_field_name=True, ensure_ascii=False) + "\n")
    sys.stdout.flush()
