"""The types of the interceptors: a method's coroutine function, and what wraps it."""

from collections.abc import Callable
from typing import Any

from baton.errors import Unsupported
from baton_http2.server import methods
from baton_http2.server.methods import Behaviour, Context

__all__ = ["Behaviour", "Context", "Wrapper", "as_coroutine"]

# Wraps the behaviour of the method `/package.Service/Method`.
Wrapper = Callable[[str, Behaviour], Behaviour]


def as_coroutine(method: Callable[..., Any]) -> Behaviour:
    """A servicer's method as a Behaviour. A synchronous method is generated: it raises Unsupported."""
    return methods.as_coroutine(method, _unimplemented)


async def _unimplemented(_request: Any, _context: Context) -> None:
    raise Unsupported("this method is not implemented here")
