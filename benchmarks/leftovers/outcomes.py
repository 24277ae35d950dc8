"""Requests for each end: answered, cancelled or late at each stage, refused, failed, migrated."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
from grpc import aio
from support.clients.kserve_call import text_request
from support.images.pictures import picture

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2, image_pb2, image_pb2_grpc, inference_service_pb2_grpc
from baton.kserve import inference_pb2
from benchmarks.leftovers import kept
from benchmarks.leftovers.cluster import MODEL, REFUSED_TENANT, Cluster
from engine_protocol.fault_injection import FAULT_KEY
from router.kserve.service import NAME as KSERVE
from rpc.channels import open_channel

_CHANNELS = 4
_TOKENS = 8
# So long a request runs before it is cancelled, or late: it is where it hangs by then.
_HUNG_SECONDS = 0.05
_IMAGE = picture()
_OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}

Act = Callable[["Clients"], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An end of a request: `act` sends one that comes to it, and returns the status, which is one of `right`."""

    name: str
    act: Act
    right: frozenset[str]


class Clients:
    """Connections to a cluster: `async with Clients(cluster) as clients: ...`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stack = AsyncExitStack()
        self._channels: Sequence[aio.Channel] = ()
        self._other_channels: Sequence[aio.Channel] = ()
        self._http: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> "Clients":
        self._channels = await self._open(self._cluster.address)
        self._other_channels = await self._open(self._cluster.other_address)
        limits = httpx2.Limits(max_connections=64)
        self._http = await self._stack.enter_async_context(
            httpx2.AsyncClient(
                trust_env=False, timeout=30, limits=limits, base_url=f"http://{self._cluster.openai_address}"
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self, address: str) -> Sequence[aio.Channel]:
        opened = [open_channel(address, replaced_options=_OWN_CONNECTION) for _ in range(_CHANNELS)]
        return [await self._stack.enter_async_context(each) for each in opened]

    @property
    def channel(self) -> aio.Channel:
        """One of the channels."""
        return random.choice(self._channels)

    @property
    def stub(self) -> inference_service_pb2_grpc.InferenceServiceStub:
        """On one of the channels."""
        return inference_service_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def other_stub(self) -> inference_service_pb2_grpc.InferenceServiceStub:
        """To the other router."""
        return inference_service_pb2_grpc.InferenceServiceStub(random.choice(self._other_channels))

    @property
    def http(self) -> httpx2.AsyncClient:
        """To the API of OpenAI."""
        assert self._http is not None
        return self._http


def _request(tokens: int = _TOKENS, **fields: Any) -> generate_pb2.GenerateRequest:
    prompt = {"prompt": f"{random.random()} and more"} if "prompt" not in fields else {}
    request = {"model": MODEL, "stopping": {"max_tokens": tokens}, **prompt, **fields}
    return generate_pb2.GenerateRequest(**request)


def _with_image(**fields: Any) -> generate_pb2.GenerateRequest:
    # With a salt, so that no cache has it.
    routing = {"cache_salt": f"{random.random()}"}
    return _request(prompt=f"{random.random()} <image>", media=[{"data": _IMAGE}], routing=routing, **fields)


def _metadata(fault: str) -> tuple[tuple[str, str], ...]:
    return ((FAULT_KEY, fault),) if fault else ()


def _generate(fault: str = "", make: Callable[..., generate_pb2.GenerateRequest] = _request, **fields: Any) -> Act:
    async def act(clients: Clients) -> str:
        call = clients.stub.Generate(make(**fields), metadata=_metadata(fault), timeout=30)
        async for _ in call:
            pass
        return (await call.code()).name

    return _status_of(act)


def _unary(fault: str = "", **fields: Any) -> Act:
    async def act(clients: Clients) -> str:
        request = generate_pb2.GenerateUnaryRequest(request=_request(**fields))
        call = clients.stub.GenerateUnary(request, metadata=_metadata(fault), timeout=30)
        await call
        return (await call.code()).name

    return _status_of(act)


def _late(fault: str, make: Callable[..., generate_pb2.GenerateRequest] = _request) -> Act:
    async def act(clients: Clients) -> str:
        call = clients.stub.Generate(make(tokens=4000), metadata=_metadata(fault), timeout=_HUNG_SECONDS)
        async for _ in call:
            pass
        return (await call.code()).name

    return _status_of(act)


def _cancelled(fault: str, make: Callable[..., generate_pb2.GenerateRequest] = _request) -> Act:
    async def act(clients: Clients) -> str:
        call = clients.stub.Generate(make(tokens=4000), metadata=_metadata(fault), timeout=30)
        await asyncio.sleep(_HUNG_SECONDS if fault else 0)
        call.cancel()
        return (await call.code()).name

    return _status_of(act)


def _stopped(fault: str) -> Act:
    """By CancelGeneration."""

    async def act(clients: Clients) -> str:
        request = _request(tokens=4000, request_id=f"stopped-{random.random()}")
        call = clients.stub.Generate(request, metadata=_metadata(fault), timeout=30)
        reading = asyncio.ensure_future(_read(call))
        await asyncio.sleep(_HUNG_SECONDS)
        await clients.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id=request.request_id))
        return await reading

    return _status_of(act)


async def _read(call: Any) -> str:
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def _left(clients: Clients) -> str:
    """The connection is closed while its calls run."""
    async with open_channel(clients._cluster.address, replaced_options=_OWN_CONNECTION) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(_request(tokens=4000)) for _ in range(2)]
        await calls[0].read()
    return "left"


def _picture(fault: str = "", is_left: bool = False, timeout: float = 30, steps: int = 2) -> Act:
    async def act(clients: Clients) -> str:
        options = image_pb2.ImageOptions(prompt="a red circle", width=32, height=32, steps=steps)
        request = image_pb2.ImageServiceGenerateRequest(model=MODEL, options=options)
        stub = image_pb2_grpc.ImageServiceStub(clients.channel)
        call = stub.Generate(request, metadata=_metadata(fault), timeout=timeout)
        if is_left:
            await asyncio.sleep(_HUNG_SECONDS)
            call.cancel()
        async for _ in call:
            pass
        return (await call.code()).name

    return _status_of(act)


def _kserve(model: str = MODEL) -> Act:
    request = text_request("hello", model=model)
    request.parameters["max_tokens"].int64_param = _TOKENS

    async def act(clients: Clients) -> str:
        call = clients.channel.unary_unary(
            f"/{KSERVE}/ModelInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelInferResponse.FromString,
        )(request, timeout=30)
        await call
        return (await call.code()).name

    return _status_of(act)


def _openai(is_left: bool = False, path: str = "/v1/chat/completions", **fields: Any) -> Act:
    body = {"model": MODEL, **fields}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": _TOKENS, **body}

    async def act(clients: Clients) -> str:
        async with clients.http.stream("POST", path, content=json.dumps(body)) as response:
            async for _ in response.aiter_bytes():
                if is_left:
                    return "left"
        return str(response.status_code)

    return act


def _status_of(act: Act) -> Act:
    async def caught(clients: Clients) -> str:
        try:
            return await act(clients)
        except aio.AioRpcError as error:
            return error.code().name
        except asyncio.CancelledError:
            # As grpcio says it of a call that this side has cancelled.
            return "CANCELLED"

    return caught


def _kept(act: kept.KeptAct) -> Act:
    """Either router is the first one."""

    async def swapped(clients: Clients) -> str:
        stubs = [clients.stub, clients.other_stub]
        random.shuffle(stubs)
        await act(*stubs)
        return "OK"

    return _status_of(swapped)


async def _quota(clients: Clients) -> str:
    call = clients.stub.Generate(_request(), metadata=((TENANT_KEY, REFUSED_TENANT),), timeout=30)
    async for _ in call:
        pass
    return (await call.code()).name


def _outcome(name: str, act: Act, *right: str) -> Outcome:
    return Outcome(name, act, frozenset(right))


# Where a request can hang: in the router, in the encode, prefill and decode worker.
STAGES = {
    "admission": "hang@admission",
    "tokenizing": "hang@tokenize",
    "routing": "hang@route",
    "queue of prefill": "hang@queue",
    "prefill": "hang@prefill",
    "held": "hang@held",
    "queue of decode": "hang@queue;role=decode",
    "reserving": "hang@reserve",
    "pulling": "hang@pull",
    "confirming": "hang@confirm",
    "decode": "hang@decode:4",
}
# At each attempt, whatever the one before has got.
_LOST = {
    "encode": "drop@encode;attempt=any",
    "decode": ",".join(f"drop@decode:{count};attempt=any" for count in range(2, 16)),
}
# Where many requests have failed at once no worker counts as healthy for a moment.
_MIGRATED = ("OK", "UNAVAILABLE")
# A first answer whose decode has not begun is not kept.
_LEFT_EARLY = ("OK", "NOT_FOUND")

OUTCOMES: Sequence[Outcome] = (
    _outcome("answered", _generate(), "OK"),
    _outcome("answered, unary", _unary(), "OK"),
    _outcome("answered, with an image", _generate(make=_with_image), "OK"),
    _outcome("answered, several", _generate(sampling={"n": 2, "temperature": 1.0}), "OK"),
    _outcome("answered, KServe", _kserve(), "OK"),
    _outcome("answered, OpenAI", _openai(), "200"),
    _outcome("answered, OpenAI's stream", _openai(stream=True), "200"),
    _outcome(
        "answered, OpenAI's responses", _openai(path="/v1/responses", input="hello", max_output_tokens=_TOKENS), "200"
    ),
    _outcome("answered, OpenAI's embeddings", _openai(path="/v1/embeddings", input="hello"), "200"),
    _outcome("answered, a picture", _picture(), "OK"),
    _outcome("cancelled at once", _cancelled(""), "CANCELLED"),
    *(_outcome(f"cancelled in {name}", _cancelled(fault), "CANCELLED") for name, fault in STAGES.items()),
    _outcome("cancelled in encode", _cancelled("hang@encode", make=_with_image), "CANCELLED"),
    _outcome("cancelled in diffuse", _picture("hang@diffuse", is_left=True), "CANCELLED"),
    _outcome("cancelled, OpenAI", _openai(is_left=True, stream=True, max_tokens=4000), "left"),
    _outcome("cancelled by id in prefill", _stopped("hang@prefill"), "CANCELLED", "NOT_FOUND"),
    _outcome("cancelled by id in decode", _stopped("hang@decode:4"), "CANCELLED", "NOT_FOUND"),
    _outcome("cancelled with its connection", _left, "left"),
    *(_outcome(f"late in {name}", _late(fault), "DEADLINE_EXCEEDED") for name, fault in STAGES.items()),
    _outcome("late in encode", _late("hang@encode", make=_with_image), "DEADLINE_EXCEEDED"),
    _outcome("late in diffuse", _picture("hang@diffuse", timeout=_HUNG_SECONDS), "DEADLINE_EXCEEDED"),
    _outcome("refused: a picture", _picture(steps=1_000_000), "INVALID_ARGUMENT"),
    _outcome("refused: unknown model", _generate(model="unknown"), "NOT_FOUND"),
    _outcome("refused: too long", _generate(prompt="x" * 20_000), "INVALID_ARGUMENT"),
    _outcome("refused: an option", _generate(sampling={"top_p": 7.0}), "INVALID_ARGUMENT"),
    _outcome("refused: the quota", _status_of(_quota), "RESOURCE_EXHAUSTED", "OK"),
    _outcome("refused: no such fault", _generate("nonsense"), "INVALID_ARGUMENT"),
    _outcome("refused, unary", _unary(model="unknown"), "NOT_FOUND"),
    _outcome("refused, KServe", _kserve("unknown"), "NOT_FOUND"),
    _outcome("refused, OpenAI", _openai(top_p=7.0), "400"),
    _outcome("refused, OpenAI's stream", _openai(stream=True, model="unknown"), "404"),
    *(
        _outcome(
            f"failed in {name}",
            _generate(fault, make=_with_image if name == "encode" else _request, tokens=16),
            "UNAVAILABLE",
        )
        for name, fault in _LOST.items()
    ),
    _outcome("failed in diffuse", _picture("drop@diffuse;attempt=any"), "UNAVAILABLE"),
    _outcome("failed, unary", _unary(_LOST["decode"], tokens=16), "UNAVAILABLE"),
    _outcome("migrated in prefill", _generate("drop@prefill"), *_MIGRATED),
    _outcome("migrated in prefill, twice", _generate("drop@prefill;attempt=any"), *_MIGRATED),
    _outcome("migrated in decode", _generate("drop@decode:4"), *_MIGRATED),
    _outcome("migrated: the handoff lost", _generate("drop@held"), *_MIGRATED),
    _outcome("migrated: the handoff lost as it is pulled", _generate("drop@pull"), *_MIGRATED),
    _outcome("kept, answered", _kept(kept.answered), "OK"),
    _outcome("kept, cancelled by id", _kept(kept.cancelled_by_id), "OK"),
    _outcome("kept, cancelled by handle", _kept(kept.cancelled_by_handle), "OK"),
    _outcome("kept, cancelled by handle elsewhere", _kept(kept.cancelled_elsewhere), "OK"),
    _outcome("kept, left", _kept(kept.left), "OK"),
    _outcome("kept, left and cancelled", _kept(kept.left_and_cancelled), *_LEFT_EARLY),
    _outcome("kept, resumed", _kept(kept.resumed), *_LEFT_EARLY),
    _outcome("kept, resumed from a copy", _kept(kept.resumed_from_copy), "OK"),
    _outcome("kept, resumed and cancelled", _kept(kept.resumed_and_cancelled), *_LEFT_EARLY),
)
