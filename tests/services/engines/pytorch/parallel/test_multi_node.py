"""Ranks that join rank 0 over TCP: their answers, health and metrics, the registration of the group, and its end."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.clients.scraping import get_health, scrape
from support.cluster.processes import Process, forked
from support.engines.checkpoints import DEMO
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually
from support.servers.etcd import free_port

from baton.errors import ConfigError, EngineFailed
from discovery.memory import MemoryRegistry
from services.config import WorkerConfig
from services.engines.prompt import Prompt
from services.server import host_worker

# Ranks load the libraries again, which takes long where many tests share two cores.
pytestmark = pytest.mark.timeout(300)

READY_SECONDS = 200
LOST_SECONDS = 30


async def test_a_group_answers_like_one_process_and_loses_its_registration_with_a_rank(
    demo: Checkpoint, tmp_path: Path
) -> None:
    leader, registry = f"127.0.0.1:{free_port()}", MemoryRegistry("test")
    config = worker_config(demo, leader)
    prompt = Prompt((1, 5, 9, 12, 7))
    with rank_process(1, leader, tmp_path) as follower:
        async with host_worker(config, registry) as worker:
            await eventually(lambda: get_health(follower.monitor)[0] == 200, READY_SECONDS)
            assert [each.worker_id for each in registry.workers()] == ["group"]
            before = scrape(follower.monitor).sum("baton_rank_steps_total")
            assert worker.engine is not None
            answer = await collect(worker.engine.decode(prompt, greedy(8)))
            assert answer.ids == demo.generate(prompt.context, 8)
            scraped = scrape(follower.monitor)
            assert scraped.has("baton_rank_info", rank="1", size="2", leader=leader, model="demo")
            assert scraped.sum("baton_rank_ready") == 1
            assert scraped.sum("baton_rank_steps_total") >= before + 8
            assert scraped.sum("baton_model_load_seconds") > 0
            assert [each.worker_id for each in registry.workers()] == ["group"]
            follower.process.kill()
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(worker.watch_engines(), 60)
            assert worker.engines.healthy is False
        assert registry.workers() == ()


@pytest.mark.slow
async def test_a_drained_rank_0_ends_the_others_which_do_not_end_before(tmp_path: Path) -> None:
    leader = f"127.0.0.1:{free_port()}"
    with rank_process(0, leader, tmp_path) as first, rank_process(1, leader, tmp_path) as second:
        await eventually(lambda: "the group is ready" in second.process.log.read_text(), READY_SECONDS)
        # Rank 0 has a server to start then, and has nothing to drain before.
        await eventually(lambda: get_health(first.monitor)[0] == 200, READY_SECONDS)
        second.process.popen.terminate()
        await eventually(lambda: "computing until rank 0 ends" in second.process.log.read_text(), 60)
        assert get_health(second.monitor)[0] == 200
        assert await asyncio.to_thread(first.process.terminate, 60) == 0
        assert await asyncio.to_thread(second.process.popen.wait, 60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
async def test_every_rank_ends_with_exit_code_1_when_another_is_lost(tmp_path: Path, frozen: bool) -> None:
    leader = f"127.0.0.1:{free_port()}"
    with rank_process(0, leader, tmp_path) as first, rank_process(1, leader, tmp_path) as second:
        await eventually(lambda: "the group is ready" in second.process.log.read_text(), READY_SECONDS)
        first.process.pause() if frozen else first.process.kill()
        assert await asyncio.to_thread(second.process.popen.wait, LOST_SECONDS + 60) == 1
        reason = f"it has been silent for {LOST_SECONDS} s" if frozen else "rank 0 has ended: its connection has closed"
        assert reason in second.process.log.read_text()


@pytest.mark.slow
async def test_a_rank_ends_at_once_when_it_is_stopped_before_the_group_is_ready(tmp_path: Path) -> None:
    with rank_process(1, f"127.0.0.1:{free_port()}", tmp_path) as alone:
        await eventually(lambda: "waiting for rank 0" in alone.process.log.read_text(), READY_SECONDS)
        status, body = get_health(alone.monitor)
        assert (status, body["status"]) == (503, "NOT_SERVING")
        assert await asyncio.to_thread(alone.process.terminate, 60) == 0


async def test_a_worker_names_the_ranks_that_did_not_join(demo: Checkpoint) -> None:
    config = worker_config(demo, "127.0.0.1:0", join_seconds=0.2)
    with pytest.raises(EngineFailed, match=r"of 2 ranks, 1 did not join at 127\.0\.0\.1:0 within 0\.2 s"):
        async with host_worker(config, MemoryRegistry("test")):
            pass


async def test_a_group_over_hosts_cannot_hand_over(demo: Checkpoint) -> None:
    config = worker_config(demo, "127.0.0.1:0").model_copy(update={"roles": ("prefill", "decode")})
    with pytest.raises(ConfigError, match="over several hosts a split model hands no KV over"):
        async with host_worker(config, MemoryRegistry("test")):
            pass


class RunningRank:
    """A process of one rank, and its monitor's address."""

    def __init__(self, running: Process, monitor: str) -> None:
        self.process = running
        self.monitor = monitor


@contextlib.contextmanager
def rank_process(rank: int, leader: str, folder: Path) -> Iterator[RunningRank]:
    monitor = f"127.0.0.1:{free_port()}"
    options = ["registry.kind=memory", f"metrics_listen={monitor}", f"engine.model={DEMO}", "engine.device=cpu"]
    options += ["engine.kind=pytorch"]  # what it is forked from is chosen by this
    options += ["engine.threads=1", "engine.tensor_parallel_size=2", "engine.max_sequences=8"]
    options += [f"engine.multi_node.{key}={value}" for key, value in group(leader, rank).items()]
    with forked("services", "decode.yaml", options, folder / f"rank-{rank}.log") as running:
        yield RunningRank(running, monitor)


def group(leader: str, rank: int, join_seconds: float = READY_SECONDS) -> dict[str, object]:
    # Busy ranks of tests that share two cores may be silent for long.
    return {"leader": leader, "rank": rank, "join_seconds": join_seconds, "lost_seconds": LOST_SECONDS}


def worker_config(demo: Checkpoint, leader: str, join_seconds: float = READY_SECONDS) -> WorkerConfig:
    """Rank 0's, as `rank_process` has it."""
    engine = {
        "model": demo.path,
        "device": "cpu",
        "threads": 1,
        "tensor_parallel_size": 2,
        "max_sequences": 8,
        "multi_node": group(leader, 0, join_seconds),
    }
    roles: Sequence[str] = ("decode",)
    return WorkerConfig.model_validate(
        {"worker_id": "group", "roles": roles, "engine": {"kind": "pytorch", **engine}, "transports": ["tcp"]}
    )
