"""`baton why`: one page about a request: where its time went, which decision was made why, and what failed."""

import argparse
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from baton.enum_names import value_name
from baton.errors import InvalidRequest
from baton.inference.v1 import cluster_service_pb2, record_pb2, sampling_pb2, timing_pb2
from cli.commands.records.request import read_records
from cli.connection import connect
from cli.request import text_of
from cli.terminal import output, printable
from cli.timings import timings_table
from rpc.status import OK

_CAUSES = {
    record_pb2.RECORD_CAUSE_FAILED: "it failed",
    record_pb2.RECORD_CAUSE_SLOW: "it was slow",
    record_pb2.RECORD_CAUSE_SAMPLED: "it was chosen by chance",
    record_pb2.RECORD_CAUSE_ASKED: "its client asked for a record",
}


async def run(arguments: argparse.Namespace) -> int:
    """Prints the page of the latest record, from a router or from a bundle."""
    if bool(arguments.request_id) == bool(arguments.bundle):
        raise InvalidRequest.of("REQUEST_ID", "is needed, unless there is --bundle FILE")
    if arguments.bundle:
        records = read_records(arguments.bundle)
    else:
        async with connect(arguments, arguments.tenant) as client:
            records = await client.records(text_of("REQUEST_ID", arguments.request_id))
    record, console = records[-1], output()
    for line in summary(record, earlier=len(records) - 1):
        console.print(printable(line))
    console.print()
    console.print(timings_table(record.finished.timings, record.finished.usage))
    for line in decisions(record):
        console.print(printable(line))
    return 0


def summary(record: record_pb2.RequestRecord, earlier: int) -> Iterator[str]:
    """The request, its end, and its longest stage."""
    usage, tenant = record.finished.usage, f" of tenant {record.tenant}" if record.tenant else ""
    model = record.request.model or "the default model"
    yield (
        f"{record.request_id}{tenant}: {usage.prompt_tokens} prompt tokens for {model}, "
        f"{usage.completion_tokens} tokens of answer. It arrived at {record.arrived.ToJsonString()}."
    )
    cause = _CAUSES.get(record.cause, "of a cause that this version does not know")
    yield f"Router {record.router_id} (Baton {record.baton_version}) recorded it because {cause}."
    yield _end(record)
    if record.HasField("first_token"):
        yield f"The first token was sent after {_ms(record.first_token)}; the request ended after {_ms(record.total)}."
    if longest := max(record.finished.timings, key=lambda one: one.duration.ToNanoseconds(), default=None):
        share = longest.duration.ToNanoseconds() / max(1, record.total.ToNanoseconds())
        name, where = value_name(timing_pb2.Stage, longest.stage).replace("_", " "), longest.worker_id or "the router"
        yield f"The longest stage was {name} on {where}: {_ms(longest.duration)}, {share:.0%} of the request's time."
    if earlier:
        records = "record has" if earlier == 1 else "records have"
        yield f"{earlier} earlier {records} the same id: `baton record` writes them to a file."


def decisions(record: record_pb2.RequestRecord) -> Iterator[str]:
    """The decisions and calls for each answer, in the order of time."""
    if not any(one.placements or one.attempts for one in record.answers):
        yield "It was not sent to any worker."
    for answer in record.answers:
        yield ""
        if len(record.answers) > 1:
            yield f"Answer {answer.index}, {answer.tokens} tokens:"
        if answer.resumed_tokens or answer.adopted:
            how = "a worker still ran it" if answer.adopted else "it was computed again from its client's copy"
            yield f"This router took the answer over after {answer.resumed_tokens} tokens: {how}."
        events = [(one.at.ToNanoseconds(), list(_placement(one, record.policy))) for one in answer.placements]
        events += [(one.at.ToNanoseconds(), [_attempt(one)]) for one in answer.attempts]
        for _, lines in sorted(events, key=lambda event: event[0]):
            yield from lines
        if answer.left_out:
            yield f"{answer.left_out} more, between the first and the last ones, are not in the record."


def _end(record: record_pb2.RequestRecord) -> str:
    if record.outcome == OK:
        reason = value_name(sampling_pb2.FinishReason, record.finished.reason).replace("_", " ")
        return f"It completed; the answer ended by {reason}."
    where = " on ".join(part for part in (record.error_stage, record.error_worker_id) if part)
    place = f" at {where}" if where else ""
    return f"It ended with {record.outcome}{place}{': ' if record.error else ''}{record.error}."


def _placement(placement: record_pb2.RecordedPlacement, policy: str) -> Iterator[str]:
    after = f", after {placement.tokens} tokens" if placement.tokens else ""
    prefill = f"prefill on {placement.prefill_worker_id}, " if placement.prefill_worker_id else ""
    yield (
        f"At {_ms(placement.at)}{after}, the policy {policy} chose {prefill}decode on {placement.decode_worker_id}, "
        f"of {placement.workers} workers."
    )
    for number, candidate in enumerate(placement.candidates):
        yield f"    {'chosen' if number == 0 else 'instead'}: {_candidate(candidate)}"
    busy = [
        f"{one.worker_id} {one.requests} requests, {one.waiting_tokens} waiting tokens"
        + (f" ({one.problem})" if one.problem else "")
        for one in placement.loads
    ]
    yield f"    load at that moment: {'; '.join(busy)}"


def _candidate(one: cluster_service_pb2.RouteCandidate) -> str:
    where = f"{one.prefill_worker_id} > {one.decode_worker_id}" if one.prefill_worker_id else one.decode_worker_id
    terms = ("wait", "prefill", "transfer", "decode", "stall", "distance")
    costs = [f"{name} {getattr(one, f'{name}_seconds') * 1e3:.1f}" for name in terms]
    return (
        f"{where}: {one.total_seconds * 1e3:.1f} ms predicted ({', '.join(costs)}), "
        f"{one.cached_tokens} tokens cached, {one.uncached_tokens} not"
    )


def _attempt(one: record_pb2.RecordedAttempt) -> str:
    outcome = "yielded, to go on elsewhere," if one.outcome == "YIELDED" else one.outcome
    text = f"At {_ms(one.at)}, {one.call} on {one.worker_id} ({one.engine}): {outcome} after {_ms(one.took)}"
    if one.tokens_after > one.tokens_before:
        text += f", tokens {one.tokens_before} to {one.tokens_after - 1}"
    if one.held_blocks:
        text += f", holds {one.held_blocks} blocks of KV, {one.held_bytes} bytes"
    for stage in one.stages:
        if stage.stage == timing_pb2.STAGE_HANDOFF_TRANSFER:
            text += f", took over {stage.num_bytes} bytes by {stage.transport or 'its engine'} in {_ms(stage.duration)}"
            text += f" ({stage.cached_bytes} bytes were there)" if stage.cached_bytes else ""
    return f"{text}: {one.error}." if one.error else f"{text}."


def _ms(duration: Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e6:.1f} ms"
