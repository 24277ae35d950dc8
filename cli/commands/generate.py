"""`baton generate`: sends a prompt and streams the completion."""

import argparse
import sys
from contextlib import aclosing

from google.protobuf.json_format import MessageToJson

from baton import AsyncClient, AsyncGeneration, Resume
from baton.errors import BatonError, InvalidRequest
from baton.inference.v1 import generate_pb2
from cli.address import find_address
from cli.connection import connect
from cli.request import build
from cli.terminal import errors
from cli.timings import timings_of, timings_table
from cli.tracing import client_spans


async def run(arguments: argparse.Namespace) -> int:
    """Streams one completion to standard output. Ctrl-C cancels it on the workers too."""
    try:
        finished = await _stream(arguments)
    except BatonError as error:
        if arguments.timing and (stages := timings_of(error)):
            errors().print(timings_table(stages))
        raise
    if arguments.timing:
        errors().print(timings_table(finished.timings, finished.usage))
    return 0


async def _stream(arguments: argparse.Namespace) -> generate_pb2.Finished:
    if bool(arguments.prompt) == bool(arguments.resume):
        raise InvalidRequest.of("PROMPT", "is needed, unless there is --resume HANDLE, which takes none")
    show = _print_json if arguments.json else _print_text
    finished = generate_pb2.Finished()
    async with (
        client_spans(find_address(arguments.address).value) as provider,
        connect(arguments, arguments.tenant, provider, _resume(arguments)) as client,
        aclosing(_answer(client, arguments)) as events,
    ):
        async for event in events:
            if event.started.resumption.handle:
                errors().print(f"handle: {event.started.resumption.handle}", soft_wrap=True)
            if arguments.record and event.HasField("started"):
                errors().print(f"request: {event.request_id}", soft_wrap=True)
            show(event)
            finished = event.finished
    return finished


def _resume(arguments: argparse.Namespace) -> Resume | None:
    """The option for an answer that survives the loss of a router; None without it."""
    if arguments.keep:
        return Resume(keep_seconds=arguments.keep)
    return Resume() if arguments.resume else None


def _answer(client: AsyncClient, arguments: argparse.Namespace) -> AsyncGeneration:
    if arguments.resume:
        return client.resume(arguments.resume, timeout_seconds=arguments.timeout)
    request, seconds = build(arguments), arguments.timeout
    return client.generate(request, timeout_seconds=seconds, priority=arguments.priority, record=arguments.record)


def _print_text(event: generate_pb2.GenerateResponse) -> None:
    end = "\n" if event.HasField("finished") else ""
    # Flushed, so that each token is shown when it arrives.
    print(event.token.text, end=end, flush=True)


def _print_json(event: generate_pb2.GenerateResponse) -> None:
    sys.stdout.write(MessageToJson(event, indent=None, preserving_proto_field_name=True, ensure_ascii=False) + "\n")
    sys.stdout.flush()
