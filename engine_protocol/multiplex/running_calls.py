"""The calls that share a stream, and what the peer says to each of them."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton.error_details import from_rpc_error
from baton.errors import BatonError, InvalidReply
from baton_http2.server.reply import Wire
from baton_http2.turns import CallTurns
from engine_protocol.lane import StepCounter, TokenSink
from engine_protocol.multiplex.metadata import FailedStatus
from engine_protocol.multiplex.replies import MultiplexedCall
from runtime.clock import monotonic

_OK: Final[int] = StatusCode.OK.value[0]


class RunningCalls:
    """The calls of one stream by their numbers."""

    def __init__(self) -> None:
        self._calls: dict[int, MultiplexedCall[Any]] = {}
        self._sinks: dict[int, TokenSink] = {}
        self._turns = CallTurns()
        self._order: _StepOrder | None = None  # of the last step, unless sinks have changed
        self._numbers: list[int] = []  # of the last step
        self._counter = StepCounter()

    def add(self, number: int, call: MultiplexedCall[Any]) -> None:
        """Adds a call that has begun."""
        self._calls[number] = call

    def forget(self, number: int) -> bool:
        """Gives a call nothing more; whether it was running."""
        self.set_sink(number, None)
        return self._calls.pop(number, None) is not None

    def set_sink(self, number: int, sink: TokenSink | None) -> None:
        """Pushes a call's tokens into `sink`, and those that it refuses into the call; with None, all into the call."""
        before = self._sinks.pop(number, None)
        if before is not None:
            before.meter.leave()
        if sink is not None and number in self._calls:
            self._sinks[number] = sink
        self._order = None

    def end(self, error: BatonError) -> None:
        """Ends all calls with an error."""
        calls, self._calls = self._calls, {}
        for each in calls.values():
            self._turns.run(partial(each.end, error))

    def push(self, response: pb.MultiplexResponse) -> None:
        """Gives the calls what has come for them. Raises InvalidReply for tokens without a call."""
        calls = self._calls
        if response.token_calls:
            # As lists, which repeated fields make at once.
            self._push_step(response.token_calls[:], response.token_ids[:])
        for answer in response.answers:
            call = calls.get(answer.call)
            if call is None:
                continue
            if answer.HasField("status"):
                del calls[answer.call]
                status = answer.status
                error = None if status.code == _OK else from_rpc_error(FailedStatus(status))
                self._turns.run(partial(call.end, error))
            else:
                call.push(answer.message)

    def _push_step(self, numbers: list[int], token_ids: list[int]) -> None:
        """Pushes the tokens of a step, those of one connection together, and flushes it before the next."""
        if len(numbers) != len(token_ids):
            raise InvalidReply(f"{len(token_ids)} tokens came for {len(numbers)} calls")
        order = self._order
        if order is None or order.numbers != numbers:
            order = self._order = self._next_order(numbers)
        pushed: list[TokenSink] = []
        for wire, places, sinks in order.by_connection:
            self._push_tokens(order, zip(places, sinks, strict=True), token_ids, pushed)
            if wire is not None:
                wire.flush()
        self._count(pushed, order)

    def _next_order(self, numbers: list[int]) -> "_StepOrder":
        order = _StepOrder(numbers, self._sinks)
        for number in set(self._numbers) if order.has_repeated else set(self._numbers).difference(numbers):
            if number in self._sinks:
                self._sinks[number].meter.leave()
        self._numbers, self._counter.is_complete = numbers, False
        return order

    def _count(self, pushed: list[TokenSink], order: "_StepOrder") -> None:
        now, steps = monotonic(), None if order.has_repeated else self._counter
        self._counter.count(now)
        if self._counter.is_complete:
            return
        is_complete = len(pushed) == len(order.numbers)
        for sink in pushed:
            is_complete = sink.meter.count(now, steps) and is_complete
        self._counter.is_complete = is_complete

    def _push_tokens(
        self,
        order: "_StepOrder",
        places: Iterable[tuple[int, TokenSink | None]],
        token_ids: list[int],
        pushed: list[TokenSink],
    ) -> None:
        """Pushes the tokens at these places of a step, and adds the sinks that have accepted theirs to `pushed`."""
        for place, sink in places:
            if self._order is not order:
                # An earlier token has ended a call, or left its tokens to its reader.
                sink = self._sinks.get(order.numbers[place])
            try:
                if sink is not None and sink.push(token_ids[place]):
                    pushed.append(sink)
                    continue
                if sink is not None:
                    sink.meter.leave()
                if order.numbers[place] in self._calls:
                    self._calls[order.numbers[place]].push(token_ids[place])
            except Exception as error:  # of one call, whose reader raises it: the others of the stream go on
                self.set_sink(order.numbers[place], None)
                if order.numbers[place] in self._calls:
                    self._calls[order.numbers[place]].fail(error)


class _StepOrder:
    """The order in which the tokens of a step are pushed: by the connections that they leave on.

    The next step mostly has the same calls, and the same order. Of each connection: a wire, the places of its tokens in
    the step, and their sinks; two lists, as a tuple for each token would be one more object to load.
    """

    __slots__ = ("by_connection", "has_repeated", "numbers")

    def __init__(self, numbers: list[int], sinks: dict[int, TokenSink]) -> None:
        self.numbers = numbers
        self.has_repeated = len(set(numbers)) < len(numbers)  # of a call that has several tokens in the step
        self.by_connection: list[tuple[Wire | None, list[int], list[TokenSink | None]]] = []
        lists_of: dict[object, tuple[list[int], list[TokenSink | None]]] = {}
        for place, number in enumerate(numbers):
            sink = sinks.get(number)
            wire = None if sink is None else sink.wire
            connection = None if wire is None else wire.connection
            if connection not in lists_of:
                lists_of[connection] = [], []
                self.by_connection.append((wire, *lists_of[connection]))
            places, of = lists_of[connection]
            places.append(place)
            of.append(sink)
