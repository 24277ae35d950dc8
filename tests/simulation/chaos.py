"""The faults of a world, as its plan says: of processes, hosts, connections, the registry and event loops."""

import asyncio
import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from simulation.entropy import Time
from simulation.plan import Fault
from simulation.registry import NAME

# A node that has drained is started again after this.
_DRAINED_SECONDS = 12.0
_PAUSED_SECONDS = 0.02
# Routers are held so many times as often as each worker: what competes for places meets in them.
_ROUTER_HOLDS = 3
# How often a fault of one connection hits the active one of its node.
_ACTIVE = 0.7


@dataclass
class Happened:
    """A fault in a run, from `began` until what it broke was there again."""

    fault: Fault
    began: float
    ended: float | None = None

    @property
    def names(self) -> set[str]:
        """The nodes that it touches."""
        return (
            {self.fault.target, *self.fault.others}
            if self.fault.kind in ("cut", "partition", "reset_all", "roll_out")
            else {self.fault.target}
        )

    def touches(self, names: "set[str] | None") -> bool:
        """True if it touches one of the nodes; if none are given, in any case."""
        return names is None or self.fault.kind in ("outage", "blink") or bool(self.names & names)


class Chaos:
    """Carries out the faults of a plan. `happened` has those that have begun."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._random = random.Random(f"chaos-{world.plan.seed}")
        self.happened: list[Happened] = []
        self._aimed = [fault for fault in world.plan.faults if fault.step]
        self._steps: Counter[str] = Counter()
        self._running: list[asyncio.Future[None]] = []
        self._is_on = False

    async def run(self) -> None:
        """Returns when all faults that are not aimed are over."""
        self._is_on = True
        self._holding = asyncio.ensure_future(self._hold_loops())
        began = Time.now
        for fault in self._world.plan.faults:
            if not fault.step:
                await asyncio.sleep(max(0.0, began + fault.at - Time.now))
                self._begin(fault)
        await self._wait()

    async def finish(self) -> None:
        """All requests have ended: no step comes any more. Returns when all faults are over."""
        self._is_on = False
        self._holding.cancel()
        await self._wait()

    def step(self, step: str, node: str, _request_id: str) -> None:
        """A step has happened."""
        if not self._aimed or not self._is_on:
            return
        self._steps[step] += 1
        for fault in [one for one in self._aimed if one.step == step and one.count == self._steps[step]]:
            self._aimed.remove(fault)
            if fault.target or node in self._world.nodes:
                # Of no node: it runs on whatever becomes of this one.
                hit = replace(fault, target=fault.target or node)
                self._world.loop.call_later(fault.at, self._begin, hit, context=Context())

    def _begin(self, fault: Fault) -> None:
        self._running.append(asyncio.ensure_future(self._carry_out(fault)))

    async def _wait(self) -> None:
        while any(not one.done() for one in self._running):
            await asyncio.wait(self._running)

    def disturbed(self, since: float, names: "set[str] | None" = None, after: float = 0.0) -> bool:
        """True if a fault, which touches one of the nodes if they are given, went on at `since` or later.

        `after` is how long one has effects after its end.
        """
        return any((one.ended is None or one.ended + after >= since) and one.touches(names) for one in self.happened)

    async def _carry_out(self, fault: Fault) -> None:
        happened = Happened(fault, Time.now)
        self.happened.append(happened)
        self._world.log("FAULT", fault.kind, fault.target, *fault.others, fault.seconds)
        if fault.target not in self._world.absent:
            await self._do(fault)
        happened.ended = Time.now

    async def _do(self, fault: Fault) -> None:
        world, network = self._world, self._world.network
        node = world.nodes[fault.target]
        match fault.kind:
            case "kill" | "vanish":
                # Of a router with other processes only one is lost: their host is there.
                is_gone = fault.kind == "vanish" and not self._has_siblings(fault.target)
                world.kill(fault.target, silently=is_gone)
                await asyncio.sleep(fault.seconds)
                # One that was to leave for good meanwhile is gone.
                if world.nodes[fault.target] is node and fault.target not in world.absent:
                    world.start(fault.target)
            case "kill_keeper":
                world.keepers.kill(fault.target, silently=False)
                await asyncio.sleep(fault.seconds)
                world.keepers.start_again(fault.target)
            case "pause_keeper":
                await world.keepers.pause(fault.target, fault.seconds)
            case "upgrade":
                world.keepers.upgrade(fault.target)
            case "refuse":
                world.keepers.refuse(fault.target)
            case "reconfigure":
                world.keepers.reconfigure(fault.target)
            case "roll_out":
                await world.keepers.roll_out(fault.seconds)
            case "pause":
                if not node.dead and not node.paused:
                    node.paused = True
                    await asyncio.sleep(fault.seconds)
                    node.resume()
            case "drain":
                await self._drain(fault)
            case "leave" if self._may_leave(fault.target):
                world.absent.add(fault.target)
                await self._drain(fault)
            case "reset" | "half" | "slow":
                await self._harm_one(fault)
            case "reset_all":
                for pair in network.between(node, world.nodes[fault.others[0]]):
                    pair.reset()
            case "cut" | "partition":
                await self._cut((fault.target,), fault.others, fault.seconds)
            case "lost_lease":
                await self._cut((fault.target,), (NAME,), fault.seconds)
            case "expire":
                world.registry.expire(fault.target)
            case "blink":
                await world.registry.blink(fault.seconds)
            case "outage":
                world.registry.is_away = True
                await asyncio.sleep(fault.seconds)
                world.registry.is_away = False

    async def _cut(self, names: tuple[str, ...], others: tuple[str, ...], seconds: float) -> None:
        network = self._world.network
        network.partition(names, others)
        await asyncio.sleep(seconds)
        network.cut.difference_update((one, other) for one in names for other in others)

    async def _drain(self, fault: Fault) -> None:
        world = self._world
        node = world.nodes[fault.target]
        while node.paused and not node.dead:  # noqa: ASYNC110  # nothing tells; it hears of a signal when it goes on
            await asyncio.sleep(_PAUSED_SECONDS)
        if not world.is_up(fault.target):
            return
        world.stop(fault.target)
        await asyncio.sleep(_DRAINED_SECONDS + world.plan.fleet.lease_seconds + fault.seconds)
        if world.nodes[fault.target] is not node:
            return
        for each in world.invariants:
            each.drained(node)
        world.kill(fault.target, silently=False)
        if fault.target not in world.absent:
            world.start(fault.target)

    def _has_siblings(self, name: str) -> bool:
        return name.startswith("router") and len(self._world.plan.fleet.siblings(name)) > 1

    def _may_leave(self, name: str) -> bool:
        """True of a worker for whose roles there are others: a fleet shrinks, and does not end."""
        role = name.partition("-")[0]
        others = [one.partition("-")[0] for one in self._world.workers if one != name]
        needed = ("prefill", "decode") if role == "mixed" else (role,)
        return role != "router" and all(one in others or ("mixed" in others and one != "encode") for one in needed)

    async def _harm_one(self, fault: Fault) -> None:
        network = self._world.network
        pairs = network.between(self._world.nodes[fault.target])
        if not pairs:
            return
        # Mostly the one that something was just sent on: the step that a fault is aimed at runs there.
        busiest = max(pairs, key=lambda pair: (pair.active_at, pair.number))
        pair = busiest if self._random.random() < _ACTIVE else self._random.choice(pairs)
        match fault.kind:
            case "reset":
                pair.reset()
            case "half":
                pair.freeze(one_way=self._random.random() < 0.5)
            case _:
                pair.slow(self._random.choice((500, 5000)))
                await asyncio.sleep(fault.seconds)
                pair.slow(0)

    async def _hold_loops(self) -> None:
        """Event loops that are held for a while, as by a collection or a long prompt: what came meanwhile comes at
        once, which is where cancellations and answers meet.
        """
        plan = self._world.plan
        if not plan.hiccup_every:
            return
        names = plan.fleet.workers + plan.fleet.router_names * _ROUTER_HOLDS
        while True:
            await asyncio.sleep(self._random.expovariate(1 / plan.hiccup_every))
            node = self._world.nodes[self._random.choice(names)]
            if not node.paused and not node.dead:
                node.paused = True
                self._world.loop.call_later(self._random.random() * plan.hiccup_seconds, self._release, node)

    def _release(self, node: Any) -> None:
        if not node.dead:
            node.resume()
