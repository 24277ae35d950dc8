"""Sends requests through the stubs, as a client in any language does, and collects the answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub


@dataclass(frozen=True, slots=True)
class Answer:
    """The messages of a stream, and what they add up to."""

    started: pb.Started
    text: str
    ids: tuple[int, ...]
    finished: pb.Finished
    messages: tuple[pb.GenerateResponse, ...]


async def generate(stub: InferenceServiceStub, request: pb.GenerateRequest, *, timeout: float = 180) -> Answer:
    """Runs one request to its end; a failure raises grpc.aio.AioRpcError."""
    messages = tuple([message async for message in stub.Generate(request, timeout=timeout)])
    deltas = [m.token for m in messages if m.HasField("token")]
    return Answer(
        started=messages[0].started,
        text="".join(delta.text for delta in deltas),
        ids=tuple(i for delta in deltas for i in delta.token_ids),
        finished=messages[-1].finished,
        messages=messages,
    )


async def generate_all(
    stub: InferenceServiceStub, requests: Sequence[pb.GenerateRequest], *, at_once: int
) -> list[Answer]:
    """Runs many requests, `at_once` at a time; the answers are in the order of the requests."""
    room = asyncio.Semaphore(at_once)

    async def run(request: pb.GenerateRequest) -> Answer:
        async with room:
            return await generate(stub, request)

    return list(await asyncio.gather(*(run(request) for request in requests)))


def greedy_ids(prompt: Sequence[int], max_tokens: int) -> pb.GenerateRequest:
    """A greedy request for token ids."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    request.sampling.temperature = 0
    request.stopping.max_tokens = max_tokens
    return request


def greedy_text(prompt: str, max_tokens: int = 64) -> pb.GenerateRequest:
    """A greedy request for text."""
    request = pb.GenerateRequest(prompt=prompt)
    request.sampling.temperature = 0
    request.stopping.max_tokens = max_tokens
    return request
