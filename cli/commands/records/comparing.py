"""Compares two runs of a request: the first token that differs, and what was different then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton import records
from baton.enum_names import value_name
from baton.inference.v1 import generate_pb2, record_pb2, sampling_pb2
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
