"""An upgrade of this process, as the keeper at the other end of a socket answers it."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.eventually import eventually

from baton.errors import LayoutMismatch, RequestExists
from services import keeping
from services.engines.journal.journal import Journal
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine
from services.identity import Identity
from services.keeper import client
from services.keeper.messages import Answer, KeeperLost, pair, receive, send
from services.keeping import Upgrader
from services.requests.calls import Calls
from services.requests.fault_injection import FaultReader


class Ending(SimulatedEngine):
    """An engine with a journal, which counts how often it was to end its process."""

    def __init__(self) -> None:
        super().__init__(SimulatedConfig())
        self.ended = 0

    @property
    def journal(self) -> Journal:
        return Journal.__new__(Journal)

    def end_process(self) -> None:
        self.ended += 1


@dataclass(frozen=True, slots=True)
class Worker:
    keeper: socket.socket
    client: client.KeeperClient
    engine: Ending
    calls: Calls
    upgrader: Upgrader

    async def begin(self) -> "asyncio.Task[None]":
        """Begins an upgrade of which the keeper has heard."""
        upgrade = asyncio.create_task(self.upgrader.upgrade())
        packet = await asyncio.to_thread(receive, self.keeper)
        assert packet.content["verb"] == "upgrade"
        send(self.keeper, Answer())
        return upgrade


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(keeping, "_SENT_SECONDS", 0.0)
    own, end = pair()
    own.settimeout(60)
    with own:
        send(own, Answer())
        keeper = client.KeeperClient(end)
        receive(own)
        engine, calls = Ending(), Calls(Identity("x", ("decode",), "demo", 1), FaultReader(False))
        yield Worker(own, keeper, engine, calls, Upgrader(keeper, engine, calls))
        keeper.close()


async def test_an_upgrade_whose_caller_has_left_is_running_until_it_ends_the_process(worker: Worker) -> None:
    upgrade = await worker.begin()
    upgrade.cancel()
    with pytest.raises(RequestExists):
        await worker.upgrader.upgrade()
    send(worker.keeper, Answer())
    await asyncio.wait([upgrade])
    await eventually(lambda: worker.engine.ended == 1)


async def test_an_upgrade_whose_caller_has_left_and_that_does_not_fit_ends_nothing(worker: Worker) -> None:
    upgrade = await worker.begin()
    upgrade.cancel()
    send(worker.keeper, Answer(problem="it does not fit"))
    await asyncio.wait([upgrade])
    again = await worker.begin()
    send(worker.keeper, Answer(problem="nor does this one"))
    with pytest.raises(LayoutMismatch, match="nor does this one"):
        await again
    assert worker.engine.ended == 0


async def test_a_worker_that_was_told_to_stop_when_its_successor_was_ready_drains(worker: Worker) -> None:
    upgrade = await worker.begin()
    worker.calls.draining = True
    send(worker.keeper, Answer())
    await upgrade
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, later.set)
    await later.wait()
    assert worker.engine.ended == 0


@pytest.mark.timeout(30)
async def test_the_keeper_is_not_waited_for_for_ever_after_an_upgrade(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.2)
    upgrade = await worker.begin()
    send(worker.keeper, Answer(problem="it does not fit"))
    with pytest.raises(LayoutMismatch):
        await upgrade
    with pytest.raises(KeeperLost):
        await asyncio.to_thread(worker.client.drop, "kv")
