"""The end of a disturbed request, and the rule for it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from baton.inference.v1 import generate_pb2 as pb

# A request that exceeds its deadline by more has hung.
GRACE_SECONDS = 1.5
_DETAILS = "grpc-status-details-bin"


@dataclass(slots=True)
class Outcome:
    """The outcome of a request. `code` is OK or its status; `reason` and `stage` are those of its ErrorInfo."""

    request_id: str
    started_at: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    sequences: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    code: str = ""
    reason: str = ""
    stage: str = ""
    message: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.code == "OK" and self.finished is not None

    @property
    def label(self) -> str:
        """Its column in the table."""
        return "right" if self.is_right else f"{self.code}/{self.reason}" if self.reason else self.code

    def end(self, error: BaseException | None) -> None:
        """Notes the end: success, a status, or a caller that left."""
        self.seconds = time.monotonic() - self.started_at
        if isinstance(error, aio.AioRpcError):
            self.code, self.message = error.code().name, error.details() or ""
            info = _error_info(error)
            self.reason, self.stage = info.reason, info.metadata.get("stage", "")
        else:
            self.code = "OK" if error is None else "CANCELLED"

    def faults(self, expected: Sequence[int], seconds: float, *, router_was_hit: bool) -> list[str]:
        """The problem of this outcome; empty if it is allowed."""
        found = []
        if self.seconds > seconds + GRACE_SECONDS:
            found.append(f"ended after {self.seconds:.1f} s of {seconds:.1f}")
        if self.sequences != list(range(len(self.sequences))):
            found.append(f"messages are numbered {self.sequences}")
        if self.code == "OK" and (self.finished is None or self.ids != list(expected)):
            found.append(f"said OK with {len(self.ids)} of {len(expected)} tokens: {_compared(self.ids, expected)}")
        if self.ids != list(expected[: len(self.ids)]):
            found.append("tokens were lost, repeated or wrong")
        if self.code in ("UNKNOWN", "INTERNAL") and self.reason in ("", "INTERNAL_ERROR"):
            found.append(f"ended with a bare {self.code}: {self.message}")
        may_lack_reason = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")  # which gRPC itself says too, on either side
        if router_was_hit:
            may_lack_reason = (*may_lack_reason, "UNAVAILABLE")
        if self.code not in may_lack_reason and not self.reason:
            found.append(f"ended with {self.code} and no reason: {self.message}")
        return [f"{self.request_id}: {text}" for text in found]


def _compared(ids: Sequence[int], expected: Sequence[int]) -> str:
    """Every id, with the expected one where that is another."""
    both = zip(ids, expected, strict=False)
    return " ".join(str(one) if one == other else f"{one}(not {other})" for one, other in both)


async def follow(call: "aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]", outcome: Outcome) -> None:
    """Reads a stream to its end. Cancelling it is a client that leaves."""
    error: BaseException | None = None
    try:
        async for message in call:
            outcome.sequences.append(message.sequence)
            outcome.ids += message.token.token_ids
            outcome.text += message.token.text
            if message.HasField("finished"):
                outcome.finished = message.finished
    except aio.AioRpcError as failure:
        error = failure
    except asyncio.CancelledError as left:
        error = left
    finally:
        call.cancel()
        outcome.end(error)


def _error_info(error: aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    metadata = error.trailing_metadata() or grpc.aio.Metadata()
    for key, value in metadata:
        if key == _DETAILS and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                _unpack(detail, info)
    return info


def _unpack(detail: AnyMessage, info: error_details_pb2.ErrorInfo) -> None:
    if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
        detail.Unpack(info)
