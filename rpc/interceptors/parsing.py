"""Answers a request that cannot be parsed with INVALID_ARGUMENT and the field that is wrong.

gRPC itself answers it with INTERNAL, as if it were the server's fault.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from rpc.errors import InvalidRequest
from rpc.interceptors.behaviour import Behaviour, Context
from rpc.interceptors.wire import find_fault

Deserializer = Callable[[bytes], Any]


class MalformedRequest:
    """Stands for a request that could not be parsed, on its way to whoever answers that."""

    __slots__ = ("error",)

    def __init__(self, error: InvalidRequest) -> None:
        self.error = error


def tolerant(deserializer: Deserializer | None) -> Deserializer | None:
    """A deserializer that gives a MalformedRequest where a message's `FromString` raises; others are left alone."""
    message = getattr(deserializer, "__self__", None)
    if deserializer is None or not (isinstance(message, type) and issubclass(message, Message)):
        return deserializer
    descriptor: Any = message.DESCRIPTOR

    def parse(wire: bytes) -> Any:
        try:
            return deserializer(wire)
        except DecodeError:
            fault = find_fault(descriptor, wire)
            return MalformedRequest(InvalidRequest.of(fault.field, fault.description))

    return parse


def refuse_malformed(_method: str, behaviour: Behaviour) -> Behaviour:
    """Raises the error of a MalformedRequest; every other request passes."""

    async def checked(request: Any, context: Context) -> Any:
        if isinstance(request, MalformedRequest):
            raise request.error
        return await behaviour(request, context)

    return checked
