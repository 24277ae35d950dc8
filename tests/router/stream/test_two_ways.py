"""A token is sent in one of two ways, plain or general: the client cannot tell which."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, model_pb2, sampling_pb2
from baton_http2.server.reply import Reply
from router.routing.latency import DecodeTimer, WorkerLatency
from router.stream.general import Pace
from router.stream.meter import TokenMeter
from router.stream.writer import StreamWriter
from router.telemetry.request_metrics import TokenLatencies
from router.telemetry.stats import RequestStats
from router.text.completion import Completion
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer
from services.engines.simulated.tokens import byte_vocabulary

EOS = 256


@dataclass
class Client:
    """Keeps the bytes that it is sent. While it does not read, what is written is the last for now."""

    sent: list[bytes] = field(default_factory=list)
    reading: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def connection(self) -> int:
        return id(self)

    def write(self, message: bytes) -> bool:
        self.sent.append(message)
        return self.reading.is_set()

    def flush(self) -> None:
        """Nothing waits."""

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        await self.reading.wait()
        self.sent.append(message.SerializeToString())


@dataclass(frozen=True)
class Options:
    """The options of a request, and the distance by which its client may be behind."""

    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    min_tokens: int
    max_tokens: int
    max_waiting: int
    pace: Pace


Step = tuple[int, bool]  # a token, and whether the client reads when it comes

_text = st.sampled_from("ab e\u00e9\u20ac\U0001f600")
_characters = _text.map(lambda one: [*one.encode()])
_tokens = st.lists(st.one_of(_characters, _characters, st.integers(0, EOS).map(lambda one: [one])), min_size=4)
_options = st.builds(
    Options,
    stop=st.one_of(st.just([]), st.lists(st.text("ab e\u00e9", min_size=1, max_size=3), max_size=2)),
    stop_token_ids=st.sampled_from([[], [ord("b")]]),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(2, 40),
    max_waiting=st.integers(1, 6),
    pace=st.sampled_from([Pace(), Pace(), Pace(3, 60.0)]),
)
# In runs: a client that reads, and one that does not, mostly goes on so for several tokens.
_reading = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4).map(
    lambda runs: [reads for most, behind in runs for reads in (*(True,) * most, *(False,) * behind)]
)


@settings(deadline=None, max_examples=150)
@given(_tokens, _reading, _options)
def test_both_ways_give_equal_bytes(tokens: list[list[int]], reading: list[bool], options: Options) -> None:
    ids = [token_id for one in tokens for token_id in one]
    steps = [(token_id, reading[place % len(reading)]) for place, token_id in enumerate(ids)]
    pushed = asyncio.run(sent(_completion(options), steps, options, is_pushed=True))
    assert pushed == asyncio.run(sent(_completion(options), steps, options, is_pushed=False))


def test_all_tokens_of_plain_text_but_a_few_are_plain() -> None:
    options, general = Options((), (), False, 0, 100, 6, Pace()), list[int]()
    asyncio.run(sent(_completion(options), [(ord("a"), True)] * 60, options, is_pushed=True, general=general))
    assert len(general) <= 2


async def sent(
    completion: Completion,
    steps: Sequence[Step],
    options: Options,
    *,
    is_pushed: bool,
    general: list[int] | None = None,
) -> list[bytes]:
    """The messages to a client of an answer whose later tokens are pushed into the lane, or put as those of responses.

    `general` gets the tokens that are pushed and not plain.
    """
    client = Client()
    client.reading.set()
    stats = RequestStats("r-1", model="m", prompt_tokens=5)
    meter = TokenMeter(stats, TokenLatencies(stats), completion.token_ids)
    reply = Reply(client.send, lambda _: None, lambda: client)
    async with StreamWriter("r-1", reply, options.max_waiting, 60.0, pace=options.pace) as writer:
        writer.start(generate_pb2.Started(model="m"))
        meter.begin_call(DecodeTimer(WorkerLatency(), 0, 1))
        writer.put_now(completion.push([ord("A")], ()))
        writer.lane.attach(completion, meter, lambda: None)
        for token_id, reads in steps:
            if completion.finished is not None:
                break
            # A client that has no room left reads: the request would wait for it.
            (client.reading.set if reads or not writer.lane.is_writable else client.reading.clear)()
            await _let_tasks_run()
            if is_pushed:
                assert writer.lane.push(token_id)
                if meter.detokenizing and general is not None:
                    general.append(token_id)
                writer.lane.meter.count(time.monotonic(), None)
            else:
                writer.put_now(completion.push([token_id], ()))
        client.reading.set()
        completion.finish(sampling_pb2.FINISH_REASON_LENGTH)
        writer.lane.detach()
        meter.end_call()
        writer.finish(completion.flush(), lambda _: None)
    assert not is_pushed or stats.completion_tokens == len(completion.token_ids)
    return client.sent


async def _let_tasks_run() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@cache
def _model() -> ServedModel:
    """A model with one token a byte."""
    tokenizer = Tokenizer(byte_vocabulary().files.tokenizer_json, "", "")
    limits, capabilities = model_pb2.ModelLimits(), model_pb2.ModelCapabilities()
    return ServedModel("m", limits, capabilities, frozenset([EOS]), tokenizer)


def _completion(options: Options) -> Completion:
    request = generate_pb2.GenerateRequest(stopping={"stop": options.stop, "include_stop": options.include_stop})
    sampling = prompt_pb2.Sampling()
    sampling.stop.stop_token_ids.extend(options.stop_token_ids)
    sampling.stop.min_tokens, sampling.stop.max_tokens = options.min_tokens, options.max_tokens
    return Completion(request, sampling, _model())
