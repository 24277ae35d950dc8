"""Which implementation of gRPC's server the tests run on: BATON_TEST_SERVER=grpcio chooses grpcio's."""

import os
from typing import cast, get_args

import rpc.server
from rpc.server import ServerKind

SERVER_KIND = cast("ServerKind", os.environ.get("BATON_TEST_SERVER") or rpc.server.DEFAULT_SERVER)

# What processes are started with.
OVERRIDES = (f"server={SERVER_KIND}",)


def choose_server() -> None:
    """Makes it the default of this process."""
    assert SERVER_KIND in get_args(ServerKind), f"BATON_TEST_SERVER: unknown server {SERVER_KIND!r}"
    rpc.server.DEFAULT_SERVER = SERVER_KIND
