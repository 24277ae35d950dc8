"""Running calls of one stream, whose tokens are taken by outputs that note it."""

from dataclasses import dataclass, field

from baton.engine.v1 import multiplex_pb2 as pb
from engine_protocol.lane import StepCounter
from engine_protocol.multiplex.replies import MultiplexedCall
from engine_protocol.multiplex.running_calls import RunningCalls


@dataclass(eq=False)
class Output:
    """A wire that notes when it is flushed; a connection of its own."""

    name: str
    happened: list[object]

    @property
    def connection(self) -> "Output":
        return self

    def write(self, message: bytes) -> bool:
        raise AssertionError("its sinks do not write")

    def flush(self) -> None:
        self.happened.append(self.name)


@dataclass
class Sink:
    """Notes what it is given; raises `error` instead, if there is one."""

    call: int
    wire: Output | None
    happened: list[object]
    error: Exception | None = None
    noted: int = 0

    def push(self, token_id: int) -> bool:
        if self.error is not None:
            raise self.error
        self.happened.append((self.call, token_id))
        return True

    @property
    def meter(self) -> "Sink":
        return self

    def count(self, now: float, steps: StepCounter | None) -> bool:
        self.noted += 1
        self.happened.append("noted")
        return False

    def leave(self) -> None:
        """It never joins."""


class NoLink:
    """A stream that takes no wishes."""

    def cancel(self, call: int) -> None:
        pass

    def pause(self, call: int, *, is_paused: bool) -> None:
        pass

    def set_sink(self, call: int, sink: object) -> None:
        pass


@dataclass
class Calls:
    """Running calls whose tokens are taken on two outputs."""

    calls: RunningCalls = field(default_factory=RunningCalls)
    happened: list[object] = field(default_factory=list)
    a: Output = field(init=False)
    b: Output = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b = Output("a", self.happened), Output("b", self.happened)

    def add(self, number: int, output: Output | None, error: Exception | None = None) -> MultiplexedCall[list[int]]:
        call: MultiplexedCall[list[int]] = MultiplexedCall(number, NoLink(), list, list, None)
        self.calls.add(number, call)
        self.calls.set_sink(number, Sink(number, output, self.happened, error))
        return call

    def add_stopping(self, number: int) -> Sink:
        """A call that its sink ends at the first token, as a stop string does."""
        calls = self.calls

        class Stopping(Sink):
            def push(self, token_id: int) -> bool:
                calls.forget(number)
                return super().push(token_id)

        self.add(number, None)
        sink = Stopping(number, None, self.happened)
        calls.set_sink(number, sink)
        return sink

    def push(self, *tokens: tuple[int, int]) -> None:
        numbers, ids = zip(*tokens, strict=True)
        self.calls.push(pb.MultiplexResponse(token_calls=numbers, token_ids=ids))
