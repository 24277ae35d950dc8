"""A world: routers and workers by Baton's own assemblies, clients, and faults, on one loop in virtual time."""

import asyncio
import hashlib
import random
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import structlog

import baton_http2.server.server
import router.openai.server
import router.text.served_model
import rpc.channels
import services.control
from simulation import entropy, transport
from simulation.channel import connect
from simulation.chaos import Chaos
from simulation.clients import Client, Result
from simulation.entropy import Time
from simulation.etcd import SimulatedEtcd
from simulation.invariants import INVARIANTS, Invariant
from simulation.invariants.fleet import PROBE_TOKENS, PROBES
from simulation.loop import NODE, Deadlock, Node, SimulatedLoop
from simulation.memory import MemoryGroup
from simulation.network import Network
from simulation.plan import CLIENTS, Plan, Request
from simulation.processes import (
    SimulatedSiblings,
    keepers_of,
    router_of,
    set_buffers,
    tokenizer_of,
    worker_config,
    worker_of,
)
from simulation.readiness import missing
from simulation.registry import SimulatedRegistry
from simulation.steps import Steps

_READY_SECONDS = 60.0
_LOOK_SECONDS = 0.05
# After the last request: leases, the deadlines of calls that half-open connections hide, and keepalive.
_QUIET_SECONDS = 20.0
# Where nothing went wrong: the longest that an answer is kept for a client that may come back, and a little.
_KEPT_SECONDS = 10.0
_QUIET_LOOKS = 5  # so many times as rarely
# How often a worker looks at its load: a third of a run would go into it.
_LOAD_SECONDS = 0.25
_LONGEST_SECONDS = 2000.0  # of a run, with all its rounds
# The numbers of the first requests in quiet: before those of the plan, and after each round; and the step to the next.
_WARM_UP, _PROBE, _NEXT_PROBE = 8000, 9000, 100
_ROUND = 1000  # the step of the requests of the plan


