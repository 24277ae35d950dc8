"""`baton generate`: sends a prompt and streams the completion."""

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson

from baton import AsyncClient, AsyncGeneration, Resume
from baton.errors import BatonError, InvalidRequest
from baton.inference.v1 import generate_pb2
from cli.address import find_address
from cli.connection import connect
from cli.local.state import StateFolder
from cli.request import build
from cli.terminal import errors
from cli.timings import timings_of, timings_table

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# A receiver that does not respond must not delay the command's exit.
_EXPORT_SECONDS = 1.0


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
        if finished.resumptions:
            errors().print(f"resumed, {finished.resumptions} in all: the timings are those of the last router")
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


@asynccontextmanager
async def client_spans(router: str) -> "AsyncGenerator[TracerProvider | None, None]":
    """A provider whose spans are exported when the context exits; None if no receiver is configured.

    They go to OpenTelemetry's usual environment variables, else to the viewer of the local cluster, if `router` is the
    address of one of its routers or of its Envoy.
    """
    is_configured = any(os.environ.get(name) for name in _VARIABLES)
    endpoint = "" if is_configured else _viewer_of(router)
    if not is_configured and not endpoint:
        yield None
        return
    provider = _provider(endpoint)
    try:
        yield provider
    finally:
        await asyncio.to_thread(_shut_down, provider)


def _viewer_of(router: str) -> str:
    """The OTLP address of this folder's cluster; empty if `router` is not part of it."""
    state = StateFolder().read()
    if state is None:
        return ""
    if router not in (each.address for each in state.processes if each.role in ("router", "envoy")):
        return ""
    return next((each.otlp for each in state.processes if each.role == "traces"), "")


def _provider(endpoint: str) -> "TracerProvider":
    """`endpoint` is `host:port`; if it is empty, the environment decides."""
    # Slow to import, and most commands do not need them.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from rpc.tracing.exporter import silence_library_logs

    silence_library_logs()
    local = {"endpoint": f"http://{endpoint}", "insecure": True} if endpoint else {}
    exporter = OTLPSpanExporter(timeout=_EXPORT_SECONDS, **local)  # type: ignore[arg-type]
    resource = Resource.create({"service.name": "baton-cli", "service.namespace": "baton"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _shut_down(provider: "TracerProvider") -> None:
    # The processor itself would wait for up to 30 s.
    flushing = threading.Thread(target=provider.shutdown, name="trace-flush", daemon=True)
    flushing.start()
    flushing.join(_EXPORT_SECONDS)
