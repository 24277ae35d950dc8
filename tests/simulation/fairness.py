"""Fairness and quotas in the simulated world, beside their bars: `PYTHONPATH=tests:. python -m simulation.fairness`.

    light       the p99 of a light tenant's times to the first token, alone and beside twenty times as much: two routers
    shapes      two backlogged tenants, long prompts and long answers: the larger by the smaller work in every 10 s
    late        what a tenant that comes 300 s later gets, of the early one's work
    throughput  the work of `weighted` by that of `none`, of the same requests
    places      requests at several routers in one moment, before a worker with a few places
    quota       a quota of eight routers under a demand that moves between them, three times and 0.9 times as much
    killed      the same, while a router is killed every 20 s, each fourth time the lender of a quota
    paused      the same, while a router stands still every 20 s for six seconds, each fourth time the lender
    away        the same, while a router cannot be reached by one of the others, or by none; each fourth time the lender

The routers, the workers and their calls are the product's; time, network and registry are the world's. The exit code is
1 if a bar is missed.
"""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # isort: skip

import argparse
import asyncio
import gc
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpc import aio

from baton.connection.credentials import TENANT_KEY
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc
from benchmarks.fairness.loads import (
    Bars,
    Got,
    Load,
    Sent,
    check_late,
    check_light,
    check_shapes,
    check_throughput,
    requests_of,
    total,
)
from benchmarks.fairness.quotas import ROUTERS, Demand, Quota, Uses, check_quota
from router.config import AdmissionConfig, Fairness, ProbeConfig, QuotaConfig, QuotasConfig, RouterConfig
from router.server import host_router
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker
from simulation.channel import SimulatedChannel
from simulation.entropy import Time
from simulation.hashes import fix_hashes
from simulation.invariants.base import calls_of
from simulation.plan import CLIENTS, Fleet, Plan
from simulation.running import in_child
from simulation.world import World

_HOME_SECONDS = 3.0  # until a home lends more than it is told of
_TENANT = "acme"
QUOTA = Quota(tokens_per_second=4000.0, requests_per_second=80.0, burst_seconds=1.0, prompt=200)  # of each tenant
_LOADS = {"greedy": 3.0, "modest": 0.9}  # their demand, in quotas
_APART_SECONDS, _DOWN_SECONDS = 20.0, 6.0
_WARM_SECONDS = 10.0


@dataclass(frozen=True)
class Setting:
    """The fleet of a measurement. With a quota there is no limit of places."""

    routers: int = 2
    prefills: int = 6
    places: int = 16
    step_seconds: float = 0.096
    fairness: Fairness = "weighted"
    quota: Quota | None = None


