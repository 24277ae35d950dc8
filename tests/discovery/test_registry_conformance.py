"""The contract of every registry: in memory, in a folder and in a real etcd."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.eventually import eventually
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer

from baton.errors import ConfigError
from discovery.etcd import EtcdConfig, EtcdRegistry
from discovery.file import FileRegistry
from discovery.memory import MemoryRegistry
from discovery.registry import Registry, WorkerRecord
from runtime.aio import timeout

OpenRegistry = Callable[..., AbstractAsyncContextManager[Registry]]

# Of most tests: nothing is renewed meanwhile.
LONG_TTL_SECONDS = 60
# Of tests that wait for a renewal, which comes after a third of it.
SHORT_TTL_SECONDS = 6


@pytest.fixture(params=["memory", "file", "etcd"])
def open_registry(request: pytest.FixtureRequest, tmp_path: Path) -> OpenRegistry:
    """Opens a namespace's registry; opened twice, both see the same workers."""
    memories: dict[str, MemoryRegistry] = {}

    @asynccontextmanager
    async def open_memory(namespace: str, _ttl_seconds: int = LONG_TTL_SECONDS) -> AsyncIterator[Registry]:
        yield memories.setdefault(namespace, MemoryRegistry(namespace))

    @asynccontextmanager
    async def open_file(namespace: str, ttl_seconds: int = LONG_TTL_SECONDS) -> AsyncIterator[Registry]:
        async with FileRegistry(tmp_path / "registry", namespace, ttl_seconds, poll_seconds=0.02) as registry:
            yield registry

    @asynccontextmanager
    async def open_etcd(namespace: str, ttl_seconds: int = LONG_TTL_SECONDS) -> AsyncIterator[Registry]:
        server: EtcdServer = request.getfixturevalue("shared_etcd")
        async with EtcdRegistry(EtcdConfig(endpoints=(server.endpoint,)), namespace, ttl_seconds) as registry:
            yield registry

    return {"memory": open_memory, "file": open_file, "etcd": open_etcd}[request.param]


@pytest.fixture
async def registry(open_registry: OpenRegistry, namespace: str) -> AsyncIterator[Registry]:
    async with open_registry(namespace) as opened:
        yield opened


@pytest.fixture
async def pair(open_registry: OpenRegistry, namespace: str) -> AsyncIterator[tuple[Registry, Registry]]:
    """One namespace's registry as two processes have it."""
    async with open_registry(namespace) as here, open_registry(namespace) as there:
        yield here, there


@pytest.fixture
async def renewing_pair(open_registry: OpenRegistry, namespace: str) -> AsyncIterator[tuple[Registry, Registry]]:
    """The same, and they renew often."""
    async with (
        open_registry(namespace, SHORT_TTL_SECONDS) as here,
        open_registry(namespace, SHORT_TTL_SECONDS) as there,
    ):
        yield here, there


async def test_the_first_view_comes_at_once_also_without_workers(registry: Registry) -> None:
    async with Views(registry) as views:
        await views.until(lambda workers: workers == ())


async def test_a_registered_worker_is_seen_with_all_of_its_record(registry: Registry) -> None:
    record = replace(worker("w1"), capabilities=("logprobs",), data_parallel_ranks=2, epoch=2**64 - 1)
    async with Views(registry) as views, registry.register(record):
        await views.until(lambda workers: workers == (record,))


async def test_a_watcher_that_comes_later_sees_who_is_registered(registry: Registry) -> None:
    async with registry.register(worker("w1")), Views(registry) as views:
        await views.until_ids("w1")
        assert len(views.all) == 1


async def test_another_process_sees_the_worker(pair: tuple[Registry, Registry]) -> None:
    here, there = pair
    async with here.register(worker("w1")), Views(there) as views:
        await views.until_ids("w1")


async def test_workers_are_in_the_order_of_their_ids(registry: Registry) -> None:
    async with registry.register(worker("b")), registry.register(worker("c")), registry.register(worker("a")):
        view = await _first_view(registry)
    assert [one.worker_id for one in view] == ["a", "b", "c"]


async def test_leaving_the_context_removes_the_worker(registry: Registry) -> None:
    async with Views(registry) as views:
        async with registry.register(worker("w1")):
            await views.until_ids("w1")
        await views.until_ids(seconds=30)


async def test_leaving_by_an_error_removes_the_worker_and_lets_the_error_pass(registry: Registry) -> None:
    async with Views(registry) as views:
        with pytest.raises(ZeroDivisionError):
            await _fail_while_registered(registry, views)
        await views.until_ids(seconds=30)


async def _fail_while_registered(registry: Registry, views: Views) -> None:
    async with registry.register(worker("w1")):
        await views.until_ids("w1")
        raise ZeroDivisionError


async def test_a_registration_is_registered_from_the_start(registry: Registry) -> None:
    async with registry.register(worker("w1")) as registration:
        assert registration.registered


async def test_a_registration_is_not_registered_after_its_context(registry: Registry) -> None:
    async with registry.register(worker("w1")) as registration:
        pass
    assert not registration.registered


async def test_an_update_is_seen(registry: Registry) -> None:
    async with Views(registry) as views, registry.register(worker("w1")) as registration:
        await registration.update(replace(worker("w1"), draining=True))
        await views.until(lambda workers: workers == (replace(worker("w1"), draining=True),))


async def _first_view(registry: Registry) -> tuple[WorkerRecord, ...]:
    async with aclosing(registry.watch()) as views:
        return await anext(views)


