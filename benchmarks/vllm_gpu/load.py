"""Requests from several client processes, over gRPC to Baton and over HTTP to vLLM, and when their tokens came."""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from rpc.channels import open_channel

REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """A server under test: its address, its protocol, and for Baton the topology."""

    name: str
    address: str
    protocol: Literal["grpc", "http"]
    topology: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A part of a load, for one client process. `arrivals` are seconds after `begin`; empty is a closed loop."""

    system: System
    vocabulary: int
    prompt_tokens: int
    answer_tokens: int
    seeds: tuple[int, ...]
    slots: int
    begin: float  # by time.time(), which all processes of a host share
    arrivals: tuple[float, ...] = ()


@dataclass(slots=True)
class Answered:
    """One request: when it was sent and when each token came, by time.time(), or why it failed.

    `stages` are Baton's, as far as they had passed at the first token; `handoff` are those of the handoff, whole.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    error: str = ""
    handed_over: bool = False
    stages: dict[str, float] = field(default_factory=dict)
    handoff: dict[str, float] = field(default_factory=dict)


def run_load(load: Load) -> list[Answered]:
    """Runs in a client process."""
    return asyncio.run(_run(load))


async def _run(load: Load) -> list[Answered]:
    async with _Client(load) as client:
        slots = asyncio.Semaphore(load.slots)
        prompts = [random.Random(seed).choices(range(2, load.vocabulary), k=load.prompt_tokens) for seed in load.seeds]

        async def one(index: int) -> Answered:
            if load.arrivals:
                await asyncio.sleep(max(0.0, load.begin + load.arrivals[index] - time.time()))
                return await client.ask(prompts[index])
            async with slots:
                return await client.ask(prompts[index])

        await asyncio.sleep(max(0.0, load.begin - time.time()))
        return list(await asyncio.gather(*map(one, range(len(prompts)))))


class _Client:
    def __init__(self, load: Load) -> None:
        self._load = load

    async def __aenter__(self) -> "_Client":
        system = self._load.system
        if system.protocol == "grpc":
            self._opened = open_channel(system.address)
            self._stub = inference_service_pb2_grpc.InferenceServiceStub(await self._opened.__aenter__())
        else:
            self._opened = aiohttp.ClientSession(  # type: ignore[assignment]
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.__aexit__(None, None, None)

    async def ask(self, ids: Sequence[int]) -> Answered:
        answered = Answered(time.time())
        answers = self._over_grpc(ids, answered) if self._load.system.protocol == "grpc" else self._over_http(ids)
        try:
            async for count in answers:
                answered.times += [time.time()] * count
        except Exception as error:  # whatever it is, it is counted, and shown
            answered.error = f"{type(error).__name__}: {error}"[:300]
        if not answered.error and len(answered.times) != self._load.answer_tokens:
            answered.error = f"{len(answered.times)} tokens instead of {self._load.answer_tokens}"
        return answered

    async def _over_grpc(self, ids: Sequence[int], answered: Answered) -> AsyncIterator[int]:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=ids),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingOptions(max_tokens=self._load.answer_tokens, ignore_eos=True),
            routing=generate_pb2.RoutingOptions(topology=self._load.system.topology),  # type: ignore[arg-type]
        )
        async for message in self._stub.Generate(request, timeout=REQUEST_SECONDS):
            if message.HasField("token"):
                yield len(message.token.token_ids)
            if message.HasField("finished"):
                answered.handed_over = bool(message.finished.prefill_worker_id)
                stages: dict[str, float] = defaultdict(float)
                for timing in message.finished.timings:
                    name = timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_").lower()
                    stages[name] += timing.before_first_token.ToNanoseconds() / 1e9
                    if name.startswith("handoff"):
                        seconds = timing.duration.ToNanoseconds() / 1e9
                        answered.handoff[name] = answered.handoff.get(name, 0.0) + seconds
                answered.stages = dict(stages)

    async def _over_http(self, ids: Sequence[int]) -> AsyncIterator[int]:
        body = {
            "model": "benchmark",
            "prompt": list(ids),
            "max_tokens": self._load.answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = f"http://{self._load.system.address}/v1/completions"
        async with self._opened.post(url, json=body) as answer:  # type: ignore[attr-defined]
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    for choice in event["choices"]:
                        yield len(choice.get("token_ids") or ())
