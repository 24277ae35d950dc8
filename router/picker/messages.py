"""Messages of Envoy's external processing protocol: what is read of them, and those that are answered.

The keys are those of the endpoint picker protocol of the Gateway API Inference Extension
(https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf import struct_pb2

from baton.envoy import ext_proc_pb2 as pb
from baton.errors import BatonError
from router.openai.errors import failure_of
from rpc.status import code_of

ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
ENDPOINT_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an HTTP request, and what the gateway says of it.

    `subset` are the endpoints, as IP:port, that it allows; None for all. `request_mode` and `response_mode` are how the
    bodies come.
    """

    path: str
    is_grpc: bool
    has_body: bool
    subset: frozenset[str] | None
    request_mode: int
    response_mode: int

    @classmethod
    def read(cls, message: pb.ProcessingRequest) -> "Head":
        """Reads the first message of a stream."""
        headers = {each.key.lower(): each.raw_value.decode("latin-1") or each.value for each in _headers(message)}
        modes = message.protocol_config
        # An older Envoy does not say: then it waits for an answer to each message, and a body may follow.
        is_reported = message.HasField("protocol_config")
        return cls(
            path=headers.get(":path", ""),
            is_grpc=headers.get("content-type", "").startswith("application/grpc"),
            has_body=not message.request_headers.end_of_stream,
            subset=_subset(message.metadata_context),
            request_mode=modes.request_body_mode if is_reported else pb.BUFFERED,
            response_mode=modes.response_body_mode,
        )


def named(endpoints: Sequence[str]) -> pb.CommonResponse:
    """Names endpoints in a header of the request, the best first; none changes nothing."""
    if not endpoints:
        return pb.CommonResponse()
    # Replaces what a client may have sent.
    option = pb.HeaderValueOption(
        header=pb.HeaderValue(key=ENDPOINT, raw_value=",".join(endpoints).encode()),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    return pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=[option]), clear_route_cache=True)


def metadata(endpoints: Sequence[str]) -> struct_pb2.Struct | None:
    """Names the same endpoints in Envoy's dynamic metadata."""
    if not endpoints:
        return None
    found = struct_pb2.Struct()
    found.update({ENDPOINT_NAMESPACE: {ENDPOINT: ",".join(endpoints)}})
    return found


def streamed(body: pb.HttpBody) -> pb.BodyResponse:
    """Passes on a piece of a body, which in full duplex Envoy does not do itself."""
    piece = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))


def refused(error: BatonError, *, is_grpc: bool) -> pb.ProcessingResponse:
    """Ends the request with an error, in OpenAI's shape or as a gRPC status."""
    failure = failure_of(error)
    response = pb.ImmediateResponse(status=pb.HttpStatus(code=failure.status), details=error.reason.lower())
    if is_grpc:
        response.body = error.message.encode()
        response.grpc_status.status = code_of(type(error)).value[0]
        return pb.ProcessingResponse(immediate_response=response)
    response.body = failure.body
    for key, value in ((b"content-type", b"application/json"), *failure.headers):
        response.headers.set_headers.add(
            header=pb.HeaderValue(key=key.decode(), raw_value=value),
            append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    return pb.ProcessingResponse(immediate_response=response)


def _headers(message: pb.ProcessingRequest) -> Iterable[pb.HeaderValue]:
    return message.request_headers.headers.headers


def _subset(context: pb.Metadata) -> frozenset[str] | None:
    hint = context.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    if value.WhichOneof("kind") == "string_value":
        return frozenset(each.strip() for each in value.string_value.split(",") if each.strip())
    return frozenset(each.string_value for each in value.list_value.values)
