"""A renewal in flight when the handoff is confirmed must not count as a lost lease."""

import asyncio

import pytest
from support.clients.worker_calls import TEXT, decode_request
from support.cluster.workers import Running

from services.handoff import remote_lease


async def test_a_renewal_never_denies_the_lease_that_its_own_reader_is_ending(
    prefill: Running, decode: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hand_over(number: int) -> int:
        text = TEXT + str(number).encode()
        handoff = await prefill.calls.prefill(f"r{number}", text=text)
        rest = await decode.calls.decode(decode_request(handoff, request_id=f"r{number}", text=text))
        return len(rest.token_ids)

    for milliseconds in range(20):
        # A pull takes a few of these here: in some rounds renewals are answered after releases.
        monkeypatch.setattr(remote_lease, "_FIRST_RENEWAL_SECONDS", milliseconds / 1000)
        lengths = await asyncio.gather(*(hand_over(16 * milliseconds + number) for number in range(16)))
        assert lengths == [19] * 16
