"""`baton models` and `baton workers` against a real router."""

from pathlib import Path

from support.clients.baton_command import Baton, SmallCluster
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, bench, simulated
from support.eventually import eventually

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig, RoutingConfig
from services.resume.streams import KeptUsage
from services.sleeping.config import SleepConfig


async def test_models_shows_limits_and_workers_of_each_role(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("models", "--address", cluster.address)
    assert outcome.code == 0
    assert outcome.lines[-1].split()[:3] == ["small", "4096", "257"]
    assert outcome.lines[-1].split()[-4:] == ["1", "1", "0", "0"]


async def test_workers_shows_role_state_and_load(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("workers", "--address", cluster.address)
    rows = [line.split() for line in outcome.lines[2:]]
    assert outcome.code == 0
    idle = ["small", "0/0", "0/0/256", "none"]
    assert rows == [
        ["decode-0", "decode", "ready", cluster.decode.address, *idle, "cuda_ipc,", "shm,", "tcp"],
        ["prefill-0", "prefill", "ready", cluster.prefill.address, *idle, "shm,", "tcp"],
    ]


async def test_workers_shows_the_memory_of_engines_with_and_without_tiers(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("workers", "--memory", "--address", cluster.address)
    assert outcome.code == 0
    assert [line.split() for line in outcome.lines[2:]] == [
        ["decode-0", "0/256", *["-"] * 6],
        ["prefill-0", "0/256", *["-"] * 6],
    ]


async def test_workers_shows_how_many_answers_are_kept_and_parked(baton: Baton) -> None:
    async with bench(simulated("w", "prefill", "decode", decode_step_seconds=0.01), proxied=False) as running:
        request = generate_pb2.GenerateRequest(
            prompt="a", stopping={"max_tokens": 2000}, response={"keep": {"seconds": 9}}
        )
        call = running.stub.Generate(request)
        assert (await anext(aiter(call))).started.resumption.handle
        other = running.stub.Generate(request)
        await anext(aiter(other))
        call.cancel()
        await eventually(lambda: running.workers["w"].kept.usage == KeptUsage(attached=1, parked=1))

        async def shown() -> str:
            return (await baton("workers", "--address", running.address)).lines[2].split()[-1]

        for _ in range(100):
            if (last := await shown()) == "2/1":
                break
        assert last == "2/1"
        other.cancel()


async def test_workers_shows_which_model_sleeps_and_how_long_it_takes_to_wake(baton: Baton, tmp_path: Path) -> None:
    sleep = SleepConfig(group=tmp_path / "group", group_bytes=3, bytes=2)
    first, second = (
        simulated(name, "prefill", "decode", wake_seconds=0.4).model_copy(update={"sleep": sleep}) for name in "ab"
    )
    async with bench(first, second, proxied=False) as running:
        await eventually(lambda: max(worker.wake_seconds for worker in running.cluster.workers) > 0)
        listed = await baton("workers", "--address", running.address)
    rows = [line.split("  ") for line in listed.lines[2:]]
    states = [[cell.strip() for cell in row if cell.strip()][2] for row in rows]
    assert states == ["ready, asleep (0.5 s)", "ready"]


async def test_workers_of_a_router_that_is_not_there_is_exit_code_one(baton: Baton) -> None:
    assert (await baton("workers", "--address", "127.0.0.1:1")).code == 1


async def test_workers_says_under_the_table_what_is_wrong_with_a_worker(baton: Baton) -> None:
    async with bench(PREFILL, simulated("d1", "decode", block_tokens=32)) as running:
        outcome = await baton("workers", "--address", running.address)
    assert outcome.code == 0
    said = [line for line in outcome.lines if line.startswith("d1: ")]
    assert len(said) == 1
    assert "32 tokens a block" in said[0]
    assert "fits no prefill worker: p1 has" in said[0]


async def test_workers_and_explain_say_which_workers_have_no_transport_in_common(baton: Baton) -> None:
    by_shm = PREFILL.model_copy(update={"transports": ("shm",)})
    by_tcp = DECODE.model_copy(update={"transports": ("tcp",)})
    async with bench(by_shm, by_tcp) as running:
        listed = await baton("workers", "--address", running.address)
        explained = await baton("explain", "some words", "--address", running.address)
    assert [line.split()[-1] for line in listed.lines[2:4]] == ["tcp", "shm"]
    assert listed.lines[4:] == [
        "d1: no transport in common with any prefill worker: it reads tcp; p1 offers shm",
        "p1: no transport in common with any decode worker: it offers shm; d1 reads tcp",
    ]
    reason = "has no transport in common with the decode worker: it offers shm, and read are tcp"
    assert f"prefill p1 for decode d1: {reason}" in explained.out


async def test_explain_shows_what_each_place_would_cost(baton: Baton) -> None:
    router = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
    async with bench(PREFILL, DECODE, router=router) as running:
        outcome = await baton("explain", "some words", "--address", running.address)
    assert outcome.code == 0
    assert outcome.lines[0] == "policy predicted_seconds, 10 prompt tokens"
    rows = [line.split() for line in outcome.lines[3:5]]
    assert {(row[0], row[1], row[-1]) for row in rows} == {("p1", "d1", "reported"), ("none", "d1", "reported")}


async def test_explain_reads_token_ids(baton: Baton) -> None:
    async with bench(PREFILL, DECODE) as running:
        outcome = await baton("explain", "104, 101 108", "--token-ids", "--address", running.address)
        piped = await baton("explain", "-", "--token-ids", "--address", running.address, stdin=b"104 101")
        wrong = await baton("explain", "104 x", "--token-ids", "--address", running.address)
    assert (outcome.code, outcome.lines[0].split(", ")[-1]) == (0, "3 prompt tokens")
    assert (piped.code, piped.lines[0].split(", ")[-1]) == (0, "2 prompt tokens")
    assert (wrong.code, "token_ids.ids[1]: 'x' is not a token id" in wrong.err) == (2, True)


async def test_tenants_shows_shares_and_what_is_left_of_quotas_whatever_tenants_are_called(baton: Baton) -> None:
    """One that is markup of the operator's terminal, and one as long as a name may be."""
    quota = QuotaConfig(tokens_per_second=1000, burst_seconds=10)
    config = FAST_ROUTER.model_copy(
        update={"admission": AdmissionConfig(fairness="weighted"), "quotas": QuotasConfig(tenants={"shop": quota})}
    )
    async with bench(simulated("w", "prefill", "decode"), router=config, proxied=False) as running:
        for tenant in ("shop", "x" * 128, "[bold red]lab"):
            request = generate_pb2.GenerateRequest(prompt="a" * 100, stopping={"max_tokens": 5})
            async for _ in running.stub.Generate(request, metadata=((TENANT_KEY, tenant),)):
                pass
        outcome = await baton("tenants", "--address", running.address)
    assert outcome.code == 0
    text = "\n".join(outcome.lines)
    assert "[bold red]lab" in text
    shop = next(line.split() for line in outcome.lines if line.startswith("shop"))
    assert shop[1:3] == ["0", "0"]
    assert shop[-3].endswith("%")
    assert 9000 < float(shop[-1]) <= 10_000
