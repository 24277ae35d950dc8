"""The calls that share a stream, and what the peer says to each of them."""

import time
from functools import partial
from typing import Any

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton.error_details import from_rpc_error
from baton.errors import BatonError, InvalidReply
from baton_http2.turns import CallTurns
from engine_protocol.multiplex.metadata import FailedStatus
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.tokens import TokenOutput, TokenTaker


class RunningCalls:
    """The calls of one stream by their numbers."""

    def __init__(self) -> None:
        self._calls: dict[int, MultiplexedCall[Any]] = {}
        self._takers: dict[int, TokenTaker] = {}
        self._turns = CallTurns()
        # Of the last step, unless something has changed: its calls, and those of each output with their places in it.
        self._grouped: list[int] = []
        self._groups: list[tuple[TokenOutput | None, list[tuple[int, int, TokenTaker | None]]]] = []

    def add(self, number: int, call: MultiplexedCall[Any]) -> None:
        """Adds a call that has begun."""
        self._calls[number] = call

    def forget(self, number: int) -> bool:
        """Gives a call nothing more; whether it was running."""
        self.relay_tokens(number, None)
        return self._calls.pop(number, None) is not None

    def relay_tokens(self, number: int, taker: TokenTaker | None) -> None:
        """Gives a call's tokens to `taker`, and those that it refuses to the call; None gives all to the call."""
        if taker is not None and number in self._calls:
            self._takers[number] = taker
        else:
            self._takers.pop(number, None)
        self._ungroup()

    def end(self, error: BatonError) -> None:
        """Ends all calls with an error."""
        calls, self._calls = self._calls, {}
        for each in calls.values():
            each.end(error)

    def take(self, response: pb.MultiplexResponse) -> None:
        """Gives the calls what has come for them. Raises InvalidReply for tokens without a call."""
        calls = self._calls
        if response.token_calls:
            self._take_tokens(response)
        for answer in response.answers:
            call = calls.get(answer.call)
            if call is None:
                continue
            if answer.HasField("status"):
                del calls[answer.call]
                self._turns.run(partial(call.end, _error_of(answer.status)))
            else:
                call.take(answer.message)

    def _take_tokens(self, response: pb.MultiplexResponse) -> None:
        """Takes the tokens of a step, those of one output after those of another, so that each is written early."""
        # As lists, which repeated fields make at once.
        numbers, token_ids = response.token_calls[:], response.token_ids[:]
        if len(numbers) != len(token_ids):
            raise InvalidReply(f"{len(token_ids)} tokens came for {len(numbers)} calls")
        if numbers != self._grouped:
            self._group(numbers)
        groups, taken = self._groups, list[tuple[int, TokenTaker]]()
        for output, places in groups:
            for place, number, taker in places:
                # The present one: a call may have ended, or have left its tokens to its reader, at a token before.
                present = taker if self._groups is groups else self._takers.get(number)
                try:
                    if present is not None and present.take(token_ids[place]):
                        taken.append((number, present))
                        continue
                except Exception as error:  # of one call, whose reader raises it: the others of the stream go on
                    self._fail(number, error)
                    continue
                call = self._calls.get(number)
                if call is not None:
                    call.take(token_ids[place])
            if output is not None:
                output.flush_early()
        now = time.monotonic()
        for number, present in taken:
            try:
                present.note_taken(now)
            except Exception as error:
                self._fail(number, error)

    def _group(self, numbers: list[int]) -> None:
        """Groups the calls of a step by their outputs. The next step mostly has the same ones."""
        groups: dict[TokenOutput | None, list[tuple[int, int, TokenTaker | None]]] = {}
        for place, number in enumerate(numbers):
            taker = self._takers.get(number)
            groups.setdefault(None if taker is None else taker.output, []).append((place, number, taker))
        self._grouped, self._groups = numbers, [*groups.items()]

    def _ungroup(self) -> None:
        """The calls, or their takers, have changed."""
        if self._grouped:
            self._grouped, self._groups = [], []

    def _fail(self, number: int, error: Exception) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.fail(error)


def _error_of(status: pb.CallStatus) -> BatonError | None:
    return from_rpc_error(FailedStatus(status)) if status.code != StatusCode.OK.value[0] else None
