"""A gateway, as an endpoint picker sees it: one stream of Envoy's external processing for each HTTP request."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from support.cluster.behind_picker import PickedHosts
from support.eventually import PATIENCE_SECONDS

from baton.envoy import ext_proc_pb2 as pb
from baton.envoy import ext_proc_pb2_grpc
from rpc.channels import open_channel

ENDPOINT = "x-gateway-destination-endpoint"
COMPLETIONS = "/v1/completions"


class Gateway:
    """A stream to the picker."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, **message: Any) -> None:
        await self._call.write(pb.ProcessingRequest(**message))

    async def receive(self) -> pb.ProcessingResponse:
        response: pb.ProcessingResponse = await self._call.read()
        assert response is not grpc.aio.EOF, await self._call.details()
        return response

    async def ask(self, **message: Any) -> pb.ProcessingResponse:
        await self.send(**message)
        return await self.receive()


@asynccontextmanager
async def gateway(hosts: PickedHosts) -> AsyncIterator[Gateway]:
    async with open_channel(hosts.picker.picker_address) as channel:
        call = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process(timeout=PATIENCE_SECONDS)
        try:
            yield Gateway(call)
        finally:
            call.cancel()


def head(path: str = COMPLETIONS, mode: int | None = pb.FULL_DUPLEX_STREAMED, **fields: Any) -> dict[str, Any]:
    """The first message, in the body's mode; None for an Envoy that does not say."""
    headers = {":method": "POST", ":path": path, "content-type": fields.pop("content_type", "application/json")}
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    end = fields.pop("end_of_stream", False)
    message: dict[str, Any] = {
        "request_headers": pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=end)
    }
    if mode is not None:
        message["protocol_config"] = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)  # type: ignore[arg-type]
    return {**message, **fields}


def piece(body: bytes, *, end: bool = True) -> dict[str, Any]:
    return {"request_body": pb.HttpBody(body=body, end_of_stream=end)}


def completion(model: str, prompt: str = "one two three") -> bytes:
    return json.dumps({"model": model, "prompt": prompt}).encode()


def subset(endpoints: Iterable[str]) -> dict[str, Any]:
    context = pb.Metadata()
    context.filter_metadata["envoy.lb.subset_hint"].update({f"{ENDPOINT}-subset": list(endpoints)})
    return {"metadata_context": context}


def endpoints(response: pb.ProcessingResponse) -> list[str]:
    """The names in the response's header and metadata."""
    kind: Any = getattr(response, response.WhichOneof("response") or "")
    (option,) = kind.response.header_mutation.set_headers
    assert option.header.key == ENDPOINT
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    named: str = option.header.raw_value.decode()
    assert response.dynamic_metadata["envoy.lb"][ENDPOINT] == named  # type: ignore[index]
    return named.split(",")
