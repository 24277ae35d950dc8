"""`baton health` against real processes of ours."""

from support.clients.baton_command import Baton, SmallCluster

from router.config import RouterConfig
from router.server import host_router


async def test_a_router_with_workers_is_serving(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("health", cluster.address)
    assert (outcome.code, outcome.out) == (0, "SERVING\n")


async def test_a_worker_is_serving_its_own_service(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("health", cluster.decode.address, "--service", "baton.engine.v1.DecodeService")
    assert (outcome.code, outcome.out) == (0, "SERVING\n")


async def test_a_router_without_workers_is_not_serving_and_exit_code_one(baton: Baton) -> None:
    config = RouterConfig.model_validate({"listen": "127.0.0.1:0", "registry": {"kind": "memory"}})
    async with host_router(config) as router:
        outcome = await baton("health", router.address)
    assert (outcome.code, outcome.out) == (1, "NOT_SERVING\n")


async def test_no_process_there_is_exit_code_one(baton: Baton) -> None:
    assert (await baton("health", "127.0.0.1:1")).code == 1


async def test_a_service_that_is_not_there_is_exit_code_one(baton: Baton, cluster: SmallCluster) -> None:
    assert (await baton("health", cluster.address, "--service", "no.such.Service")).code == 1
