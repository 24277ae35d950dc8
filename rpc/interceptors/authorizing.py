"""Authenticates the caller of each call, and checks its role."""

from typing import Any

import structlog

from rpc.auth.access import Access, require
from rpc.auth.caller import note_caller
from rpc.interceptors.behaviour import Behaviour, Context, Wrapper


def authorize(access: Access) -> Wrapper:
    """Raises Unauthenticated or PermissionDenied. Inside it `current_caller` is set, and named on each log line."""

    def wrap(method: str, behaviour: Behaviour) -> Behaviour:
        if access.is_open(method):
            return behaviour
        roles = access.roles(method)

        async def authorized(request: Any, context: Context) -> Any:
            caller = access.identify(context)
            structlog.contextvars.bind_contextvars(caller=caller.name)
            require(caller, method, roles)
            note_caller(caller)
            return await behaviour(request, context)

        return authorized

    return wrap