class FairWorld(World):
    """A fleet without faults of a plan: what happens to it is the measurement's `body`."""

    def __init__(self, setting: Setting, body: "Body", seed: int = 1) -> None:
        fleet = Fleet(prefill=setting.prefills, decode=1, encode=0, routers=setting.routers)
        super().__init__(Plan(seed, "plain", fleet))
        self.invariants = []
        self.result: Any = None
        self.setting = setting
        self._body = body
        self._sent = 0

    async def _drive(self) -> None:
        for name in (*CLIENTS, *self.plan.fleet.workers, *self.plan.fleet.router_names):
            self.start(name)
        if not await self._until(self.is_ready, 60.0):
            raise TimeoutError(f"the fleet is not ready: {self.unready()}")
        await asyncio.sleep(_HOME_SECONDS)
        self.result = await self._body(self)

    def _assemble(self, node: Any, registry: Any) -> Any:
        return (self._router if node.name.startswith("router") else self._worker)(node, registry)

    def _router(self, node: Any, registry: Any) -> Any:
        setting, quotas = self.setting, QuotasConfig()
        if setting.quota is not None:
            wanted = setting.quota
            quota = QuotaConfig(
                tokens_per_second=wanted.tokens_per_second,
                requests_per_second=wanted.requests_per_second,
                burst_seconds=wanted.burst_seconds,
            )
            quotas = QuotasConfig(tenants=dict.fromkeys(_LOADS, quota))
        config = RouterConfig(
            router_id=node.name,
            listen=f"{node.ip}:7070",
            drain_seconds=1.0,
            probe=ProbeConfig(interval_seconds=2.0, timeout_seconds=2.0, hung_seconds=6.0),
            admission=AdmissionConfig(
                max_running_per_worker=0 if setting.quota else setting.places,
                max_waiting=100_000,
                fairness=setting.fairness,
                predict_deadlines=False,
            ),
            quotas=quotas,
            peers={"listen": f"{node.ip}:7071"},
        )
        return host_router(config, registry)

    def _worker(self, node: Any, registry: Any) -> Any:
        setting = self.setting
        engine = SimulatedConfig(
            name="demo",
            num_blocks=65_536,
            block_bytes=64,
            max_batch=256,
            decode_step_seconds=0.0 if setting.quota else setting.step_seconds,
            prefill_tokens_per_second=0.0 if setting.quota else 40_000.0,
        )
        config = WorkerConfig(
            worker_id=node.name,
            roles=(node.name.partition("-")[0],),  # type: ignore[arg-type]
            listen=f"{node.ip}:7070",
            engine=engine,
            transports=("remote",),
            drain_seconds=1.0,
        )
        return host_worker(config, registry)

    # Clients.

    def ask(self, router: str, tenant: str, sent: Sent, tell: "Tell", grouped: int = 8) -> "asyncio.Task[str]":
        """One request of a tenant. `tell` gets the number of tokens of each message; the task's result is the code."""
        self._sent += 1
        message = pb.GenerateRequest(prompt=f"{self._sent:08d}".ljust(sent.prompt, "x")[: sent.prompt])
        message.stopping.max_tokens = sent.answer
        message.sampling.temperature = 0
        message.response.min_tokens_per_message = grouped
        return self.nodes[CLIENTS[0]].spawn(self._ask(router, tenant, message, tell))

    async def _ask(self, router: str, tenant: str, message: pb.GenerateRequest, tell: "Tell") -> str:
        channel = SimulatedChannel(f"{self.ip_of(router)}:7070")
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        try:
            async for event in stub.Generate(message, timeout=3000.0, metadata=((TENANT_KEY, tenant),)):
                tell(len(event.token.token_ids))
        except aio.AioRpcError as error:
            return error.code().name
        finally:
            await channel.close()
        return "OK"

    async def send(self, loads: Mapping[str, Load], seconds: float) -> dict[str, Got]:
        """Returns the service of each tenant. Requests that still wait at the end are left."""
        got, began = {name: Got() for name in loads}, Time.now
        await asyncio.gather(*(self._send_all(name, load, got[name], seconds) for name, load in loads.items()))
        await asyncio.sleep(began + seconds - Time.now)
        return got

    async def _send_all(self, tenant: str, load: Load, got: Got, seconds: float) -> None:
        began, routers = Time.now, self.plan.fleet.router_names
        for sent in requests_of(load, f"{tenant} {self.plan.seed}"):
            if sent.at >= seconds:
                return
            await asyncio.sleep(max(0.0, began + sent.at - Time.now))
            self.ask(
                self.random.choice(routers), tenant, sent, partial(_note, got, sent, began, [Time.now]), load.grouped
            )


def _note(got: Got, sent: Sent, began: float, since: list[float], tokens: int) -> None:
    """Counts a message of an answer; `since` is emptied by the first token."""
    is_first = bool(tokens and since)
    got.count(Time.now - began, tokens, sent.prompt if is_first else 0)
    if is_first:
        got.first_tokens.append(Time.now - since.pop())


Tell = Callable[[int], None]
Body = Callable[[FairWorld], Awaitable[Any]]


def in_world(setting: Setting, body: Body, seed: int = 1) -> Any:
    """The result of `body` in a world of its own, which is a process of its own."""

    def work() -> Any:
        gc.enable()
        world = FairWorld(setting, body, seed)
        world.run()
        if world.problems:
            raise RuntimeError("; ".join(world.problems))
        return world.result

    return in_child(work)


# Tenants.


