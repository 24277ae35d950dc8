"""Calls that may fail do so quietly."""

from typing import Any, NoReturn

from baton.errors import Unavailable
from rpc.channels import best_effort


async def test_a_call_that_a_closed_channel_refuses_at_its_start_has_no_response() -> None:
    def start(seconds: float) -> NoReturn:
        raise Unavailable("the channel is closed")

    response: Any = await best_effort(start, healthy=True)
    assert response is None
