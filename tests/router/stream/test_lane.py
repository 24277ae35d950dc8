"""Tokens that are sent as they come: as protobuf would write them, in order, and counted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, model_pb2, sampling_pb2
from baton_http2.server.reply import Reply
from router.routing.latency import DecodeTimer, WorkerLatency
from router.stream.meter import TokenMeter
from router.stream.writer import StreamWriter
from router.telemetry.request_metrics import TokenLatencies
from router.telemetry.stats import RequestStats
from router.text.completion import Completion
from router.text.served_model import ServedModel
from router.text.token_messages import message_start, token_field, varint
from router.text.tokenizer import Tokenizer
from services.engines.simulated.tokens import byte_vocabulary

EOS = 256


@cache
def byte_model() -> ServedModel:
    """A model with one token a byte."""
    tokenizer = Tokenizer(byte_vocabulary().files.tokenizer_json, "", "")
    limits, capabilities = model_pb2.ModelLimits(), model_pb2.ModelCapabilities()
    return ServedModel("m", limits, capabilities, frozenset([EOS]), tokenizer)


@dataclass
class Client:
    """Parses what it is sent. It reads until `most` messages have come."""

    most: int = 1_000_000
    messages: list[generate_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def connection(self) -> int:
        return id(self)

    def write(self, message: bytes) -> bool:
        self.messages.append(generate_pb2.GenerateResponse.FromString(message))
        return len(self.messages) < self.most

    def flush(self) -> None:
        """Nothing waits."""

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        raise AssertionError("the client reads")


class Answer:
    """One answer after its first token: what is pushed its next ones, and what has counted them."""

    def __init__(self, model: ServedModel, client: Client, stop: Sequence[str] = (), max_tokens: int = 1000) -> None:
        request = generate_pb2.GenerateRequest(stopping={"stop": stop})
        sampling = prompt_pb2.Sampling()
        sampling.stop.max_tokens = max_tokens
        self.ended = 0
        self.completion = Completion(request, sampling, model)
        self.stats = RequestStats("r-1", model="m", prompt_tokens=5)
        self.latency = WorkerLatency()
        self.writer = StreamWriter(
            "r-1",
            Reply(client.send, lambda _: None, lambda: client),
            100,
            first_token_sent=self.stats.timings.first_token_sent,
        )
        latencies = TokenLatencies(self.stats)
        latencies.observe(self.stats.timings.detokenized(time.perf_counter_ns()), 1)
        self.writer.put_now(self.completion.push([ord("A")], ()))
        self.meter = TokenMeter(self.stats, latencies, self.completion.token_ids)
        self.meter.begin_call(DecodeTimer(self.latency, 0, 1))
        self.writer.lane.attach(self.completion, self.meter, self._end)

    def _end(self) -> None:
        self.ended += 1

    def push(self, ids: Sequence[int]) -> list[int]:
        """Pushes tokens, a step each, until one is refused; those that were not."""
        lane, pushed = self.writer.lane, []
        for token_id in ids:
            if not lane.push(token_id):
                break
            pushed.append(token_id)
            lane.meter.count(time.monotonic(), None)
        self.meter.settle()
        return pushed


@given(st.text(max_size=20), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.text(min_size=1, max_size=300))
def test_a_message_is_what_protobuf_reads_as_one(text: str, token_id: int, sequence: int, request_id: str) -> None:
    sent = message_start(request_id) + varint(sequence) + token_field(text, token_id)
    assert generate_pb2.GenerateResponse.FromString(sent) == generate_pb2.GenerateResponse(
        request_id=request_id, sequence=sequence, token={"text": text, "token_ids": [token_id]}
    )


@settings(deadline=None)
@given(st.text(max_size=40), st.binary(max_size=5))
def test_all_tokens_come_in_order_with_the_text_of_all(text: str, more: bytes) -> None:
    client, ids = Client(), [*text.encode(), *more]
    answer = Answer(byte_model(), client)
    assert answer.push(ids) == ids
    tokens = [message.token for message in client.messages]
    assert [one for token in tokens for one in token.token_ids] == [ord("A"), *ids] == answer.completion.token_ids
    assert [message.sequence for message in client.messages] == list(range(len(ids) + 1))
    answer.completion.finish(sampling_pb2.FINISH_REASON_LENGTH)
    shown = "".join(token.text for token in tokens) + answer.completion.flush().text
    assert shown == "A" + bytes(ids).decode(errors="replace")


def test_what_ends_an_answer_is_not_overlooked_among_plain_tokens() -> None:
    ends = (
        ({"max_tokens": 6}, b"bcdef", sampling_pb2.FINISH_REASON_LENGTH),
        ({}, (*b"bcde", EOS), sampling_pb2.FINISH_REASON_END_OF_SEQUENCE),
        ({"stop": ["ef"]}, b"bcdef", sampling_pb2.FINISH_REASON_STOP_STRING),
    )
    for options, ids, reason in ends:
        answer = Answer(byte_model(), Client(), **options)  # type: ignore[arg-type]
        answer.push(ids)
        assert answer.completion.finished is not None
        assert answer.completion.finished.reason == reason
        assert answer.ended == 1


async def test_tokens_for_a_client_that_is_behind_wait_in_its_writer() -> None:
    client = Client(most=4)
    answer = Answer(byte_model(), client)
    answer.push(b"bcd")  # the last of them is the fourth message
    assert answer.writer.lane.is_behind
    assert answer.push(b"ef") == [*b"ef"]
    assert len(client.messages) == 4
    with pytest.raises(AssertionError, match="the client reads"):
        async with answer.writer:
            pass


def test_everything_counts_plain_tokens_once_they_are_settled() -> None:
    answer = Answer(byte_model(), Client())
    before = answer.stats.timings.first_token_seconds
    answer.push(b"bcdefghij")
    assert answer.stats.completion_tokens == 10
    assert answer.stats.timings.first_token_seconds == before
    assert answer.latency.recent_token_seconds.value is not None
