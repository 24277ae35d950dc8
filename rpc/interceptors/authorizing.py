"""Lets a call pass whose caller is known and has a role that the method is for."""

from typing import Any

import structlog

from rpc.access import Access, require
from rpc.caller import note_caller
from rpc.interceptors.behaviour import Behaviour, Context, Wrapper


def authorize(access: Access) -> Wrapper:
    """Raises Unauthenticated or PermissionDenied. Behind it `current_caller` is known, and named on each log line."""

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
