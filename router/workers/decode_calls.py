"""Running decodes as their router reads them: the call, and which reader of a kept decode the router is."""

from dataclasses import dataclass

from baton.engine.v1 import decode_pb2
from engine_protocol.multiplex.separate_call import StreamingCall
from router.telemetry.stages import CallTiming
from router.workers.handle import WorkerHandle


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A running Decode call: the worker's responses, and the timing that takes its report."""

    responses: StreamingCall[decode_pb2.DecodeResponse]
    timing: CallTiming


@dataclass(frozen=True, slots=True)
class KeptReader:
    """Which reader of which kept decode a router is: its worker obeys the last one. The first has attachment 1."""

    attachment: int
    execution: int  # see StreamKeep


NO_READER = KeptReader(0, 0)  # of a decode that is not kept


@dataclass(frozen=True, slots=True)
class AdoptedDecode:
    """A kept decode that this router has attached to: its call, whose next response is what follows `attached`."""

    worker: WorkerHandle
    attached: decode_pb2.DecodeAttached
    responses: StreamingCall[decode_pb2.DecodeResponse]

    @property
    def hop(self) -> int:
        """The number of decodes that the answer has had."""
        return self.attached.hop

    @property
    def reader(self) -> KeptReader:
        """Which reader of it this is."""
        return KeptReader(self.attached.attachment, self.attached.execution)
