"""Channels whose calls share a stream, once of each kind."""

from typing import get_args

import pytest
from support.servers.shared_stream import Sharing

from rpc.server import ServerKind


@pytest.fixture(params=get_args(ServerKind))
def sharing(request: pytest.FixtureRequest) -> Sharing:
    return Sharing(request.param)
