"""Sends the messages of a call without waiting, such as a token's: no coroutine is passed on the way."""

from collections.abc import Callable
from typing import Any, Protocol

from grpc import aio

from rpc.http2.stream import Stream


class SendingCall(Protocol):
    """The call, as what sends its messages knows it."""

    is_over: bool
    stream: Stream


class MessageSender:
    """Sends messages of one call. `start` sends the answer's headers, before the first one."""

    __slots__ = ("_call", "_serialize", "_start", "_stream")

    def __init__(self, call: SendingCall, serialize: Callable[[Any], bytes], start: Callable[[], None]) -> None:
        self._call = call
        self._stream = call.stream
        self._serialize = serialize
        self._start = start

    def send(self, message: Any) -> bool:
        """Sends a message without waiting or compressing; whether there is room for another one.

        For what writes the messages of many calls at once, such as the tokens of one step. Raises aio.UsageError once
        the call is over.
        """
        if self._call.is_over:
            raise aio.UsageError("the call is over")
        stream = self._stream
        if not stream.started:
            self._start()
        return stream.write(self._serialize(message)) or stream.can_take(0)
