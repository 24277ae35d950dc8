"""The lane of one answer: its tokens and other messages, to its client's wire."""

from collections.abc import Callable

from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply, Wire
from router.stream.general import FillFinished, UnsentAnswer
from router.stream.meter import TokenMeter
from router.text.completion import Completion, TokenDelta
from router.text.token_messages import FIRST, LAST, message_start, varint
from runtime.clock import perf_counter_ns

_NO_FIELDS: dict[int, bytes] = {}


class ClientLane:
    """The only owner of an answer's sequence, wire, backpressure, and of the choice between two ways to send a token.

    A *plain* token is one or more whole characters and ends nothing: it is sent as it was serialized once for its
    vocabulary, and touches few objects. All others are *general*: they go through the completion, and wait with
    everything else that has not been sent. Both ways give the same messages.

    A TokenSink of the call that it is attached to. While the client is behind, nothing is written here: `fell_behind`
    is called, and its owner sends the messages of `next_message` until it has `caught_up`.
    """

    __slots__ = (
        "_completion",
        "_ended",
        "_ending_ids",
        "_fell_behind",
        "_fields",
        "_ids",
        "_is_lost",
        "_max_waiting_tokens",
        "_message",
        "_plain_until",
        "_reply",
        "_sequence",
        "_start",
        "_unsent",
        "is_behind",
        "meter",
        "wire",
    )

    meter: TokenMeter  # of the last call that was attached

    def __init__(
        self,
        request_id: str,
        reply: Reply,
        unsent: UnsentAnswer,
        max_waiting_tokens: int,
        fell_behind: Callable[[], None],
    ) -> None:
        self._reply: Reply | None = reply  # until its wire is open
        self._unsent = unsent
        self._max_waiting_tokens = max_waiting_tokens
        self._fell_behind = fell_behind
        self._message = generate_pb2.GenerateResponse(request_id=request_id)
        self._start = message_start(request_id)
        self._sequence = 0
        self.wire: Wire | None = None  # also None where the server cannot write without waiting
        self.is_behind = False
        self._is_lost = False
        self._plain_until = 0  # the first sequence whose token may not be plain
        self._completion: Completion | None = None
        self._ended: Callable[[], None] | None = None
        self._ids: list[int] = []
        self._fields = _NO_FIELDS
        self._ending_ids: frozenset[int] = frozenset()

    @property
    def is_writable(self) -> bool:
        """True if tokens may be added: not too many wait."""
        return self._unsent.num_tokens < self._max_waiting_tokens and not self._is_lost

    # Tokens of a call, one by one: see TokenSink.

    def attach(self, completion: Completion, meter: TokenMeter, ended: Callable[[], None]) -> None:
        """Sends the tokens that are pushed from here on as those of `completion`, after its first ones.

        `ended` is called at the one that finishes it. The owner detaches it, also after a failure.
        """
        self._completion, self.meter, self._ended = completion, meter, ended
        self._ids, self._ending_ids = completion.token_ids, completion.ending_ids
        self._fields = completion.serialized

    def detach(self) -> None:
        """Takes no more tokens of the call. What was attached refers to this."""
        self._completion = self._ended = None
        self._plain_until = 0

    def push(self, token_id: int) -> bool:
        """Sends one token. False if too much waits: its reader is to wait, too."""
        sequence = self._sequence
        field = self._fields.get(token_id) if sequence < self._plain_until else None
        if field is None or token_id in self._ending_ids:
            return self._push_general(token_id)
        # As `_push_general` does: the same bytes, without an object of protobuf's, and without a call but the wire's.
        wire = self.wire
        assert wire is not None
        self._sequence = sequence + 1
        self._ids.append(token_id)
        if sequence < 128:
            number = LAST[sequence]
        elif sequence < 16384:
            number = FIRST[sequence & 127] + LAST[sequence >> 7]
        else:
            number = varint(sequence)
        if not wire.write(self._start + number + field):
            self.is_behind, self._plain_until = True, 0
        return True

    def _push_general(self, token_id: int) -> bool:
        completion, ended = self._completion, self._ended
        if completion is None or ended is None or not self.is_writable:
            return False
        started = perf_counter_ns()
        text = completion.push_token(token_id)
        self.meter.detokenized_for(perf_counter_ns() - started)
        self.put(TokenDelta(text, (token_id,)))
        if completion.finished is not None:
            ended()
        return True

    # Everything else.

    def start(self, started: generate_pb2.Started | generate_pb2.Resumed) -> None:
        """Sends the first message."""
        self._unsent.start(started)
        self._send()

    def put(self, delta: TokenDelta) -> None:
        """Sends tokens. Only while there is room."""
        self._unsent.add(delta)
        self._send()

    def finish(self, last: TokenDelta, fill_finished: FillFinished) -> None:
        """Sends what was held back until now, and the last message."""
        self._unsent.finish(last, fill_finished)
        self._send()

    def flush(self) -> None:
        """Has what was sent written before this turn of the event loop ends, where the server can."""
        if self.wire is not None:
            self.wire.flush()

    def close(self) -> None:
        """Tells its owner nothing more, which refers to it."""
        self._fell_behind = _nothing
        self._unsent.close()

    def next_message(self, message: generate_pb2.GenerateResponse) -> bool:
        """Makes `message` the next one that is due; whether there is one."""
        if not self._unsent.move_to(message, self._sequence):
            return False
        self._sequence += 1
        return True

    def fall_behind(self) -> None:
        """Writes nothing here until it has `caught_up`: all messages are those of `next_message`."""
        self.is_behind, self._plain_until = True, 0

    def lose(self) -> None:
        """Takes no more tokens: nothing that waits will be sent any more."""
        self._is_lost, self._plain_until = True, 0

    def caught_up(self) -> None:
        """Writes here again: the client has read what waited."""
        self.is_behind = self.wire is None

    def _send(self) -> None:
        """Sends what is due: here and now if the client reads; otherwise its owner does, in a task."""
        if self._reply is not None:
            self._open(self._reply)
        wire = self.wire
        while wire is not None and not self.is_behind and self._unsent.move_to(self._message, self._sequence):
            self._sequence += 1
            self.is_behind = not wire.write(self._message.SerializeToString())
        if self.is_behind and not self._unsent.is_empty:
            self._fell_behind()
        self._plain_until = 0 if self._completion is None else self._sequence + self._count_plain(self._completion)

    def _open(self, reply: Reply) -> None:
        self._reply = None
        self.wire = reply.open_wire()
        self.is_behind = self.wire is None

    def _count_plain(self, completion: Completion) -> int:
        """The number of tokens that may be plain now: none that would end the completion by its length."""
        if self.is_behind or not completion.is_plain or not self._unsent.sends_at_once:
            return 0
        return completion.max_tokens - 1 - len(self._ids)


def _nothing() -> None:
    """No callback."""
