"""The calls that share a stream, and what the peer says to each of them."""

from typing import Any

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton.error_details import from_rpc_error
from baton.errors import BatonError
from rpc.multiplex.metadata import FailedStatus
from rpc.multiplex.replies import MultiplexedCall, TakeToken


class RunningCalls:
    """The calls of one stream by their numbers."""

    def __init__(self) -> None:
        self._calls: dict[int, MultiplexedCall[Any]] = {}
        self._relays: dict[int, TakeToken] = {}

    def add(self, number: int, call: MultiplexedCall[Any]) -> None:
        """Adds a call that has begun."""
        self._calls[number] = call

    def forget(self, number: int) -> bool:
        """Gives a call nothing more; whether it was running."""
        self._relays.pop(number, None)
        return self._calls.pop(number, None) is not None

    def relay_tokens(self, number: int, take: TakeToken | None) -> None:
        """Gives a call's tokens to `take`, and those that it refuses to the call; None gives all to the call."""
        if take is not None and number in self._calls:
            self._relays[number] = take
        else:
            self._relays.pop(number, None)

    def end(self, error: BatonError) -> None:
        """Ends all calls with an error."""
        calls, self._calls = self._calls, {}
        for each in calls.values():
            each.end(error)

    def take(self, response: pb.MultiplexResponse) -> None:
        """Gives the calls what has come for them."""
        calls, relay_of = self._calls, self._relays.get
        for number, token_id in zip(response.token_calls, response.token_ids, strict=False):
            take = relay_of(number)
            try:
                if take is not None and take(token_id):
                    continue
            except Exception as error:  # of one call, whose reader raises it: the others of the stream go on
                calls[number].fail(error)
                continue
            call = calls.get(number)
            if call is not None:
                call.take(token_id)
        for answer in response.answers:
            call = calls.get(answer.call)
            if call is None:
                continue
            if answer.HasField("status"):
                del calls[answer.call]
                call.end(_error_of(answer.status))
            else:
                call.take(answer.message)


def _error_of(status: pb.CallStatus) -> BatonError | None:
    return from_rpc_error(FailedStatus(status)) if status.code != StatusCode.OK.value[0] else None
