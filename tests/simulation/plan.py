"""The plan of one run: the fleet, its requests, and its faults, all drawn before it starts, so that it can be shrunk.

A plan is a file of JSON. The seed of a plan also orders the loop, the network and the product's own randomness.
"""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

PROFILES = ("plain", "clients", "one_fault", "storm")
# What a fault or a client may be aimed at; steps.py.
WORKER_STEPS = ("prefill", "decode", "prefetch", "ended", "pull", "release", "token", "token", "token")
CLIENT_STEPS = ("encode", "prefill", "decode", "prefetch", "release", "token")
# How long after a step: at once, before its answer is there, or a few messages later.
MOMENTS = (0.0, 2e-4, 1e-3, 5e-3, 3e-2)
PROCESS_KINDS = ("kill", "vanish", "pause", "drain", "leave")
NETWORK_KINDS = ("reset", "half", "slow", "cut", "partition", "reset_all")
REGISTRY_KINDS = ("outage", "lost_lease", "expire", "blink")
KINDS = (PROCESS_KINDS, NETWORK_KINDS, REGISTRY_KINDS)
# Of one worker and its twin.
_KINDS_OF_ONE = (PROCESS_KINDS, tuple(kind for kind in NETWORK_KINDS if kind != "partition"), REGISTRY_KINDS)
# Seconds of a fault: also just beyond the product's own times, until a worker is taken for hung, and until its record
# expires. A shorter one would lose no lease.
LENGTHS = (0.05, 0.5, 1.7, 3.3, 6.0, 15.0)
LEASE_LENGTHS = (2.5, 3.1, 3.5, 4.5, 15.0)
BLINK_LENGTHS = (0.0, 0.0, 0.05, 0.5, 1.7)
_LENGTHS_OF = {"lost_lease": LEASE_LENGTHS, "blink": BLINK_LENGTHS}
TENANTS = ("ann", "bob", "cy")
_STEP_SECONDS = {"storm": (0.003, 0.01, 0.03, 0.06), "one_fault": (0.003, 0.01, 0.03, 0.03)}
_LONG = 400  # tokens of a request, of which a pool holds so many at a time
_SHARING = 0.1  # of the fleets have workers that share memory
_BUSY_SECONDS = 20.0  # that all requests take, if each answer is as long as may be
_FEW_PLACES = 4  # fewer are not held by slow readers: other requests would wait for them beyond their deadlines
# OpenAI's completions and conversations; KServe's whole answers and streams.
HTTP_APIS, KSERVE_APIS = ("openai", "chat"), ("kserve", "kserve_stream")
APIS = HTTP_APIS + KSERVE_APIS
GUIDES = ("choice", "regex", "json")
CLIENTS = ("client-0", "client-1", "client-2", "client-3")


