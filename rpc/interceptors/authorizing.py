"""Authenticates the caller of each call, and checks its role."""

from typing import Any

from rpc.auth.access import Access, require
from rpc.auth.caller import set_caller
from rpc.interceptors.behaviour import Behaviour, Context, Wrapper
from runtime.logs import add_log_fields


def authorize(access: Access) -> Wrapper:
    """Raises Unauthenticated or PermissionDenied. Inside it `current_caller` is set, and named on each log line."""

    def wrap(method: str, behaviour: Behaviour) -> Behaviour:
        if access.is_open(method):
            return behaviour
        roles = access.roles(method)

        async def authorized(request: Any, context: Context) -> Any:
            caller = access.identify(context)
            add_log_fields(caller=caller.name)
            require(caller, method, roles)
            set_caller(caller)
            return await behaviour(request, context)

        return authorized

    return wrap
