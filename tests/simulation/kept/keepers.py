"""All keepers of a world, the processes of their workers, and what goes wrong with them."""

import asyncio
import signal
from random import Random
from typing import Any

from baton.errors import BatonError
from services.engines.pytorch.kv_cache.kept_cache import KeptPool
from services.keeping import Upgrader, beating, begin_start, note_start
from simulation.entropy import Time
from simulation.kept import engine as kept_engine
from simulation.kept import keeper as own_keeper
from simulation.kept.engine import KeptEngine
from simulation.kept.keeper import KeptProcess, SimulatedKeeper
from simulation.loop import Node
from simulation.processes import worker_config, worker_of

_CHANGES = 0.3  # of the upgrades are to another configuration
_READY_SECONDS, _LOOK_SECONDS = 15.0, 0.1  # for the next process of a worker, before those of others are replaced, too
_RESTART_SECONDS = 0.5  # until the keeper's supervisor has started it again


class Keepers:
    """The keepers of a world."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.random = Random(f"keepers-{world.plan.seed}")
        self.running: dict[str, SimulatedKeeper] = {}
        self._processes: dict[Node, KeptProcess] = {}
        self.files: set[int] = set()  # the inodes of all memory that was ever kept
        self.mappings: list[tuple[KeptProcess, list[int]]] = []  # of pool, seals and journal
        # Of workers whose configuration has changed:
        self.slots: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self._numbers = 0

    @property
    def living(self) -> list[KeptProcess]:
        """All processes of workers."""
        return [process for keeper in self.running.values() for process in keeper.living]

    def has(self, name: str) -> bool:
        """True of a worker that has a keeper."""
        return self.world.plan.fleet.keeps and name.startswith(("prefill", "decode", "mixed"))

    def process_of(self, node: Node | None) -> KeptProcess | None:
        """The process of a worker with a keeper."""
        return self._processes.get(node) if node is not None else None

    def start(self, name: str) -> None:
        """Starts the keeper of a worker, unless it runs."""
        if name in self.running:
            return
        self._numbers += 1
        self.running[name] = keeper = SimulatedKeeper(self.world, name, self._numbers)
        self.world.log("keeper starts", name)
        keeper.run_now()

    def begin(self, process: KeptProcess) -> None:
        """A process begins: beside the one that it is to follow, if there is one."""
        is_first = len(process.keeper.living) == 1
        node, process.stopping = self.world.new_node(process.keeper.name), asyncio.Event()
        process.node, self._processes[node] = node, process
        self.world.steps.tell("start", node.name, "")
        if is_first:
            self.world.serve(node, process.stopping)
        node.spawn(self._host(process))

    async def _host(self, process: KeptProcess) -> None:
        """The worker in a process, as `python -m services` does it."""
        node, world, code = process.node, self.world, 0
        slots = self.slots.get(node.name, world.plan.fleet.kept_slots)
        config = worker_config(world.plan, node, world.group.folder, slots, self.blocks.get(node.name, 0))
        try:
            keeper = process.connect()
            begin_start(keeper, config)
            async with (
                beating(keeper, process.stopping),
                world.registry.of(node) as registry,
                worker_of(config, registry, keeper) as host,
            ):
                note_start(keeper, config.keep_memory, keeper.start.ended_at)
                world.hosts[node.name] = host
                process.upgrader = Upgrader(keeper, host.engine, host.drainer._calls)
                await process.stopping.wait()
        except Exception as error:
            code = 1
            world.crashed(node, error)
        finally:
            world.end_process(node, code=code)

    def process_ended(self, node: Node, code: int) -> None:
        """It is dead. The one that is to follow it, if there is one, is the worker's from now on."""
        process = self.process_of(node)
        if process is None:
            return
        if process.engine is not None:
            process.engine.die(self.random, self.world.plan.fleet.kept_damage)
        process.close_unopened()
        process.end_with(code)
        is_host_there = not process.keeper.node.dead
        if is_host_there and self.world.nodes[node.name] is node and (living := process.keeper.living):
            self.world.serve(living[0].node, living[0].stopping)

    def killed(self, process: KeptProcess) -> None:
        """It is dead, if it was not before."""
        self.world.end_process(process.node, code=-signal.SIGKILL)

    # Faults.

    async def pause(self, name: str, seconds: float) -> None:
        """A keeper stands still."""
        keeper = self.running.get(name)
        if keeper is not None:
            keeper.node.paused = True
            await asyncio.sleep(seconds)
            keeper.node.resume()

    def reconfigure(self, name: str) -> None:
        """Changes a worker's configuration: its next process is to have memory of another form."""
        if self.random.random() < 0.5:
            self.slots[name] = self.random.choice((3, 5))
        else:
            self.blocks[name] = self.world.plan.fleet.blocks + self.random.choice((8, 32))

    async def roll_out(self, seconds: float) -> None:
        """Upgrades all workers, one after another, each so long after the routers have seen that all are ready again;
        sometimes to another configuration, whose memory has another form.
        """
        has_changed = self.random.random() < _CHANGES
        for name in [one for one in self.world.workers if self.has(one)]:
            if has_changed:
                self.reconfigure(name)
            node, ends = self.world.nodes[name], Time.now + _READY_SECONDS
            upgrading = self.upgrade(name, changes=0.0)
            while upgrading is not None and Time.now < ends:
                is_refused = upgrading.done() and not upgrading.result()
                if is_refused or (self.world.nodes[name] is not node and self.world.is_ready()):
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.sleep(seconds)

    def upgrade(self, name: str, changes: float = _CHANGES) -> Any:
        """Upgrades a worker, as `baton upgrade` does; that share of them to another configuration. Returns the task,
        whose result is whether the next process was ready.
        """
        process = self.process_of(self.world.nodes[name])
        if process is not None and process.upgrader is not None and self.world.is_up(name):
            if self.random.random() < changes:
                self.reconfigure(name)
            return process.node.spawn(self._upgrade(name, process.upgrader))
        return None

    async def _upgrade(self, name: str, upgrader: Upgrader) -> bool:
        try:
            await upgrader.upgrade()
        except BatonError as error:
            self.world.log("no upgrade", name, error)
            return False
        return True

    def refuse(self, name: str) -> None:
        """A keeper and its worker are killed for lack of memory, and the next ones get none at first."""
        self.kill(name, silently=False)
        self.start_again(name)
        if name in self.running:
            self.running[name].refusals = self.random.choice((1, 2, 4))

    def kill(self, name: str, *, silently: bool) -> None:
        """Kills a keeper, and with it all processes of its worker."""
        keeper = self.running.pop(name, None)
        if keeper is None:
            return
        self.world.log("keeper is killed", name)
        keeper.node.kill()
        for process in keeper.living:
            self.world.end_process(process.node, code=-signal.SIGKILL, silently=silently)
        keeper.close()

    def ended(self, keeper: SimulatedKeeper, code: int) -> None:
        """A keeper has ended by itself: its supervisor starts it again, if it was not told to stop."""
        self.world.log("keeper ended", keeper.name, code)
        keeper.node.kill()
        keeper.close()
        self.running.pop(keeper.name, None)
        if code or not keeper.is_told_to_stop:
            self.world.loop.call_later(_RESTART_SECONDS, self.start_again, keeper.name)

    def start_again(self, name: str) -> None:
        """Does so unless the worker has left for good."""
        if name not in self.world.absent and name not in self.running:
            self.world.start(name)

    def install(self) -> None:
        """Lets keepers and their workers run in this world."""
        KeptEngine.end_here = staticmethod(lambda node: self.world.end_process(node, code=-signal.SIGKILL))
        KeptEngine.got, KeptEngine.opened = staticmethod(self._got), staticmethod(self._opened)
        kept_engine.install()
        own_keeper.install(self.find, self.files)
        self.world.loop.runs_in_fibers = True

    def _got(self, engine: KeptEngine, form: str, found: KeptPool) -> None:
        process = self.process_of(engine.node)
        assert process is not None
        process.opening = engine
        process.note_memory([found.pool, found.seals, found.journal])
        for each in self.world.invariants:
            each.memory_got(process, form, found)

    def _opened(self, engine: KeptEngine) -> None:
        process = self.process_of(engine.node)
        assert process is not None
        process.has_opened(engine)
        if engine.kept.is_found:
            self.world.steps.tell("takeover", process.node.name, "")
        self.mappings.append((process, engine.files))
        for each in self.world.invariants:
            each.taken_over(process, engine)

    def find(self, node: Node | None) -> SimulatedKeeper:
        """The keeper that a node is, or has."""
        process = self.process_of(node)
        if process is not None:
            return process.keeper
        return next(keeper for keeper in self.running.values() if keeper.node is node)
