"""grpc.health.v1 over the wire: Check, and a Watch that pushes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.servers.scripted_router import NAME, Scripted, scripted, status_of

from baton.calls import stream, unary
from rpc.channels import open_channel
from rpc.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Health
from rpc.server import serve
from runtime.aio import timeout


async def check(peer: Scripted, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(peer.channel)
    return (await unary(stub.Check(health_pb2.HealthCheckRequest(service=service)))).status


def watch(peer: Scripted, service: str = "") -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
    stub = health_pb2_grpc.HealthStub(peer.channel)
    return stream(stub.Watch(health_pb2.HealthCheckRequest(service=service)))


async def status(watching: AsyncGenerator[health_pb2.HealthCheckResponse, None]) -> int:
    async with timeout(50):
        return (await anext(watching)).status


async def test_a_process_is_not_serving_until_its_owner_says_so() -> None:
    async with scripted() as peer:
        peer.health.set("", False)
        assert await check(peer, "") == NOT_SERVING
        peer.health.set("", True)
        assert await check(peer, "") == SERVING


async def test_a_check_sees_at_once_what_is_not_well() -> None:
    is_well = True
    health = Health(lambda: is_well)
    health.set("", True)
    async with (
        serve("127.0.0.1:0", [], health=health, drain_seconds=0) as server,
        open_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await unary(stub.Check(health_pb2.HealthCheckRequest()))).status == SERVING
        is_well = False
        assert (await unary(stub.Check(health_pb2.HealthCheckRequest()))).status == NOT_SERVING
        is_well = True
        assert (await unary(stub.Check(health_pb2.HealthCheckRequest()))).status == SERVING


async def test_a_service_has_the_health_of_its_process() -> None:
    async with scripted() as peer:
        assert await check(peer, NAME) == SERVING
        peer.health.set("", False)
        assert await check(peer, NAME) == NOT_SERVING


async def test_a_service_may_have_a_health_of_its_own() -> None:
    async with scripted() as peer:
        peer.health.set(NAME, False)
        assert (await check(peer, ""), await check(peer, NAME)) == (SERVING, NOT_SERVING)


async def test_checking_an_unknown_service_is_not_found() -> None:
    async with scripted() as peer:
        stub = health_pb2_grpc.HealthStub(peer.channel)
        error = await status_of(stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service")))
    assert error.code() is StatusCode.NOT_FOUND


async def test_the_statuses_of_all_services() -> None:
    async with scripted() as peer:
        peer.health.set("one", False)
        assert peer.health.statuses == {"": SERVING, NAME: SERVING, "one": NOT_SERVING}
    assert set(peer.health.statuses.values()) == {NOT_SERVING}


@pytest.mark.skipif(not hasattr(health_pb2, "HealthListRequest"), reason="this grpcio-health-checking has no List")
async def test_list_has_the_statuses_of_all_services() -> None:
    async with scripted() as peer:
        peer.health.set("one", False)
        listed = await unary(health_pb2_grpc.HealthStub(peer.channel).List(health_pb2.HealthListRequest()))
    assert {name: one.status for name, one in listed.statuses.items()} == {
        "": SERVING,
        NAME: SERVING,
        "one": NOT_SERVING,
    }


async def test_a_watch_pushes_every_change() -> None:
    async with scripted() as peer, aclosing(watch(peer)) as watching:
        seen = [await status(watching)]
        for serving in (False, True):
            peer.health.set("", serving)
            seen.append(await status(watching))
    assert seen == [SERVING, NOT_SERVING, SERVING]


async def test_a_watch_of_an_unknown_service_hears_when_it_comes() -> None:
    async with scripted() as peer, aclosing(watch(peer, "later")) as watching:
        assert await status(watching) == SERVICE_UNKNOWN
        peer.health.set("later", True)
        assert await status(watching) == SERVING


async def test_a_watcher_that_leaves_does_not_silence_the_others() -> None:
    async with scripted() as peer, aclosing(watch(peer)) as staying:
        assert await status(staying) == SERVING
        async with aclosing(watch(peer)) as leaving:
            assert await status(leaving) == SERVING
        peer.health.set("", False)
        assert await status(staying) == NOT_SERVING


async def test_a_server_that_ends_tells_its_watchers_first() -> None:
    async with scripted() as peer, aclosing(watch(peer)) as watching:
        assert await status(watching) == SERVING
        peer.health.close()
        assert await status(watching) == NOT_SERVING
        with pytest.raises(StopAsyncIteration):
            await anext(watching)


async def test_nothing_is_serving_again_once_the_end_has_begun() -> None:
    async with scripted() as peer:
        peer.health.close()
        peer.health.set("", True)
        assert await check(peer, "") == NOT_SERVING
