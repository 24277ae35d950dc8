"""The messages between the supervisor and the processes of a router: JSON, by the kind of each message."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from baton.inference.v1 import generate_pb2
from rpc.auth.caller import Caller, Role


class Message(BaseModel):
    """A message, by its `kind`."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Done(Message):
    """An answer without content."""

    kind: Literal["done"] = "done"


class Prepared(Message):
    """From a process: it can listen. The answer says that it may: all begin together, for connections stay."""

    kind: Literal["prepared"] = "prepared"


class Listening(Message):
    """From a process: it listens now."""

    kind: Literal["listening"] = "listening"


class Refused(Message):
    """From a process: it ends, because its configuration is wrong."""

    kind: Literal["refused"] = "refused"
    problem: str


class Drain(Message):
    """For a process: it drains and ends; `at_once` cancels what still runs."""

    kind: Literal["drain"] = "drain"
    at_once: bool = False


class AskReport(Message):
    """For a process: its report at /health."""

    kind: Literal["ask_report"] = "ask_report"


class ProcessReport(Message):
    """The report of a process at /health."""

    kind: Literal["report"] = "report"
    report: dict[str, Any]


class AskMetrics(Message):
    """For a process: its metrics."""

    kind: Literal["ask_metrics"] = "ask_metrics"


class Family(Message):
    """One metric with all its samples: name, labels and value."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class ProcessMetrics(Message):
    """The metrics of a process."""

    kind: Literal["metrics"] = "metrics"
    families: list[Family]


class CallerName(Message):
    """The authenticated caller of a call."""

    name: str
    role: Role
    certificate: str = ""

    def caller(self) -> Caller:
        """The same, as calls have it."""
        return Caller(self.name, self.role, self.certificate)


class StopRequests(Message):
    """From a process to the others, and for each of them: stop what runs under a caller's request id."""

    kind: Literal["stop"] = "stop"
    request_id: str
    caller: CallerName | None

    @classmethod
    def of(cls, request_id: str, caller: Caller | None) -> "StopRequests":
        """The message for a caller's request id."""
        named = CallerName(name=caller.name, role=caller.role, certificate=caller.certificate) if caller else None
        return cls(request_id=request_id, caller=named)


class RequestsStopped(Message):
    """The number of the id's requests that ran there, and their workers' serialized CancelReceipts in base64."""

    kind: Literal["stopped"] = "stopped"
    count: int
    receipts: list[str] = []

    @classmethod
    def of(cls, count: int, receipts: Sequence[generate_pb2.CancelReceipt]) -> "RequestsStopped":
        """The message for these receipts."""
        return cls(count=count, receipts=[base64.b64encode(each.SerializeToString()).decode() for each in receipts])

    def messages(self) -> list[generate_pb2.CancelReceipt]:
        """The receipts."""
        return [generate_pb2.CancelReceipt.FromString(base64.b64decode(each)) for each in self.receipts]


AnyMessage = Annotated[
    Done
    | Prepared
    | Listening
    | Refused
    | Drain
    | AskReport
    | ProcessReport
    | AskMetrics
    | ProcessMetrics
    | StopRequests
    | RequestsStopped,
    Field(discriminator="kind"),
]

MESSAGES: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)
