"""A client of Baton with nothing but grpcio and generated stubs: python main.py stream "Sort: pear apple mango"."""

import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from baton.inference.v1.generate_pb2 import CancelGenerationRequest, GenerateRequest, GenerateResponse
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from baton.inference.v1.sampling_pb2 import SamplingParams
from baton.inference.v1.timing_pb2 import Stage

ENOUGH = 3  # messages of tokens, before a cancel
ATTEMPTS = 10
CALL_SECONDS = 10.0
MAY_PASS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@dataclass(frozen=True)
class Details:
    """The details of a failed call's status. Empty if it comes from a proxy, or from gRPC itself."""

    info: ErrorInfo
    bad_request: BadRequest
    retry: RetryInfo

    @classmethod
    def of(cls, error: grpc.RpcError) -> "Details":
        details = cls(ErrorInfo(), BadRequest(), RetryInfo())
        status = rpc_status.from_call(error)
        for packed in status.details if status else ():
            for message in (details.info, details.bad_request, details.retry):
                packed.Unpack(message)  # does nothing if it is of another type
        return details


def stream(stub: InferenceServiceStub, prompt: str) -> None:
    """Prints a completion as it streams."""
    for text in texts(stub.Generate(greedy(prompt))):
        print(text, end="", flush=True)
    print()


def cancel(stub: InferenceServiceStub, prompt: str) -> None:
    """Cancels the call in the middle, which cancels the request on the workers."""
    call = stub.Generate(greedy(prompt))
    for count, text in enumerate(texts(call), start=1):
        print(text, end="", flush=True)
        if count == ENOUGH:
            call.cancel()


def stop(stub: InferenceServiceStub, prompt: str) -> None:
    """Cancels a request by its id, and prints what each worker confirmed."""
    request = greedy(prompt, request_id=str(uuid.uuid4()))
    for count, _ in enumerate(texts(stub.Generate(request)), start=1):
        if count == ENOUGH:
            named = CancelGenerationRequest(request_id=request.request_id)
            for receipt in stub.CancelGeneration(named, timeout=CALL_SECONDS).receipts:
                print(
                    f"stopped {Stage.Name(receipt.stage)} on {receipt.worker_id}: {receipt.blocks_freed} blocks freed"
                )


def deadline(stub: InferenceServiceStub, seconds: str, prompt: str) -> None:
    """Sets a deadline, which travels with the call to every worker."""
    for text in texts(stub.Generate(greedy(prompt), timeout=float(seconds))):
        print(text, end="", flush=True)
    print()


def retry(stub: InferenceServiceStub, prompt: str) -> None:
    """Retries transient failures after the delay that the server asks for, but not after text has been printed."""
    for attempt in range(1, ATTEMPTS + 1):
        printed = False
        try:
            for text in texts(stub.Generate(greedy(prompt))):
                printed = True
                print(text, end="", flush=True)
            print()
            return
        except grpc.RpcError as error:
            if printed or attempt == ATTEMPTS or error.code() not in MAY_PASS:
                raise
            time.sleep(pause(error, attempt))


def errors(stub: InferenceServiceStub) -> None:
    """Sends an invalid request, to show the details of an error."""
    sampling = SamplingParams(temperature=-1, top_p=2)
    list(stub.Generate(GenerateRequest(prompt="x", sampling=sampling)))


def greedy(prompt: str, request_id: str = "") -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(temperature=0), request_id=request_id)


def texts(call: Iterable[GenerateResponse]) -> Iterator[str]:
    return (response.token.text for response in call if response.HasField("token"))


def pause(error: grpc.RpcError, attempt: int) -> float:
    """The delay before a retry in seconds: the server's, or else exponential backoff; with jitter in both cases."""
    details = Details.of(error)
    asked = details.retry.retry_delay.ToTimedelta().total_seconds()
    seconds = (asked or min(0.1 * 2**attempt, 5)) * random.uniform(1, 1.25)
    print(f"again in {seconds:.2f} s: {details.info.reason}", file=sys.stderr)
    return seconds


def explain(error: grpc.RpcError) -> None:
    """Prints the whole status of a failed call."""
    details = Details.of(error)
    print(f"status {error.code().value[0]}: {error.details()}", file=sys.stderr)
    if details.info.reason:
        print(f"reason {details.info.reason}", file=sys.stderr)
    if "stage" in details.info.metadata:
        print(f"stage {details.info.metadata['stage']}", file=sys.stderr)
    for violation in details.bad_request.field_violations:
        print(f"field {violation.field}: {violation.description}", file=sys.stderr)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (stream, cancel, stop, deadline, retry, errors)
}


def main() -> int:
    name, *words = sys.argv[1:]
    with grpc.insecure_channel(os.environ.get("BATON_ADDRESS", "127.0.0.1:7070")) as channel:
        try:
            COMMANDS[name](InferenceServiceStub(channel), *words)
        except grpc.RpcError as error:
            explain(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
