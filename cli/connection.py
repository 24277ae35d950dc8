"""The connection of a command to the router, from its options and the environment."""

import argparse
from typing import TYPE_CHECKING

from baton import AsyncClient, Resume
from cli.address import find_address
from cli.credentials import find_credentials

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def connect(
    arguments: argparse.Namespace,
    tenant: str = "",
    tracer_provider: "TracerProvider | None" = None,
    resume: Resume | None = None,
) -> AsyncClient:
    """A client of the router for `tenant`. Raises ConfigError, and InvalidRequest for an invalid tenant."""
    credentials = find_credentials(arguments)
    token = credentials.token.get_secret_value()
    tls = credentials.tls.for_client() if credentials.tls else None
    return AsyncClient(
        find_address(arguments.address).value,
        tls=tls,
        token=token,
        tenant=tenant,
        resume=resume,
        tracer_provider=tracer_provider,
    )