def measure_light(bars: Bars, options: argparse.Namespace) -> None:
    light, flood, seconds = Load(1.0, answer=10), Load(20.0, answer=10), options.seconds or 1100.0
    setting = Setting(step_seconds=options.step_seconds)
    alone, beside = (
        in_world(setting, partial(FairWorld.send, loads=loads, seconds=seconds), options.seed)
        for loads in ({"light": light}, {"light": light, "flood": flood})
    )
    every = seconds / sum(len(got.first_tokens) for got in beside.values())
    # Of waits for a place that gets free at random times, one in a hundred is longer than ln(100) times the mean.
    derived = 1 + math.log(100) * every / alone["light"].quantile(0.99)
    print(f"a place got free every {every:.3f} s: derived, at most {derived:.2f} times the p99 alone")
    check_light(bars, alone["light"], beside["light"], "weighted")


def measure_shapes(bars: Bars, options: argparse.Namespace) -> None:
    tenants, seconds = {"long": Load(4.0, 3000, 8), "chat": Load(24.0, 200, 40)}, options.seconds or 120.0
    got = in_world(Setting(step_seconds=0.024), partial(FairWorld.send, loads=tenants, seconds=seconds + 15))
    check_shapes(bars, got["long"], got["chat"], 15, 15 + int(seconds), "weighted", has_bar=True)


def measure_late(bars: Bars, options: argparse.Namespace) -> None:
    begins = options.seconds or 300.0
    tenants = {"early": Load(8.5, answer=10), "late": Load(8.5, answer=10, begins=begins)}
    got = in_world(Setting(places=8), partial(FairWorld.send, loads=tenants, seconds=begins + 41))
    check_late(bars, got["early"], got["late"], begins, "weighted", has_bar=True)


def measure_throughput(bars: Bars, options: argparse.Namespace) -> None:
    seconds, tenants = options.seconds or 60.0, {"one": Load(12.0, answer=10), "other": Load(6.0, answer=10)}
    works = []
    for fairness in ("none", "weighted"):
        setting = Setting(fairness=fairness)  # type: ignore[arg-type]
        got = in_world(setting, partial(FairWorld.send, loads=tenants, seconds=seconds + 10))
        works.append((fairness, total(got.values(), 10, 10 + int(seconds))))
    check_throughput(bars, works)


# Places.


async def _at_once(world: FairWorld) -> tuple[int, float, list[str]]:
    """The most decodes that ran at once, the part of the places in use while many waited, and the ends."""
    names, places = world.plan.fleet.router_names, world.setting.places
    tasks = [world.ask(names[number % len(names)], _TENANT, Sent(0.0, 50, 8), lambda _: None) for number in range(200)]
    most, used = 0, list[float]()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.002)
        running = sum(kind == "decode" for kind, _ in calls_of(world.hosts["decode-0"])._calls)
        queues = [queue for name in names for queue in world.hosts[name].path.admission.queues]
        admitted = sum(queue.running for queue in queues)
        most = max(most, running, admitted)
        if sum(queue.waiting for queue in queues) >= 2 * places:
            used.append(admitted / places)
    return most, sum(used) / len(used), [task.result() for task in tasks]


def measure_places(bars: Bars, options: argparse.Namespace) -> None:
    for routers in (2, 8):
        setting = Setting(routers=routers, prefills=2, places=8, step_seconds=0.05)
        most, used, codes = in_world(setting, _at_once, options.seed)
        name = f"{routers} routers, 200 requests in one moment"
        print(f"{name}: {codes.count('OK')} answers; {used:.3f} of the places were in use while many waited")
        bars.check(f"{name}: requests at a worker of 8 places", most, most=8)


# Quotas.


async def _demands(world: FairWorld, seconds: float, what: str) -> dict[str, Uses]:
    uses, down = {tenant: Uses() for tenant in _LOADS}, set[str]()
    disturbing = asyncio.ensure_future(_disturb(world, what, down))
    await asyncio.gather(*(_demand(world, tenant, seconds, down, uses[tenant]) for tenant in _LOADS))
    disturbing.cancel()
    await asyncio.sleep(2.0)
    return uses


async def _demand(world: FairWorld, tenant: str, seconds: float, down: set[str], uses: Uses) -> None:
    began = due = Time.now
    demand, names = Demand(QUOTA, _LOADS[tenant], world.plan.seed), world.plan.fleet.router_names
    while due < began + _WARM_SECONDS + seconds:
        due += demand.spacing
        await asyncio.sleep(max(0.0, due - Time.now))
        name = demand.choose(Time.now - began, [one for one in names if one not in down])
        world.nodes[CLIENTS[0]].spawn(_use(world, name, tenant, uses, began))


