"""Clients that send one prompt of any length, as text or as token ids, and wait for one token."""

import asyncio
import json
import time
from typing import Protocol, TypeAlias

from baton.engine.v1 import prefill_pb2, prefill_pb2_grpc, prompt_pb2
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.peers.clients.http_client import Connection
from benchmarks.peers.clients.load import FLAT
from rpc.channels import open_channel
from runtime.aio import timeout

Prompt: TypeAlias = str | list[int]
_PATIENCE_SECONDS = 15.0


class Sender(Protocol):
    """Sends prompts to one server."""

    async def first_token_seconds(self, prompt: Prompt) -> float:
        """The time of its first token. Raises OSError or grpc.RpcError if there is none."""

    async def close(self) -> None:
        """Closes the connection."""


class RouterSender:
    """To Baton's router. See Sender."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    async def first_token_seconds(self, prompt: Prompt) -> float:
        request = generate_pb2.GenerateRequest(model=FLAT)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        request.stopping.max_tokens, request.stopping.ignore_eos = 1, True
        begin, found = time.perf_counter(), 0.0
        async for message in self._stub.Generate(request):
            if message.HasField("token") and not found:
                found = time.perf_counter() - begin
        return found

    async def close(self) -> None:
        await self._channel.close()


class WorkerSender:
    """To Baton's prefill worker, which takes ids. See Sender."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._sent = 0

    async def first_token_seconds(self, prompt: Prompt) -> float:
        self._sent += 1
        ids = prompt.encode() if isinstance(prompt, str) else prompt
        stop = prompt_pb2.StopConditions(max_tokens=1, ignore_eos=True)
        request = prefill_pb2.PrefillRequest(
            request_id=f"direct-{id(self)}-{self._sent}",
            model=FLAT,
            prompt=prompt_pb2.Prompt(token_ids=ids),
            sampling=prompt_pb2.Sampling(stop=stop),
        )
        begin = time.perf_counter()
        await self._stub.Prefill(request)
        return time.perf_counter() - begin

    async def close(self) -> None:
        await self._channel.close()


class HttpSender:
    """To a server of OpenAI's API. See Sender."""

    def __init__(self, port: int, served: str = "") -> None:
        self._port = port
        self._served = served
        self._connection: Connection | None = None

    async def first_token_seconds(self, prompt: Prompt) -> float:
        if self._connection is None:
            self._connection = await Connection.open(self._port)
        asked = {"model": self._served or FLAT, "user": FLAT, "prompt": prompt, "max_tokens": 1, "stream": True}
        try:
            async with timeout(_PATIENCE_SECONDS):
                answer = await self._connection.answer(json.dumps(asked).encode(), 1)
        except (OSError, asyncio.TimeoutError) as error:
            await self.close()
            raise ConnectionError(f"no answer: {error}") from error
        return answer.arrivals[0] - answer.started

    async def close(self) -> None:
        """Closes the connection. The next prompt opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