async def test_an_update_has_returned_when_others_can_see_it(registry: Registry) -> None:
    async with registry.register(worker("w1")) as registration:
        await registration.update(replace(worker("w1"), draining=True))
        assert await _first_view(registry) == (replace(worker("w1"), draining=True),)


async def test_an_update_that_changes_nothing_returns_as_soon(registry: Registry) -> None:
    async with registry.register(worker("w1")) as registration, timeout(20):
        await registration.update(worker("w1"))


async def test_an_update_to_another_worker_id_is_refused(registry: Registry) -> None:
    async with registry.register(worker("w1")) as registration:
        with pytest.raises(ValueError, match="w2"):
            await registration.update(worker("w2"))


async def test_namespaces_do_not_see_each_other(open_registry: OpenRegistry, namespace: str) -> None:
    async with open_registry(namespace) as ours, open_registry(f"{namespace}-2") as theirs, Views(ours) as views:
        async with theirs.register(worker("theirs")), ours.register(worker("ours")):
            await views.until_ids("ours")
        assert all(one.worker_id == "ours" for view in views.all for one in view)


async def test_changes_while_the_reader_is_busy_are_merged(registry: Registry) -> None:
    async with aclosing(registry.watch()) as views, Views(registry) as others:
        assert await anext(views) == ()
        async with registry.register(worker("w1")) as registration, registry.register(worker("w2")):
            for epoch in range(2, 8):
                await registration.update(worker("w1", epoch))
            await others.until(lambda workers: workers == (worker("w1", 7), worker("w2")))
            async with timeout(20):
                skipped = [await anext(views)]
                while skipped[-1] != (worker("w1", 7), worker("w2")):
                    skipped.append(await anext(views))
            assert len(skipped) <= 2


async def test_no_view_is_the_same_as_the_one_before(registry: Registry) -> None:
    async with Views(registry) as views, registry.register(worker("w1")) as registration:
        await registration.update(worker("w1"))
        await registration.update(worker("w1", 2))
        await views.until(lambda workers: workers == (worker("w1", 2),))
        assert all(before != after for before, after in zip(views.all, views.all[1:], strict=False))


async def test_of_two_processes_under_one_worker_id_the_higher_epoch_stays(
    renewing_pair: tuple[Registry, Registry],
) -> None:
    here, there = renewing_pair
    async with here.register(worker("w1", 5)) as newer, there.register(worker("w1", 4)) as older, Views(here) as views:
        await eventually(lambda: newer.registered and not older.registered)
        await views.until(lambda workers: workers == (worker("w1", 5),))


async def test_a_process_that_begins_has_a_higher_epoch_whatever_its_clock_says(
    pair: tuple[Registry, Registry],
) -> None:
    here, there = pair
    ahead = time.time_ns() + 10**18
    async with here.register(worker("w1", epoch=ahead)):
        assert await there.next_epoch("w1") == ahead + 1
        assert ahead > await there.next_epoch("w2") > 10**18


async def test_no_epoch_is_larger_than_what_a_record_holds(registry: Registry) -> None:
    async with registry.register(worker("w1", epoch=2**64 - 1)):
        assert await registry.next_epoch("w1") == 2**64 - 1


async def test_the_lower_epoch_comes_back_when_the_higher_has_gone(renewing_pair: tuple[Registry, Registry]) -> None:
    here, there = renewing_pair
    async with there.register(worker("w1", 4)) as older, Views(here) as views:
        async with here.register(worker("w1", 5)):
            await eventually(lambda: not older.registered)
        await eventually(lambda: older.registered)
        await views.until(lambda workers: workers == (worker("w1", 4),))


@pytest.mark.parametrize("worker_id", ["", "a/b", "../x", "ä", "w" * 201])
async def test_a_worker_id_that_cannot_be_in_a_key_is_refused(registry: Registry, worker_id: str) -> None:
    with pytest.raises(ConfigError, match="worker_id"):
        async with registry.register(worker(worker_id)):
            pass


@pytest.mark.parametrize("namespace", ["", "a/workers", "a b"])
async def test_a_namespace_that_could_reach_into_another_is_refused(
    open_registry: OpenRegistry, namespace: str
) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        async with open_registry(namespace):
            pass


async def test_allocated_ids_of_two_processes_differ(pair: tuple[Registry, Registry]) -> None:
    here, there = pair
    async with (
        here.allocate_id("node", 3) as one,
        there.allocate_id("node", 3) as two,
        there.allocate_id("node", 3) as three,
    ):
        assert {one.value, two.value, three.value} == {0, 1, 2}


async def test_a_freed_id_is_allocated_again(pair: tuple[Registry, Registry]) -> None:
    here, there = pair
    async with here.allocate_id("node", 1):
        pass
    async with there.allocate_id("node", 1) as again:
        assert again.value == 0


async def test_ids_of_another_kind_or_namespace_are_independent(
    registry: Registry, open_registry: OpenRegistry, namespace: str
) -> None:
    async with (
        registry.allocate_id("node", 1),
        registry.allocate_id("other", 1) as other,
        open_registry(f"{namespace}-2") as elsewhere,
        elsewhere.allocate_id("node", 1) as allocated,
    ):
        assert (other.value, allocated.value) == (0, 0)


async def test_allocated_ids_are_not_workers(registry: Registry) -> None:
    async with registry.allocate_id("node", 4):
        assert await _first_view(registry) == ()
