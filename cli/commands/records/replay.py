"""`baton replay`: runs a recorded request again, and compares the answers token by token."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from baton import AsyncClient, records
from baton.enum_names import value_name
from baton.errors import RequestNotFound, Unsupported
from baton.inference.v1 import generate_pb2, record_pb2, sampling_pb2
from cli.commands.records.request import read_records, request_of
from cli.connection import connect
from cli.terminal import printable
from rpc.status import OK


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was different. `name` says of what."""

    name: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The place where two answers part: a token, or, if only digests tell, one of some tokens."""

    answer: int
    first: int
    last: int
    text: str


def first_differences(
    recorded: record_pb2.RequestRecord, replayed: Mapping[int, Sequence[int]]
) -> list[FirstDifference]:
    """The places where answers of a record part from their replays; empty if all are equal.

    An answer that had not ended is compared as far as it went.
    """
    found = (_first_difference(one, replayed.get(one.index, ()), recorded.outcome == OK) for one in recorded.answers)
    return [one for one in found if one is not None]


def _first_difference(
    recorded: record_pb2.RecordedAnswer, replayed: Sequence[int], has_ended: bool
) -> FirstDifference | None:
    difference = _by_ids(recorded, replayed) if recorded.token_ids else _by_digests(recorded, replayed)
    if difference is None and has_ended and len(replayed) > recorded.tokens:
        text = f"the recorded answer ended after {recorded.tokens} tokens, and the replayed one has {len(replayed)}"
        return FirstDifference(recorded.index, recorded.tokens, recorded.tokens, text)
    return difference


def _by_ids(recorded: record_pb2.RecordedAnswer, replayed: Sequence[int]) -> FirstDifference | None:
    for position, token_id in enumerate(recorded.token_ids):
        if position >= len(replayed):
            return _short(recorded, len(replayed))
        if replayed[position] != token_id:
            text = f"token {position} was {token_id}, and is {replayed[position]}"
            return FirstDifference(recorded.index, position, position, text)
    return None


def _by_digests(recorded: record_pb2.RecordedAnswer, replayed: Sequence[int]) -> FirstDifference | None:
    each, chain = recorded.digest_tokens, records.digests(replayed[: recorded.tokens], recorded.digest_tokens or 1)
    for number, digest in enumerate(recorded.digests):
        first, last = number * each, min((number + 1) * each, recorded.tokens) - 1
        if len(replayed) > last and chain[number] == digest:
            continue
        if len(replayed) <= first:
            return _short(recorded, len(replayed))
        short = f"; the replayed answer ended after {len(replayed)}" if len(replayed) <= last else ""
        return FirstDifference(recorded.index, first, last, f"one of the tokens {first} to {last} differs{short}")
    return None


def _short(recorded: record_pb2.RecordedAnswer, tokens: int) -> FirstDifference:
    text = f"the recorded answer has {recorded.tokens} tokens, and the replayed one ended after {tokens}"
    return FirstDifference(recorded.index, tokens, tokens, text)


def different_facts(
    recorded: record_pb2.RequestRecord, replayed: record_pb2.RequestRecord, at: FirstDifference | None
) -> list[Fact]:
    """The facts that are known of both runs and were different: at a token, or in all."""
    before, after = _facts(recorded, at), _facts(replayed, at)
    return [Fact(name, before[name], after[name]) for name in before if before[name] != after.get(name, before[name])]


def _facts(record: record_pb2.RequestRecord, at: FirstDifference | None) -> dict[str, str]:
    """The facts that are known of a run, by their names."""
    finished, answer = record.finished, _answer(record, at.answer if at else 0)
    facts = {
        "Baton": record.baton_version,
        "the prompt's ids": record.prompt_digest.hex()[:16],
        "the prompt's tokens": str(finished.usage.prompt_tokens or ""),
        "the end": record.outcome if record.outcome != OK else value_name(sampling_pb2.FinishReason, finished.reason),
        "the topology": value_name(generate_pb2.Topology, finished.topology),
        "the prefill worker": finished.prefill_worker_id,
        "the seed": str(answer.seed or ""),
        "the cached tokens of the prompt": str(finished.usage.cached_tokens),
        "moves to other workers with the KV": str(finished.moves),
        "continuations elsewhere after failures": str(finished.migrations),
        "tokens that another router had": str(answer.resumed_tokens),
    }
    attempt = _attempt_at(answer, at.first if at else max(0, answer.tokens - 1))
    facts |= {
        "the worker": attempt.worker_id,
        "its engine": attempt.engine,
        "its model and KV layout": attempt.layout_digest[:16],
        "its part of the answer": f"from token {attempt.tokens_before}" if attempt.engine else "",
    }
    return {name: value for name, value in facts.items() if value}


def _answer(record: record_pb2.RequestRecord, index: int) -> record_pb2.RecordedAnswer:
    return next((one for one in record.answers if one.index == index), record_pb2.RecordedAnswer())


def _attempt_at(answer: record_pb2.RecordedAnswer, position: int) -> record_pb2.RecordedAttempt:
    """The call that gave a token: the last one that began before it."""
    calls = [one for one in answer.attempts if one.call != "allocate" and one.tokens_before <= position]
    return calls[-1] if calls else record_pb2.RecordedAttempt()


@dataclass(slots=True)
class Replayed:
    """A request that was run again: the ids of its answers, and its record, or as much as its last message tells."""

    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    record: record_pb2.RequestRecord = field(default_factory=record_pb2.RequestRecord)


async def replay_record(arguments: argparse.Namespace) -> int:
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
