"""The types of the interceptors: a method's coroutine function, and what wraps it."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from grpc import aio

from baton.errors import Unsupported

Context = aio.ServicerContext[Any, Any]

# Returns the response, or writes the responses to the context and returns None.
Behaviour = Callable[[Any, Context], Awaitable[Any]]

# Wraps the behaviour of the method `/package.Service/Method`.
Wrapper = Callable[[str, Behaviour], Behaviour]


def as_coroutine(method: Callable[..., Any]) -> Behaviour:
    """A servicer's method as a Behaviour. A synchronous method is generated: it is not implemented."""
    if inspect.iscoroutinefunction(method):
        return method
    if inspect.isasyncgenfunction(method):
        return _write_all(method)
    return _unimplemented


async def _unimplemented(_request: Any, _context: Context) -> None:
    raise Unsupported("this method is not implemented here")


def _write_all(generate: Callable[..., AsyncGenerator[Any, None]]) -> Behaviour:
    # Writes instead of yielding: a cancelled write then closes the generator here, in the call's own task.
    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