@dataclass(frozen=True)
class Fleet:
    """The processes of a run, and their configuration."""

    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    encode: int = 1
    routers: int = 2
    transport: str = "remote"
    blocks: int = 48
    lease_seconds: float = 4.0
    step_seconds: float = 0.01
    prefill_rate: int = 10000
    ranks: int = 1
    early_tokens: int = 0
    inline_bytes: int = 2**20
    policy: str = "automatic"
    max_running: int = 0
    has_quotas: bool = False
    multiplex: bool = True
    answer_seconds: float = 10.0
    keep_parked: int = 256
    concurrent: int = 8  # requests of a tenant, if there are quotas
    requests_per_second: float = 20.0
    waiting_tokens: int = 1024  # unread by a slow client before its decode has to wait
    unsent_bytes: int = 64 * 1024  # of a stream before who writes to it has to wait
    window_bytes: int = 2**20  # of a stream; a connection's is eight times as large
    encode_seconds: float = 0.01
    embeddings_bytes: int = 256 * 2**20
    # Numbers of a row of an embedding, of which an image has four: a request with one fits into a window.
    image_hidden_size: int = 8
    pause_tokens: int = 64  # unread by a router before its call is paused
    large_bytes: int = 256 * 1024  # of a request that does not share its stream
    max_batch: int = 256
    max_waiting: int = 1024  # requests that wait for a place
    registry: str = "memory"  # or etcd
    processes: int = 1  # of each router: so many of `routers` listen at the same address
    keeps: bool = False  # its workers have keepers: kept/engine.py
    stands_by: bool = False  # the next process of each stands by
    hang_seconds: float = 10.0  # until a keeper kills a worker that is silent
    kept_slots: int = 64  # of each worker's journal
    kept_damage: float = 0.0  # how often a death damages kept blocks, and the share of them
    shares_memory: bool = False  # its mixed workers do, and there is room for one at a time

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers."""
        counts = (("encode", self.encode), ("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return tuple(f"{role}-{number}" for role, count in counts for number in range(count))

    @cached_property
    def router_names(self) -> tuple[str, ...]:
        """The names of its routers."""
        return tuple(f"router-{number}" for number in range(self.routers))

    def siblings(self, name: str) -> tuple[str, ...]:
        """The processes of a router, this one included."""
        first = int(name.rpartition("-")[2]) // self.processes * self.processes
        return self.router_names[first : first + self.processes]


@dataclass(frozen=True)
class Request:
    """One request, and what its client does."""

    at: float
    client: int
    router: int
    length: int
    prefix: int
    tokens: int
    seed: int
    image: bool = False
    timeout: float = 30.0
    leave_after: int = -1  # tokens; the client cancels
    leave_seconds: float = -1.0
    cancel_seconds: float = -1.0  # CancelGeneration
    window: int = 0  # of a client that reads slowly, in bytes
    read_seconds: float = 0.05  # until such a client has read a message
    together: int = 0
    keep: float = 0.0  # seconds; the client resumes
    drops: tuple[float, ...] = ()  # when a client that resumes loses its connection
    step: str = ""  # at the `step_count`-th such step of its own, and a moment later, the client does `step_act`
    step_count: int = 1
    step_delay: float = 0.0
    step_act: str = "leave"  # or cancel, drop
    retries: int = 0  # how often a client sends it again that was told UNAVAILABLE
    tenant: str = ""
    api: str = ""  # or one of APIS
    answers: int = 1
    guided: str = ""  # or one of GUIDES: the answer follows that grammar

    @property
    def disturbs(self) -> bool:
        """True if its client does not wait for the end."""
        is_aimed = bool(self.step) and self.step_act != "drop"
        return is_aimed or self.timeout < 30 or max(self.leave_after, self.leave_seconds, self.cancel_seconds) >= 0


@dataclass(frozen=True)
class Fault:
    """A fault from `at` on, for some seconds. `others` are the other side of a cut.

    One with a `step` happens at the `count`-th such step, `at` seconds later, to the node that does it if it has no
    `target`.
    """

    at: float
    kind: str
    target: str
    others: tuple[str, ...] = ()
    seconds: float = 0.0
    step: str = ""
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    profile: str
    fleet: Fleet = Fleet()
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = ()
    hiccup_every: float = 0.0  # seconds between moments at which one event loop is held; 0 is never
    hiccup_seconds: float = 0.0
    turn_seconds: float = 20e-6  # what a turn of the event loop takes
    rounds: int = 1  # how often the requests are sent: tables are compared after each time
    exits: tuple[tuple[float, int], ...] = ()  # when the process of a client ends, with all its requests; and which
    notes: str = field(default="", compare=False)

    def to_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self), indent=1)


def read_plan(path: Path) -> Plan:
    """The plan of a file."""
    return from_values(json.loads(path.read_text(encoding="utf-8")))


def from_values(values: dict[str, Any]) -> Plan:
    """The plan that `asdict` has taken apart."""
    requests = tuple(Request(**{**one, "drops": tuple(one["drops"])}) for one in values.pop("requests"))
    faults = tuple(Fault(**{**one, "others": tuple(one["others"])}) for one in values.pop("faults"))
    exits = tuple((at, client) for at, client in values.pop("exits", ()))
    return Plan(fleet=Fleet(**values.pop("fleet")), requests=requests, faults=faults, exits=exits, **values)


def make_plan(seed: int, profile: str, count: int = 50) -> Plan:
    """The plan of a seed. Each seed has a few kinds of requests and faults only, and so reaches more states."""
    draw = random.Random(f"plan-{profile}-{seed}")
    fleet = _fleet(draw, profile)
    seconds = count * draw.choice((0.01, 0.03, 0.1, 0.2))
    requests = tuple(sorted(_requests(draw, fleet, profile, count, seconds), key=lambda one: one.at))
    requests = _guided(random.Random(f"guided-{profile}-{seed}"), requests)
    every, longest = 0.0, 0.0
    if profile != "plain" and draw.random() < 0.7:
        every, longest = draw.choice((0.008, 0.02, 0.1)), draw.choice((0.005, 0.03, 0.1))
    faults = _faults(draw, fleet, profile, count, seconds)
    rounds = 3 if profile in ("plain", "clients") and draw.random() < 0.3 else 1
    turn = draw.choice((20e-6, 100e-6, 400e-6))
    exits = _exits(draw, seconds) if profile != "plain" else ()
    from simulation.kept.plans import with_keepers  # which is of plans

    plan = Plan(seed, profile, fleet, requests, faults, every, longest, turn, rounds, exits)
    return with_keepers(random.Random(f"keepers-{profile}-{seed}"), plan)


def _exits(draw: random.Random, seconds: float) -> tuple[tuple[float, int], ...]:
    """In some seeds processes of clients end, each with all that it has asked for."""
    times = draw.choice((0, 0, 1, 3))
    return tuple(sorted((draw.random() * (seconds + 1.0), draw.randrange(len(CLIENTS))) for _ in range(times)))


def _fleet(draw: random.Random, profile: str) -> Fleet:
    fleet = _apart(draw, profile)
    if draw.random() >= _SHARING:
        return fleet
    # Such a worker runs whole requests. Few policies send any to one that sleeps while another is awake.
    policy = draw.choice(("round_robin", "random", "automatic"))
    return replace(fleet, prefill=0, decode=0, mixed=draw.choice((2, 3)), policy=policy, shares_memory=True)


def _apart(draw: random.Random, profile: str) -> Fleet:
    mixed = draw.choice((0, 0, 1, 2))
    single = profile == "one_fault"
    return Fleet(
        prefill=draw.choice((1, 2, 2, 3)) if not single else 2,
        decode=draw.choice((1, 2, 2, 3)) if not single else 2,
        mixed=mixed,
        encode=draw.choice((1, 1, 2)) if not single else 2,
        routers=draw.choice((1, 2, 2, 3)),
        transport=draw.choice(("remote", "mapped")),
        blocks=draw.choice((32, 48, 96, 200)),
        lease_seconds=draw.choice((1.5, 3.0, 6.0)),
        # Where something goes wrong, answers are still running then, and may last longer than a record in the registry.
        step_seconds=draw.choice(_STEP_SECONDS.get(profile, (0.0003, 0.003, 0.01, 0.03))),
        prefill_rate=draw.choice((2000, 10000)),
        ranks=draw.choice((1, 1, 1, 2)),
        early_tokens=draw.choice((0, 40)),
        inline_bytes=draw.choice((64, 64, 2**20)),
        policy=draw.choice(("automatic", "automatic", "predicted_seconds", "least_loaded", "round_robin", "random")),
        max_running=draw.choice((0, 0, 1, 2, 4)),
        has_quotas=draw.random() < 0.15,
        multiplex=draw.random() < 0.8,
        answer_seconds=draw.choice((1.0, 10.0)),
        keep_parked=draw.choice((2, 256)),
        concurrent=draw.choice((2, 8)),
        requests_per_second=draw.choice((2.0, 10.0, 20.0)),
        waiting_tokens=draw.choice((2, 2, 16, 1024)),
        unsent_bytes=draw.choice((64, 64, 1024, 64 * 1024)),
        window_bytes=draw.choice((2**13, 2**13, 2**20)),
        encode_seconds=draw.choice((0.01, 0.1)),
        embeddings_bytes=draw.choice((0, 256 * 2**20, 256 * 2**20)),
        image_hidden_size=draw.choice((8, 8, 384)),
        pause_tokens=draw.choice((3, 10, 64)),
        large_bytes=draw.choice((512, 256 * 1024, 256 * 1024)),
        max_batch=draw.choice((2, 256, 256)),
        max_waiting=draw.choice((3, 1024, 1024)),
        registry=draw.choice(("memory", "etcd")),
        processes=draw.choice((1, 1, 1, 2, 3)),
    )


def _requests(draw: random.Random, fleet: Fleet, profile: str, count: int, seconds: float) -> list[Request]:
    lengths = draw.choice(((5, 20, 40, 90), (5, 17, 33, 64, 150, 300), (16, 32, 48, 64), (120, 200, 300)))
    # Where workers fail, answers that are long enough to go on elsewhere.
    short = (1, 2, 3) if profile in ("plain", "clients") else (60, 120)
    answers = draw.choice(((1, 2, 5, 16, 40), (20, 40, 80), (2, 250), short))
    kept, rude = draw.choice((0.0, 0.3, 0.6)), draw.choice((0.3, 0.3, 0.8))
    images = draw.choice((0.05, 0.1, 0.6, 0.6))
    slow = draw.choice((0.0, 0.3))  # clients that read slowly, whatever else they do
    others = draw.choice((0.0, 0.0, 0.3))  # by the other APIs
    prefixes = draw.choice((1, 3, 8, 40))
    # In some seeds they come in bursts, and compete for the same blocks and places.
    bursts = draw.choice((0, 0, 3, 6))
    at_steps = draw.choice((0.0, 0.5, 0.9))
    several = draw.choice((0.0, 0.0, 0.3))  # that ask for several answers
    most = min(fleet.blocks * 16 - 100, 300)
    longest = _longest_answer(fleet, count)
    found = []
    for _ in range(count):
        values: dict[str, Any] = {
            "at": (draw.randrange(bursts) + draw.random() * 0.02) / bursts * seconds
            if bursts
            else draw.random() * seconds,
            "client": draw.randrange(len(CLIENTS)),
            "router": draw.randrange(fleet.routers),
            "length": min(most, draw.choice(lengths)),
            "prefix": draw.randrange(prefixes),
            "tokens": draw.choice(answers),
            "seed": draw.randrange(3),
            "image": draw.random() < images,
            "together": draw.choice((0, 0, 0, 4, 16)),
            "tenant": draw.choice(TENANTS) if fleet.has_quotas else "",
        }
        # A worker's pool holds all of one request.
        values["tokens"] = min(values["tokens"], fleet.blocks * 16 - values["length"] - 20, longest)
        if draw.random() < several:
            values["answers"] = draw.choice((2, 3))
            values["tokens"] = max(1, values["tokens"] // 2)
        elif draw.random() < others and not values["image"] and not values["tenant"]:
            values["api"] = draw.choice(APIS)
        if "api" not in values and draw.random() < kept:
            values["keep"] = draw.choice((2.0, 8.0))
        if profile != "plain":
            values |= _manners(draw, values["tokens"], rude, at_steps, is_kept="keep" in values)
            if draw.random() < slow and _places(fleet) >= _FEW_PLACES:
                values |= _slow(draw)
        found.append(Request(**values))
    return found


def _guided(draw: random.Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """In some seeds a part of the answers follow grammars. Drawn apart, so that all else of a seed stays as it is."""
    share = draw.choice((0.0, 0.0, 0.3, 0.7))
    is_guided = [not asked.api and draw.random() < share for asked in requests]
    return tuple(
        replace(asked, guided=draw.choice(GUIDES)) if guided else asked
        for asked, guided in zip(requests, is_guided, strict=True)
    )


def _longest_answer(fleet: Fleet, count: int) -> int:
    """The tokens of answers of which so many at once end in time: most of a deadline is not for waiting."""
    return max(5, int(_BUSY_SECONDS * _places(fleet) / (count * fleet.step_seconds)))


def _places(fleet: Fleet) -> int:
    """The number of answers that are generated at once."""
    of_one = min(fleet.max_running or 100, fleet.max_batch, max(1, fleet.blocks * 16 // _LONG))
    return (1 if fleet.shares_memory else fleet.decode + fleet.mixed) * of_one


def _manners(draw: random.Random, tokens: int, rude: float, at_steps: float, *, is_kept: bool) -> dict[str, Any]:
    """An act of a client that does not just wait."""
    if draw.random() > rude:
        return {"retries": draw.choice((0, 0, 2))}
    if draw.random() < at_steps:
        step = draw.choice(CLIENT_STEPS)
        return {
            "step": step,
            "step_count": draw.randint(1, max(1, tokens)) if step == "token" else draw.choice((1, 1, 2)),
            "step_delay": draw.choice(MOMENTS),
            "step_act": draw.choice(("leave", "cancel", "drop", "drop") if is_kept else ("leave", "cancel")),
        }
    if is_kept and draw.random() < 0.7:
        seconds = draw.choice((0.1, 0.3, 0.8))
        return {"drops": tuple(sorted(draw.random() * seconds for _ in range(draw.choice((1, 1, 3)))))}
    match draw.randrange(5):
        case 0:
            return {"leave_after": draw.choice((0, 1, 1, draw.randrange(0, tokens + 1)))}
        case 1:
            return {"leave_seconds": draw.random() ** 3 * 0.5}
        case 2:
            return {"cancel_seconds": draw.random() ** 3 * 0.5}
        case 3:
            return {"timeout": draw.choice((0.02, 0.1, 0.3, 1.0))}
    return _slow(draw)


def _slow(draw: random.Random) -> dict[str, Any]:
    """A client that reads slowly, also more slowly than its answer is computed."""
    return {"window": draw.choice((250, 600)), "read_seconds": draw.choice((0.05, 0.25))}


def _faults(draw: random.Random, fleet: Fleet, profile: str, count: int, seconds: float) -> tuple[Fault, ...]:
    if profile == "one_fault":
        kind = _kind(draw, _KINDS_OF_ONE)
        if draw.random() < 0.7:
            return (_aimed(draw, fleet, kind, draw.choice(("", "", "", *fleet.router_names)), count),)
        workers = [name for name in fleet.workers if not name.startswith("encode")]
        target = draw.choice(workers if draw.random() < 0.5 else fleet.router_names)
        return (_fault(draw, fleet, kind, target, draw.random() * seconds),)
    if profile != "storm":
        return ()
    kinds = [_kind(draw, KINDS) for _ in range(draw.randint(1, 4))]
    found, aimed, missed = list[Fault](), draw.choice((0.0, 0.5, 1.0)), draw.choice((0.0, 0.0, 0.5))
    for _ in range(draw.randint(2, max(3, count // 5))):
        target, kind = draw.choice(fleet.workers * 3 + fleet.router_names), draw.choice(kinds)
        if draw.random() < aimed:
            found.append(_aimed(draw, fleet, kind, target if target in fleet.router_names else "", count))
        else:
            found.append(_fault(draw, fleet, kind, target, draw.random() * seconds))
        if draw.random() < missed:
            found.append(_missed(draw, fleet, found[-1]))
    return tuple(sorted(found, key=lambda one: one.at))


def _kind(draw: random.Random, groups: tuple[tuple[str, ...], ...]) -> str:
    """A kind of fault: those of processes, of the network and of the registry are as frequent."""
    return draw.choice(draw.choice(groups))


def _missed(draw: random.Random, fleet: Fleet, fault: Fault) -> Fault:
    """A router that stands still, or is cut off from the registry, while this happens: it learns of all at once."""
    kind, seconds = draw.choice(("pause", "lost_lease")), draw.choice((1.7, 3.3, 6.0))
    return replace(fault, kind=kind, target=draw.choice(fleet.router_names), others=(), seconds=seconds)


def _fault(draw: random.Random, fleet: Fleet, kind: str, target: str, at: float) -> Fault:
    seconds = draw.choice(_LENGTHS_OF.get(kind, LENGTHS))
    everyone = [name for name in fleet.workers + fleet.router_names if name != target]
    others = draw.sample(everyone, draw.randint(1, len(everyone))) if kind == "partition" else [draw.choice(everyone)]
    return Fault(at, kind, target, tuple(sorted(others)), seconds)


def _aimed(draw: random.Random, fleet: Fleet, kind: str, target: str, count: int) -> Fault:
    """A fault at a step of some request."""
    step = draw.choice(WORKER_STEPS)
    fault = _fault(draw, fleet, kind, target, draw.choice(MOMENTS))
    return replace(fault, step=step, count=draw.randint(1, count * 10 if step == "token" else count))
