"""The connection that a command makes, as its options and the environment say."""

import argparse

from client.address import find_address
from client.api import Client
from client.credentials import find_credentials


def connect(arguments: argparse.Namespace, tenant: str = "") -> Client:
    """A client of the router, for that tenant. Raises ConfigError, and InvalidRequest for a tenant's odd name."""
    credentials = find_credentials(arguments)
    token = credentials.token.get_secret_value()
    return Client(find_address(arguments.address).value, credentials.tls, token=token, tenant=tenant)
