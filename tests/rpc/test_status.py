"""Errors as statuses on the wire and back: every class, its code, its details."""

from collections.abc import Iterator

import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from support.servers.scripted_router import scripted, status_of

from baton import errors
from baton.calls import unary
from baton.error_details import from_rpc_error
from baton.errors import (
    BatonError,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    QuotaUnavailable,
    RouterStarting,
)
from baton.inference.v1 import generate_pb2, model_pb2
from router.openai.errors import headers_of
from rpc.status import to_status
from runtime.telemetry.logs import add_log_fields

# The contract with clients in other languages: not derived from the code under test.
WIRE = {
    "BatonError": ("INTERNAL", "INTERNAL_ERROR"),
    "InvalidRequest": ("INVALID_ARGUMENT", "INVALID_REQUEST"),
    "Unsupported": ("UNIMPLEMENTED", "UNSUPPORTED"),
    "Unauthenticated": ("UNAUTHENTICATED", "UNAUTHENTICATED"),
    "PermissionDenied": ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    "ModelNotFound": ("NOT_FOUND", "MODEL_NOT_FOUND"),
    "RequestNotFound": ("NOT_FOUND", "REQUEST_NOT_FOUND"),
    "RequestExists": ("ALREADY_EXISTS", "REQUEST_EXISTS"),
    "RoleMismatch": ("FAILED_PRECONDITION", "ROLE_MISMATCH"),
    "LayoutMismatch": ("FAILED_PRECONDITION", "KV_LAYOUT_MISMATCH"),
    "StaleEpoch": ("ABORTED", "STALE_EPOCH"),
    "StreamAdopted": ("ABORTED", "STREAM_ADOPTED"),
    "StaleAttempt": ("ABORTED", "STALE_ATTEMPT"),
    "StreamDiverged": ("ABORTED", "STREAM_DIVERGED"),
    "StreamLost": ("NOT_FOUND", "STREAM_LOST"),
    "PositionInvalid": ("INVALID_ARGUMENT", "POSITION_INVALID"),
    "EmbeddingLost": ("ABORTED", "EMBEDDING_LOST"),
    "HandoffLost": ("ABORTED", "HANDOFF_LOST"),
    "TokensLost": ("DATA_LOSS", "TOKENS_LOST"),
    "Overloaded": ("RESOURCE_EXHAUSTED", "OVERLOADED"),
    "DeadlineUnreachable": ("RESOURCE_EXHAUSTED", "DEADLINE_UNREACHABLE"),
    "SlowReader": ("RESOURCE_EXHAUSTED", "SLOW_READER"),
    "QuotaExceeded": ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED"),
    "Unavailable": ("UNAVAILABLE", "WORKER_UNAVAILABLE"),
    "QuotaUnavailable": ("UNAVAILABLE", "QUOTA_UNAVAILABLE"),
    "NoWorker": ("UNAVAILABLE", "NO_WORKER"),
    "RouterStarting": ("UNAVAILABLE", "ROUTER_STARTING"),
    "Draining": ("UNAVAILABLE", "DRAINING"),
    "LoraMismatch": ("FAILED_PRECONDITION", "LORA_MISMATCH"),
    "LoraNotHere": ("UNAVAILABLE", "LORA_NOT_HERE"),
    "WorkerTimeout": ("UNAVAILABLE", "WORKER_TIMEOUT"),
    "MediaUnavailable": ("UNAVAILABLE", "MEDIA_UNAVAILABLE"),
    "DeadlineExceeded": ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    "Cancelled": ("CANCELLED", "CANCELLED"),
    "EngineFailed": ("INTERNAL", "ENGINE_FAILED"),
    "InvalidReply": ("INTERNAL", "INVALID_REPLY"),
    "DeviceFailed": ("INTERNAL", "DEVICE_FAILED"),
    "OutOfMemory": ("INTERNAL", "OUT_OF_MEMORY"),
    "ComputeFailed": ("INTERNAL", "COMPUTE_FAILED"),
    "ConfigError": ("FAILED_PRECONDITION", "INVALID_CONFIG"),
}


