"""Calls on stubs whose failures are BatonErrors: `unary` for one answer, `stream` for many."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from grpc import aio
from grpc.aio._call import Call as CoreCall

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
        return _readable(await _outlasting(call, call))
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except aio.BaseError as error:
        raise BatonError(_NOT_MADE) from error
    except asyncio.CancelledError:
        _raise_if_only_the_call_was_cancelled()
        raise
    finally:
        cancel(call)


async def stream(call: "aio.UnaryStreamCall[Any, Response]") -> AsyncGenerator[Response, None]:
    """Yields the answers of a call: `async with aclosing(stream(stub.Decode(request))) as responses: ...`.

    Raises the BatonError that the status stands for. Closing the generator, or cancelling the task that reads it,
    cancels the call.
    """
    try:
        responses = call.__aiter__()
        while True:
            yield _readable(await _outlasting(call, responses.__anext__()))
    except StopAsyncIteration:
        return
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except aio.BaseError as error:
        raise BatonError(_NOT_MADE) from error
    except asyncio.CancelledError:
        _raise_if_only_the_call_was_cancelled()
        raise
    finally:
        cancel(call)


def cancel(call: Any) -> None:
    """Cancels a call, if it runs. Use it in the place of the call's own `cancel`, which leaks memory.

    grpc.aio frees what an operation has sent and received only in the task that waits for it (grpc/grpc#43360). Its own
    `cancel` ends this task at once; this one cancels the operation, by which the task ends.
    """
    if isinstance(call, CoreCall):
        CoreCall.cancel(call)
    else:
        call.cancel()


def _outlasting(call: Any, waited: Awaitable[Response]) -> Awaitable[Response]:
    # Of grpc.aio, it is waited for to its end, also when the caller is cancelled, for the reason that `cancel` gives.
    if not isinstance(call, CoreCall):
        return waited
    waiting = asyncio.ensure_future(waited)
    # Retrieved, so that asyncio does not log an error as lost that comes when the caller has just been cancelled.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(waiting)


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
