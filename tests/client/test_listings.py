"""`baton models` and `baton workers` against a real router."""

from support.baton_command import Baton, SmallCluster


async def test_models_shows_limits_and_workers_of_each_role(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("models", "--address", cluster.address)
    assert outcome.code == 0
    assert outcome.lines[-1].split()[:3] == ["small", "4096", "257"]
    assert outcome.lines[-1].split()[-2:] == ["1", "1"]


async def test_workers_shows_role_state_and_load(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("workers", "--address", cluster.address)
    rows = [line.split() for line in outcome.lines[2:]]
    assert outcome.code == 0
    assert rows == [
        ["decode-0", "decode", "ready", cluster.decode.address, "small", "0/0", "0/0/256"],
        ["prefill-0", "prefill", "ready", cluster.prefill.address, "small", "0/0", "0/0/256"],
    ]


async def test_workers_of_a_router_that_is_not_there_is_exit_code_one(baton: Baton) -> None:
    assert (await baton("workers", "--address", "127.0.0.1:1")).code == 1