def classes(kind: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    if kind.__module__ == errors.__name__:
        yield kind
    for child in kind.__subclasses__():
        yield from classes(child)


def example(kind: type[BatonError]) -> BatonError:
    if issubclass(kind, InvalidRequest):
        error: BatonError = kind([FieldViolation("sampling.top_p", "is 2"), FieldViolation("model", "is empty")])
    elif issubclass(kind, Overloaded):
        error = kind("no room", retry_after_seconds=1.5)
    elif issubclass(kind, QuotaExceeded):
        error = kind("used up", subject="tenant-a", retry_after_seconds=2.5)
    elif issubclass(kind, (QuotaUnavailable, RouterStarting)):
        error = kind("not yet", retry_after_seconds=3.5)
    else:
        error = kind("what happened")
    error.stage, error.worker_id = "prefill", "worker-7"
    return error


async def over_the_wire(error: BaseException) -> aio.AioRpcError:
    async def get_model(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        add_log_fields(request_id="request-1")
        raise error

    async with scripted(GetModel=get_model) as peer:
        return await status_of(peer.stub.GetModel(model_pb2.GetModelRequest()))


def rich(error: aio.AioRpcError) -> status_pb2.Status:
    trailers = dict(error.trailing_metadata() or ())
    return status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


def detail(error: aio.AioRpcError, kind: type) -> object:
    unpacked = kind()
    assert any(packed.Unpack(unpacked) for packed in rich(error).details if packed.Is(kind.DESCRIPTOR))
    return unpacked


def foreign(code: StatusCode, details: str, trailers: aio.Metadata | None = None) -> BatonError:
    return from_rpc_error(aio.AioRpcError(code, aio.Metadata(), trailers or aio.Metadata(), details))


def test_every_class_has_a_wire_contract() -> None:
    assert {kind.__name__ for kind in classes()} == set(WIRE)


def test_no_two_classes_share_a_reason() -> None:
    reasons = [kind.reason for kind in classes()]
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize("kind", list(classes()))
async def test_every_error_has_its_code_and_reason_on_the_wire(kind: type[BatonError]) -> None:
    error = await over_the_wire(example(kind))
    code, reason = WIRE[kind.__name__]
    assert error.code().name == code
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, "baton")
    assert dict(info.metadata) == {"stage": "prefill", "worker_id": "worker-7", "request_id": "request-1"}
    assert rich(error).message == error.details() == example(kind).message


@pytest.mark.parametrize("kind", list(classes()))
async def test_every_error_comes_back_as_what_it_was(kind: type[BatonError]) -> None:
    sent = example(kind)
    restored = from_rpc_error(await over_the_wire(sent))
    assert type(restored) is kind
    assert vars(restored) == vars(sent)


async def test_an_invalid_request_names_its_fields_in_bad_request() -> None:
    bad = detail(await over_the_wire(example(InvalidRequest)), error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("sampling.top_p", "is 2"),
        ("model", "is empty"),
    ]


async def test_an_overload_says_when_to_come_back() -> None:
    retry = detail(await over_the_wire(example(Overloaded)), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("kind", [QuotaUnavailable, RouterStarting])
async def test_a_router_that_cannot_serve_yet_says_when_to_come_back(kind: type[BatonError]) -> None:
    error = await over_the_wire(example(kind))
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 3500
    assert dict(headers_of(example(kind)))[b"retry-after-ms"] == b"3500"


async def test_a_quota_failure_names_its_subject() -> None:
    error = await over_the_wire(example(QuotaExceeded))
    assert detail(error, error_details_pb2.QuotaFailure).violations[0].subject == "tenant-a"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500


async def test_an_unexpected_error_does_not_show_its_text() -> None:
    error = await over_the_wire(RuntimeError("password=hunter2"))
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "internal error")
    assert b"hunter2" not in rich(error).SerializeToString()


async def test_a_subclass_of_elsewhere_has_the_code_of_its_parent() -> None:
    class BrokenLink(errors.Unavailable):
        pass

    assert to_status(BrokenLink("gone")).code is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("letter", ["x", "ü", "猫", "\n", "%", "\udc80"])
async def test_a_status_of_any_length_arrives(letter: str) -> None:
    violations = [FieldViolation(f"{letter * 400}[{index}]", letter * 4000) for index in range(200)]
    error = InvalidRequest(violations)
    error.stage = error.worker_id = letter * 9000
    arrived = await over_the_wire(error)
    assert arrived.code() is StatusCode.INVALID_ARGUMENT
    assert detail(arrived, error_details_pb2.BadRequest).field_violations
    trailers = sum(len(key) + len(value) + 32 for key, value in arrived.trailing_metadata() or ())
    assert trailers < 6 * 1024


async def test_a_long_message_is_cut_and_says_so() -> None:
    arrived = await over_the_wire(errors.NoWorker("nothing " * 1000))
    assert arrived.details().startswith("nothing nothing")
    assert arrived.details().endswith("...")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (StatusCode.UNAVAILABLE, errors.Unavailable),
        (StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (StatusCode.CANCELLED, errors.Unavailable),
        (StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (StatusCode.NOT_FOUND, BatonError),
        (StatusCode.DATA_LOSS, BatonError),
    ],
)
def test_a_foreign_status_is_judged_by_its_code(code: StatusCode, expected: type[BatonError]) -> None:
    restored = foreign(code, "what the proxy said")
    assert type(restored) is expected
    assert "what the proxy said" in restored.message


def test_a_message_over_the_size_limit_is_an_invalid_request() -> None:
    details = "CLIENT: Received message larger than max (70000000 vs. 67108864)"
    assert type(foreign(StatusCode.RESOURCE_EXHAUSTED, details)) is InvalidRequest


def test_unreadable_details_of_a_foreign_server_do_no_harm() -> None:
    trailers = aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    assert type(foreign(StatusCode.UNAVAILABLE, "gone", trailers)) is errors.Unavailable


def test_a_reason_of_another_domain_is_not_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="example.com")
    status = status_pb2.Status(code=StatusCode.UNAVAILABLE.value[0])
    status.details.add().Pack(info)
    trailers = aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    assert type(foreign(StatusCode.UNAVAILABLE, "gone", trailers)) is errors.Unavailable


