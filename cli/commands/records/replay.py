"""`baton replay`: runs a recorded request again, and compares the answers token by token."""

import argparse
from collections import defaultdict
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from baton import AsyncClient
from baton.errors import RequestNotFound, Unsupported
from baton.inference.v1 import generate_pb2, record_pb2
from cli.commands.records.comparing import FirstDifference, different_facts, first_differences
from cli.commands.records.request import read_records, request_of
from cli.connection import connect
from cli.terminal import printable
from rpc.status import OK


@dataclass(slots=True)
class Replayed:
    """A request that was run again: the ids of its answers, and its record, or as much as its last message tells."""

    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    record: record_pb2.RequestRecord = field(default_factory=record_pb2.RequestRecord)


async def run(arguments: argparse.Namespace) -> int:
    """Exits with 0 if all tokens are equal, with 1 if any differs."""
    recorded = read_records(arguments.bundle)[-1]
    request = request_of(recorded, arguments.prompt_file)
    async with connect(arguments, arguments.tenant or recorded.tenant) as client:
        replayed = await replay(client, request, arguments.timeout)
    differences = first_differences(recorded, replayed.ids)
    for line in report(recorded, replayed, differences):
        print(printable(line))
    return 1 if differences else 0


async def replay(
    client: AsyncClient, request: generate_pb2.GenerateRequest, timeout_seconds: float | None = None
) -> Replayed:
    """Runs a request again, recorded where the router allows it."""
    replayed = Replayed()
    events = client.generate(request, record=True, timeout_seconds=timeout_seconds)
    async with aclosing(events):
        async for event in events:
            replayed.ids[event.token.index].extend(event.token.token_ids)
            if event.HasField("finished"):
                replayed.record = _known(event.finished)
    # Where the router records nothing, what the last message tells has to do.
    with suppress(RequestNotFound, Unsupported):
        replayed.record = (await client.records(events.request_id))[-1]
    return replayed


def _known(finished: generate_pb2.Finished) -> record_pb2.RequestRecord:
    record = record_pb2.RequestRecord(finished=finished, outcome=OK)
    answer = record.answers.add(tokens=finished.usage.completion_tokens)
    answer.attempts.add(call="decode", worker_id=finished.decode_worker_id)
    return record


def report(recorded: record_pb2.RequestRecord, replayed: Replayed, differences: list[FirstDifference]) -> list[str]:
    """The outcome in lines."""
    tokens = sum(one.tokens for one in recorded.answers)
    if not differences:
        lines = [f"equal: all {tokens} tokens of {recorded.request_id}"]
        if recorded.outcome != OK:
            lines = [f"equal: the {tokens} tokens of {recorded.request_id} until it ended with {recorded.outcome}"]
    else:
        lines = [f"different: {recorded.request_id}"]
    for one in differences:
        lines.append(f"answer {one.answer}: {one.text}" if len(recorded.answers) > 1 else one.text)
    facts = different_facts(recorded, replayed.record, differences[0] if differences else None)
    if facts:
        lines.append("different then:" if differences else "although this was different:")
        lines += [f"  {fact.name}: {fact.recorded}, now {fact.replayed}" for fact in facts]
    elif differences:
        lines.append("nothing else that is recorded was different")
    return lines
