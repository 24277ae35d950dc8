"""Calls on stubs whose failures are BatonErrors: `unary` for one answer, `stream` for many."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from grpc import aio

from baton.error_details import from_rpc_error
from baton.errors import BatonError, Cancelled, InvalidReply

Response = TypeVar("Response")

# Neither the peer's answer nor its fault: metadata that may not be sent, for example.
_NOT_MADE = "gRPC could not make the call"


async def unary(call: "aio.UnaryUnaryCall[Any, Response]") -> Response:
    """Waits for the answer of a call: `await unary(stub.GetModel(request))`.

    Raises the BatonError that the status stands for. Cancelling the waiting task cancels the call.
    """
    try:
        return _readable(await call)
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except aio.BaseError as error:
        raise BatonError(_NOT_MADE) from error
    except asyncio.CancelledError:
        _raise_if_only_the_call_was_cancelled()
        raise
    finally:
        call.cancel()


async def stream(call: "aio.UnaryStreamCall[Any, Response]") -> AsyncGenerator[Response, None]:
    """Yields the answers of a call: `async with aclosing(stream(stub.Decode(request))) as responses: ...`.

    Raises the BatonError that the status stands for. Closing the generator, or cancelling the task that reads it,
    cancels the call.
    """
    try:
        async for response in call:
            yield _readable(response)
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except aio.BaseError as error:
        raise BatonError(_NOT_MADE) from error
    except asyncio.CancelledError:
        _raise_if_only_the_call_was_cancelled()
        raise
    finally:
        call.cancel()


def _readable(response: Response | None) -> Response:
    # gRPC logs that it could not parse a message, and gives None in its place.
    if response is None:
        raise InvalidReply("the peer's answer is not a message of this method")
    return response


def _raise_if_only_the_call_was_cancelled() -> None:
    # When a channel is closed under a running call, gRPC raises CancelledError in a task that was not cancelled.
    # Python 3.10 cannot tell the two apart.
    if sys.version_info < (3, 11):
        return
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise Cancelled("the call was cancelled on this side, or its channel was closed") from None