async def _use(world: FairWorld, router: str, tenant: str, uses: Uses, began: float) -> None:
    sent, answered = Time.now, list[float]()
    code = await world.ask(router, tenant, Sent(0.0, QUOTA.prompt, 1), lambda _: answered.append(Time.now))
    if answered:
        uses.passed.append((sent - began, answered[0] - began))
    elif code == "RESOURCE_EXHAUSTED":
        uses.refused += 1
    else:
        uses.failed += 1


def _lender(world: FairWorld, tenant: str) -> str | None:
    """The router that lends a tenant's quota now."""
    peers = {name: world.hosts[name].path.peers for name in world.plan.fleet.router_names}
    return next((name for name, one in peers.items() if one.lends_since(tenant) is not None), None)


async def _disturb(world: FairWorld, what: str, down: set[str]) -> None:
    """Kills a router after another, each fourth time the lender, or stops them, or cuts them off from one or from all.

    Requests go to those that run. A router that stood still has its clients' requests at once when it goes on.
    """
    names = world.plan.fleet.router_names
    await asyncio.sleep(_WARM_SECONDS)
    number = 0
    while what:
        await asyncio.sleep(_APART_SECONDS - _DOWN_SECONDS)
        name = names[number % len(names)] if number % 4 != 1 else _lender(world, "modest") or names[0]
        others = [one for one in names if one != name]
        if what == "killed":
            down.add(name)
            world.kill(name, silently=False)
            await asyncio.sleep(_DOWN_SECONDS)
            world.start(name)
            await world._until(world.is_ready, 30.0)
            down.discard(name)
        elif what == "paused":
            down.add(name)
            world.nodes[name].paused = True
            await asyncio.sleep(_DOWN_SECONDS - 0.5)
            down.discard(name)
            await asyncio.sleep(0.5)
            world.nodes[name].resume()
        else:
            cut = tuple(others) if number % 2 else tuple(others[:1])
            world.network.partition((name,), cut)
            await asyncio.sleep(_DOWN_SECONDS)
            world.network.cut.difference_update({(name, one) for one in cut} | {(one, name) for one in cut})
        number += 1


def measure_quota(bars: Bars, options: argparse.Namespace, what: str = "") -> None:
    seconds = options.seconds or 140.0
    setting = Setting(routers=ROUTERS, prefills=1, quota=QUOTA, fairness="none")
    uses = in_world(setting, partial(_demands, seconds=seconds, what=what), options.seed)
    for tenant, load in _LOADS.items():
        demand = (load, _WARM_SECONDS, _WARM_SECONDS + seconds)
        # The clients of a router that is cut off from all are refused.
        least = {"away": 0.8, "paused": 0.95}.get(what, 0.98)
        check_quota(bars, QUOTA, uses[tenant], demand, what or "moving demand", least)


MEASUREMENTS: dict[str, Callable[[Bars, argparse.Namespace], None]] = {
    "light": measure_light,
    "shapes": measure_shapes,
    "late": measure_late,
    "throughput": measure_throughput,
    "places": measure_places,
    "quota": measure_quota,
    "killed": partial(measure_quota, what="killed"),
    "paused": partial(measure_quota, what="paused"),
    "away": partial(measure_quota, what="away"),
}


def main() -> None:
    """The command."""
    fix_hashes("simulation.fairness")
    parser = argparse.ArgumentParser(
        prog="simulation.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], *MEASUREMENTS], metavar="NAME", help="all if none is given")
    parser.add_argument("--seconds", type=float, default=0.0, help="virtual ones; else as many as the bars need")
    parser.add_argument("--seed", type=int, default=1, help="of the world of `light`, of a quota or of places")
    parser.add_argument("--step-seconds", type=float, default=0.096, help="of a decode step of `light`")
    options, bars = parser.parse_args(), Bars()
    for name in options.what or MEASUREMENTS:
        MEASUREMENTS[name](bars, options)
    print(f"{entropy.cpu_seconds():.0f} s of CPU here; bars missed: {', '.join(bars.missed) or 'none'}")
    sys.exit(bool(bars.missed))


if __name__ == "__main__":
    main()