def test_a_reason_of_a_newer_peer_is_judged_by_its_code() -> None:
    info = error_details_pb2.ErrorInfo(reason="NOT_INVENTED_YET", domain="baton", metadata={"stage": "decode"})
    status = status_pb2.Status(code=StatusCode.UNAVAILABLE.value[0])
    status.details.add().Pack(info)
    restored = foreign(
        StatusCode.UNAVAILABLE, "gone", aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    )
    assert (type(restored), restored.stage) == (errors.Unavailable, "decode")


async def test_an_error_passes_through_two_servers_unchanged() -> None:
    async def refuse(request: object, context: object) -> None:
        raise QuotaExceeded("used up", subject="tenant-a", retry_after_seconds=3)

    async with scripted(GetModel=refuse) as worker:

        async def ask_worker(request: object, context: object) -> model_pb2.GetModelResponse:
            return await unary(worker.stub.GetModel(model_pb2.GetModelRequest()))

        async with scripted(GetModel=ask_worker) as router:
            with pytest.raises(QuotaExceeded) as caught:
                await unary(router.stub.GetModel(model_pb2.GetModelRequest()))
    assert (caught.value.subject, caught.value.retry_after_seconds) == ("tenant-a", 3)


async def test_an_error_after_messages_keeps_its_details() -> None:
    async def generate(request: object, context: aio.ServicerContext) -> None:
        await context.write(generate_pb2.GenerateResponse(sequence=7))
        raise errors.HandoffLost("handoff h1: the lease ran out", stage="decode")

    received = []
    async with scripted(Generate=generate) as peer:
        call = peer.stub.Generate(generate_pb2.GenerateRequest())
        received.append((await call.read()).sequence)
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    assert received == [7]
    assert caught.value.code() is StatusCode.ABORTED
    assert detail(caught.value, error_details_pb2.ErrorInfo).metadata["stage"] == "decode"
