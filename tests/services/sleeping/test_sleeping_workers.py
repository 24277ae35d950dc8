"""Workers of one group that do not fit together: simulated engines behind gRPC, which refuse calls while they sleep."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.workers import Running, Starter
from support.engines.checkpoints import DEMO
from support.eventually import eventually
from support.keeping import keeper_here

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.errors import ConfigError, EngineFailed, Overloaded, Unavailable, Unsupported
from discovery.memory import MemoryRegistry
from services.config import KeepConfig, KeepMemoryConfig, WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated.engine import SimulatedEngine
from services.server import host_worker
from services.sleeping.config import SleepConfig

pytestmark = pytest.mark.timeout(120)


def _sleep(folder: Path, *, num_bytes: int = 6, **options: float) -> SleepConfig:
    return SleepConfig(group=folder / "group", group_bytes=10, bytes=num_bytes, **{"turn_seconds": 0.2, **options})


@asynccontextmanager
async def workers(folder: Path, count: int = 2, **options: object) -> AsyncIterator[list[Running]]:
    """Workers of models of their own, of which one fits at a time."""
    engine = {"decode_step_seconds": 0.002, "num_blocks": 512, **options}
    start = Starter()
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(start("prefill", "decode", sleep=_sleep(folder), name=name, **engine))
            for name in "abcdef"[:count]
        ]


def is_asleep(running: Running) -> bool:
    return running.worker.engines.load().wake_seconds is not None


async def answer(running: Running, request_id: str, max_tokens: int = 20) -> list[int]:
    return (await running.calls.decode(decode_request(request_id=request_id, max_tokens=max_tokens))).token_ids


async def test_a_worker_that_starts_puts_another_to_sleep_and_a_request_wakes_that_again(tmp_path: Path) -> None:
    async with workers(tmp_path) as (a, b):
        assert (is_asleep(a), is_asleep(b)) == (True, False)
        expected = await answer(b, "1")
        assert await answer(a, "1") == expected
        assert (is_asleep(a), is_asleep(b)) == (False, True)


async def test_the_load_tells_that_a_model_sleeps_and_how_long_it_takes_to_wake(tmp_path: Path) -> None:
    async with workers(tmp_path, wake_seconds=0.3) as (a, b):
        loads = [(await unary(each.calls.worker.GetLoad(worker_pb2.GetLoadRequest()))).load for each in (a, b)]
        assert [load.HasField("wake") for load in loads] == [True, False]
        assert loads[0].wake.ToNanoseconds() / 1e9 >= 0.4


async def test_a_storm_at_models_of_which_one_fits_loses_nothing(tmp_path: Path) -> None:
    async with workers(tmp_path, 3, wake_seconds=0.01) as running:
        expected = await answer(running[0], "expected")

        async def client(number: int) -> None:
            for turn in range(8):
                assert await answer(running[(number + turn) % 3], f"{number}-{turn}") == expected
                await asyncio.sleep(0.01 * (number % 5))

        await asyncio.gather(*map(client, range(24)))
        assert sum(not is_asleep(each) for each in running) == 1
        assert [each.blocks_used for each in running] == [0, 0, 0]


async def test_one_with_a_running_request_does_not_sleep_until_that_has_ended(tmp_path: Path) -> None:
    async with workers(tmp_path, decode_step_seconds=0.01) as (a, b):
        long = asyncio.create_task(answer(b, "long", max_tokens=150))
        await eventually(lambda: b.blocks_used > 0)
        short = asyncio.create_task(answer(a, "short"))
        await asyncio.wait([long, short], return_when=asyncio.FIRST_COMPLETED)
        assert long.done()
        assert len(await long) == 150
        assert len(await short) == 20


async def test_requests_that_come_while_it_has_to_sleep_wait_for_its_next_turn(tmp_path: Path) -> None:
    async with workers(tmp_path, decode_step_seconds=0.01) as (a, b):
        long = asyncio.create_task(answer(b, "long", max_tokens=100))
        await eventually(lambda: b.blocks_used > 0)
        other = asyncio.create_task(answer(a, "other"))
        await eventually(lambda: is_asleep(b))  # admits no more
        later = asyncio.create_task(answer(b, "later"))
        await asyncio.gather(long, other)
        assert not later.done()
        assert len(await later) == 20


async def test_a_request_that_is_cancelled_while_its_model_wakes_leaves_nothing(tmp_path: Path) -> None:
    async with workers(tmp_path, wake_seconds=0.2) as (a, b):
        for number in range(6):
            call = asyncio.create_task(answer(a, f"leaves-{number}"))
            await asyncio.sleep(0.06 * number)
            call.cancel()
            await asyncio.wait([call])
        assert len(await answer(b, "stays")) == 20
        assert len(await answer(a, "stays")) == 20
        await eventually(lambda: a.blocks_used == b.blocks_used == 0)


async def test_held_kv_keeps_a_model_awake(tmp_path: Path) -> None:
    async with workers(tmp_path) as (a, b):
        handoff = await b.calls.prefill("held")
        waiting = asyncio.create_task(answer(a, "waits"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await b.calls.release(handoff)
        assert len(await waiting) == 20


async def test_a_request_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    start = Starter(decode_step_seconds=0.01, num_blocks=512)
    hasty = _sleep(tmp_path, wait_seconds=0.4)
    async with (
        start("prefill", "decode", sleep=hasty, name="a") as a,
        start("prefill", "decode", sleep=_sleep(tmp_path), name="b") as b,
    ):
        long = asyncio.create_task(answer(b, "long", max_tokens=300))
        await eventually(lambda: b.blocks_used > 0)
        with pytest.raises(Overloaded, match=r"the model sleeps, and other models have not made room .* 0.4 s"):
            await answer(a, "waits")
        assert len(await long) == 300
        assert len(await answer(a, "again")) == 20


async def test_a_model_that_cannot_be_woken_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(tmp_path) as (a, b):
        del b
        working = SimulatedEngine.resume_memory

        async def fail(engine: SimulatedEngine) -> None:
            raise EngineFailed("no memory of the device")

        monkeypatch.setattr(SimulatedEngine, "resume_memory", fail)
        with pytest.raises(EngineFailed, match="the model cannot be woken: no memory of the device"):
            await answer(a, "fails")
        monkeypatch.setattr(SimulatedEngine, "resume_memory", working)
        assert len(await answer(a, "again")) == 20


async def test_a_worker_that_finds_no_room_does_not_start(tmp_path: Path) -> None:
    start = Starter(decode_step_seconds=0.01, num_blocks=512)
    async with start("prefill", "decode", sleep=_sleep(tmp_path, turn_seconds=60.0), name="a") as a:
        long = asyncio.create_task(answer(a, "long", max_tokens=300))
        await eventually(lambda: a.blocks_used > 0)
        with pytest.raises(Unavailable, match=r"sleep.group: its workers have not made room for this one for 0.3 s"):
            async with start("prefill", "decode", sleep=_sleep(tmp_path, wait_seconds=0.3), name="b"):
                pass
        assert len(await long) == 300


async def test_a_kept_answer_that_nobody_reads_keeps_its_model_awake_until_it_has_ended(tmp_path: Path) -> None:
    start = Starter(decode_step_seconds=0.01, num_blocks=512)
    keep = KeepConfig(max_seconds=30.0)
    async with (
        start("prefill", "decode", sleep=_sleep(tmp_path), name="a") as a,
        start("prefill", "decode", sleep=_sleep(tmp_path), name="b", keep=keep) as b,
    ):
        request = decode_request(request_id="kept", max_tokens=100)
        request.keep.record, request.keep.hop = b"record", 1
        request.keep.secret_sha256 = request.keep.owner_sha256 = b"s" * 32
        request.keep.grace.FromSeconds(20)
        call = asyncio.create_task(b.calls.decode(request))
        await eventually(lambda: b.blocks_used > 0)
        call.cancel()
        await asyncio.wait([call])
        waiting = asyncio.create_task(answer(a, "waits"))
        await eventually(lambda: is_asleep(b))
        assert b.worker.kept.usage.parked == 1
        assert len(await waiting) == 20
        assert b.worker.kept.usage.finished == 1


async def test_models_that_fit_together_stay_awake(tmp_path: Path) -> None:
    start = Starter()
    async with (
        start("prefill", "decode", sleep=_sleep(tmp_path, num_bytes=5), name="a") as a,
        start("prefill", "decode", sleep=_sleep(tmp_path, num_bytes=5), name="b") as b,
    ):
        await asyncio.gather(answer(a, "1"), answer(b, "1"))
        assert not is_asleep(a)
        assert not is_asleep(b)


async def test_a_worker_that_may_sleep_hands_nothing_over_and_is_not_upgraded(tmp_path: Path) -> None:
    async with workers(tmp_path, 1) as (a,):
        [record] = a.registry.workers()
        assert record.offers == record.reads == ()
        assert "whole_requests" in record.capabilities
        assert not {"moves_decodes", "prefix_loans", "early_handoff"} & set(record.capabilities)
        with pytest.raises(Unsupported, match="shares its memory"):
            await unary(a.calls.worker.Upgrade(worker_pb2.UpgradeRequest()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes": 11}, "bytes: must be more than 0, and not more than group_bytes"),
        ({"bytes": 0}, "bytes: must be more than 0, and not more than group_bytes"),
    ],
)
def test_a_model_that_never_fits_is_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SleepConfig(group=tmp_path, group_bytes=10, **options)


async def test_only_whole_requests_are_run_by_those_that_sleep(tmp_path: Path) -> None:
    with pytest.raises((ValueError, ConfigError), match="sleep: roles: must be prefill and decode"):
        async with Starter()("decode", sleep=_sleep(tmp_path)):
            pass


async def test_the_next_process_of_a_worker_that_was_awake_finds_its_kept_cache(tmp_path: Path) -> None:
    engine = PyTorchConfig(model=DEMO, device="cpu", threads=1, kv_cache_bytes=8 << 20, execution="fused")
    config = WorkerConfig(
        worker_id="w",
        engine=engine,
        keep_memory=KeepMemoryConfig(kv=True),
        sleep=_sleep(tmp_path),
        drain_seconds=0.0,
    )
    with keeper_here() as keeper:
        for cached in (0, 48):
            with keeper.memory(kv=True) as kept:
                async with (
                    host_worker(config, MemoryRegistry("test"), keeper=kept.keeper) as worker,
                    calls_to(worker.address) as calls,
                ):
                    decoded = await calls.decode(decode_request())
                    assert decoded.finished is not None
                    assert decoded.finished.usage.cached_tokens == cached