class World:
    """One run of a plan. `problems` has what the invariants found, and `digest` is of the whole event log."""

    def __init__(self, plan: Plan, *, keeps_log: bool = False) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(plan.seed, plan.turn_seconds)
        self.network = Network(self.loop, plan.seed, self.log)
        self.loop.network = self.network
        registry: Any = SimulatedEtcd if plan.fleet.registry == "etcd" else SimulatedRegistry
        self.registry = registry(self.network, plan.seed)
        self.random = random.Random(f"world-{plan.seed}")
        self.nodes: dict[str, Node] = {}
        self.hosts: dict[str, Any] = {}  # routers and workers that run
        self.stopping: dict[str, asyncio.Event] = {}
        self.results: list[Result] = []
        self.problems: list[str] = []
        self.lines: list[str] | None = [] if keeps_log else None
        self.events = 0
        self.absent: set[str] = set()  # workers that have left for good
        self.is_quiet = False  # all requests of the plan have ended, and all faults
        self.group = MemoryGroup(self.hosts)
        self.keepers = keepers_of(self)
        self.chaos = Chaos(self)
        self.steps = Steps([self.chaos.step, self._tell_client])
        self.running: dict[str, Client] = {}  # by their requests' ids
        self.invariants: list[Invariant] = [kind(self) for kind in INVARIANTS]
        self._hash = hashlib.blake2b(digest_size=16)
        self._dead: list[Node] = []  # kept, so that no `finally` of theirs runs
        self._starts = 0

    # What happens, in order.

    def log(self, *what: object) -> None:
        """A line of the event log."""
        self.events += 1
        line = f"{Time.now:.6f} " + " ".join(map(str, what))
        self._hash.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def problem(self, kind: str, text: str) -> None:
        """An invariant does not hold."""
        self.log("PROBLEM", kind, text)
        self.problems.append(f"{kind}: {text}")

    @property
    def digest(self) -> str:
        """Of the log so far."""
        return self._hash.hexdigest()

    def _log_record(self, _logger: Any, method: str, event: Any) -> Any:
        node = NODE.get()
        name = node.name if node else "-"
        event.pop("timestamp", None)
        error = event.pop("exc_info", None)
        text = " ".join(f"{key}={value!r}" for key, value in sorted(event.items()))
        self.log("LOG", name, method, text, repr(error) if error else "")
        for each in self.invariants:
            each.logged(name, method, event, error)
        raise structlog.DropEvent

    # Nodes.

    def ip_of(self, name: str) -> str:
        """The address of a node, also of one that is down."""
        fleet = self.plan.fleet
        return f"10.0.0.{(*fleet.workers, *fleet.router_names, *CLIENTS).index(name) + 1}"

    def address_of(self, router: str) -> str:
        """The address of a router for clients, whichever of its processes takes their connection."""
        return self.ip_of(self.plan.fleet.siblings(router)[0])

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers that have not left for good."""
        return tuple(name for name in self.plan.fleet.workers if name not in self.absent)

    def is_up(self, name: str) -> bool:
        """True if a process serves there, and is not on its way out."""
        node = self.nodes.get(name)
        return name in self.hosts and node is not None and not node.dead and not self.stopping[name].is_set()

    def start(self, name: str) -> None:
        """Starts the process of a node, or the keeper that starts it."""
        if self.has_keeper(name):
            self.keepers.start(name)
            return
        node = self.new_node(name)
        self.serve(node, asyncio.Event())
        if name not in CLIENTS:
            node.spawn(self._host(node))

    def new_node(self, name: str) -> Node:
        """A process that has begun."""
        self._starts += 1
        self.log("start", name)
        return Node(self.loop, name, self.ip_of(name), self._starts)

    def serve(self, node: Node, stopping: asyncio.Event) -> None:
        """A process is the one of its name, from now on."""
        self.nodes[node.name], self.stopping[node.name] = node, stopping
        self.network.revive(node)

    def has_keeper(self, name: str) -> bool:
        """True of a worker that has one."""
        return self.keepers is not None and self.keepers.has(name)

    def stop(self, name: str) -> None:
        """Has a process drain, by the signal."""
        if not self.has_keeper(name):
            self.stopping[name].set()
        elif name in self.keepers.running:
            self.keepers.running[name].signal(signal.SIGTERM)

    def _assemble(self, node: Node, registry: Any) -> Any:
        """The router or worker of a node."""
        if not node.name.startswith("router"):
            return worker_of(worker_config(self.plan, node, self.group.folder), registry)
        return router_of(self.plan, node, registry, self.address_of(node.name), self._siblings_of(node))

    def _siblings_of(self, node: Node) -> SimulatedSiblings | None:
        names = [name for name in self.plan.fleet.siblings(node.name) if name != node.name]
        return SimulatedSiblings(self, names) if names else None

    async def _host(self, node: Node) -> None:
        try:
            async with self.registry.of(node) as registry, self._assemble(node, registry) as host:
                self.hosts[node.name] = host
                await self.stopping[node.name].wait()
        except Exception as error:
            self.crashed(node, error)
        finally:
            if self.nodes.get(node.name) is node:
                self.hosts.pop(node.name, None)

    def crashed(self, node: Node, error: Exception) -> None:
        """A process has ended by an exception."""
        text = "".join(traceback.format_exception(error))[-1500:]
        for each in self.invariants:
            each.crashed(node, error, text)

    def kill(self, name: str, *, silently: bool) -> None:
        """Ends a process at once; silently if its host is gone, with its keeper."""
        if silently and self.has_keeper(name):
            self.keepers.kill(name, silently=True)
        self.end_process(self.nodes[name], silently=silently)

    def end_process(self, node: Node, *, silently: bool = False, code: int = -signal.SIGKILL) -> None:
        """Ends a process at once, with an exit code for its keeper."""
        if not node.dead:
            node.kill()
            self.group.kill(node)
            self.network.kill(node, silently=silently)
            if self.nodes[node.name] is node:
                self.hosts.pop(node.name, None)
            self._dead.append(node)
            if self.keepers is not None:
                self.keepers.process_ended(node, code)
            if not silently:
                for each in self.invariants:
                    each.killed(node)

    # The run.

    def run(self) -> None:
        """Runs the plan to its end."""
        entropy.enter(self.plan.seed)
        self._install()
        try:
            driving = self.loop.create_task(self._drive())
            self.loop.call_later(_LONGEST_SECONDS, self._give_up, driving)
            self.loop.run_until_complete(driving)
        except asyncio.CancelledError:
            pass
        except Deadlock:
            self.problem("Deadlock", "nothing is ready, and no timer is set")
        finally:
            entropy.leave()
            self.group.close()
        for name, context in self.loop.errors:
            error = context.get("exception")
            text = "".join(traceback.format_exception(error))[-1200:] if error else ""
            self.problems.append(f"NoUnexplainedError: {name}: {context.get('message')}: {error!r} {text}")

    def _give_up(self, driving: "asyncio.Task[None]") -> None:
        names = [result.name for result in self.results if not result.ended]
        self.problem("EveryCallEnds", f"the run does not end in {_LONGEST_SECONDS:g} s: {', '.join(names[:5])}")
        driving.cancel()

    def _install(self) -> None:
        """Puts the world in the place of what the product reaches the real one by."""
        structlog.configure(processors=[self._log_record], cache_logger_on_first_use=False)
        baton_http2.server.server.open_sockets = self.network.bind  # type: ignore[assignment]
        router.openai.server.open_sockets = self.network.bind  # type: ignore[assignment]
        rpc.channels.connect = connect
        router.text.served_model.Tokenizer = tokenizer_of  # type: ignore[misc, assignment]
        services.control._DEFAULT_INTERVAL_SECONDS = _LOAD_SECONDS
        set_buffers(self.plan.fleet)
        transport.install()
        self.group.install()
        self.steps.install()
        if self.keepers is not None:
            self.keepers.install()
        asyncio.set_event_loop(self.loop)
        for each in self.invariants:
            each.install()

    async def _drive(self) -> None:
        for name in (*CLIENTS, *self.plan.fleet.workers, *self.plan.fleet.router_names):
            self.start(name)
        if not await self._until(self.is_ready, _READY_SECONDS):
            self.problem("Recovers", f"the fleet is not ready after {_READY_SECONDS:g} s: {self.unready()}")
            return
        await self._probe(_WARM_UP)
        await asyncio.sleep(1.0)
        for each in self.invariants:
            each.begin()
        looking = asyncio.ensure_future(self._look())
        exiting = asyncio.ensure_future(self._end_clients())
        await asyncio.gather(self._ask_all(0), self.chaos.run())
        exiting.cancel()
        await self.chaos.finish()
        await self._settle(0)
        if self.plan.rounds > 1:
            await self._repeat()
        if looking.done():
            looking.result()  # an invariant that has failed itself
        looking.cancel()
        for each in self.invariants:
            each.end()

    async def _repeat(self) -> None:
        """The same requests again, and more often as long as an invariant wants it."""
        number = 1
        await self._measure()
        while number < self.plan.rounds or any(each.wants_round(number) for each in self.invariants):
            self.is_quiet = False
            await self._ask_all(number * _ROUND)
            await self._settle(number)
            await self._measure()
            number += 1

    async def _measure(self) -> None:
        for each in self.invariants:
            await each.measure()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS * (_QUIET_LOOKS if self.is_quiet else 1))
            for each in self.invariants:
                each.look()

    async def _ask_all(self, first_index: int) -> None:
        began = Time.now
        running = []
        for index, asked in enumerate(self.plan.requests):
            await asyncio.sleep(max(0.0, began + asked.at - Time.now))
            running.append(self._ask(first_index + index, asked))
        if running:
            await asyncio.wait(running)

    def _ask(self, index: int, asked: Request) -> "asyncio.Future[None]":
        client = Client(self, index, asked)
        assert client.request_id not in self.steps.ids, "laws tell requests apart by their ids"
        self.results.append(client.result)
        for each in self.invariants:
            each.asked(client)
        self.running[client.request_id] = client
        client.node.spawn(self._run_client(client))
        return client.ended

    async def _run_client(self, client: Client) -> None:
        await client.run()
        self._end_client(client)

    def _end_client(self, client: Client) -> None:
        del self.running[client.request_id]
        client.ended.set_result(None)
        for each in self.invariants:
            each.ended(client.result)

    async def _end_clients(self) -> None:
        """Ends the processes of clients, as the plan says; their kernels reset all that they have open."""
        began = Time.now
        for at, number in self.plan.exits:
            await asyncio.sleep(max(0.0, began + at - Time.now))
            name = CLIENTS[number]
            node = self.nodes[name]
            self.log("exit", name)
            self.kill(name, silently=False)
            self.start(name)
            for client in [one for one in self.running.values() if one.node is node]:
                client.leave_all()
                self._end_client(client)

    async def _settle(self, number: int) -> None:
        """Waits until all is quiet, asks each router a few things more, and waits again."""
        self.log("quiet")
        self.network.heal()
        self.registry.is_away = False
        await self._until(self.is_ready, _QUIET_SECONDS)
        self.is_quiet = True
        quiet = _QUIET_SECONDS if self.plan.faults else _KEPT_SECONDS
        await asyncio.sleep(quiet + self.plan.fleet.lease_seconds)
        await self._probe(_PROBE + number * _NEXT_PROBE)
        await asyncio.sleep(1.0)

    def _tell_client(self, step: str, _node: str, request_id: str) -> None:
        client = self.running.get(request_id)
        if client is not None:
            client.step(step)

    async def _probe(self, first_index: int) -> None:
        """Asks each router a few things."""
        probes = [
            Request(0.0, 0, router, 20 + 16 * number, 3, PROBE_TOKENS, number, tenant="probe")
            for router in range(self.plan.fleet.routers)
            for number in range(PROBES)
        ]
        await asyncio.wait([self._ask(first_index + number, probe) for number, probe in enumerate(probes)])

    # Readiness.

    def is_ready(self) -> bool:
        """True if each router sees all workers ready, and all routers."""
        return not self.unready()

    def unready(self) -> Sequence[str]:
        """The part that is missing."""
        return missing(self)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        ends = Time.now + seconds
        while not condition():
            if Time.now >= ends:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True
