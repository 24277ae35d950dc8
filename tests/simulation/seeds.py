"""The plan of a seed: fleet, requests, faults, and what clients do, drawn at random."""

import random
from dataclasses import replace
from typing import Any

from simulation.kept.plans import with_keepers
from simulation.plan import (
    APIS,
    CLIENTS,
    GUIDES,
    KINDS,
    LENGTHS,
    MOMENTS,
    NETWORK_KINDS,
    PROCESS_KINDS,
    REGISTRY_KINDS,
    TENANTS,
    Fault,
    Fleet,
    Plan,
    Request,
)

# What a fault or a client may be aimed at; steps.py.
WORKER_STEPS = ("prefill", "decode", "prefetch", "ended", "pull", "release", "token", "token", "token")
CLIENT_STEPS = ("encode", "prefill", "decode", "prefetch", "release", "token", "ended")
# Of one worker and its twin.
_KINDS_OF_ONE = (PROCESS_KINDS, tuple(kind for kind in NETWORK_KINDS if kind != "partition"), REGISTRY_KINDS)
LEASE_LENGTHS = (2.5, 3.1, 3.5, 4.5, 15.0)
BLINK_LENGTHS = (0.0, 0.0, 0.05, 0.5, 1.7)
_LENGTHS_OF = {"lost_lease": LEASE_LENGTHS, "blink": BLINK_LENGTHS}
_STEP_SECONDS = {"storm": (0.003, 0.01, 0.03, 0.06), "one_fault": (0.003, 0.01, 0.03, 0.03)}
_LONG = 400  # tokens of a request, of which a pool holds so many at a time
_SHARING = 0.1  # of the fleets have workers that share memory
_BUSY_SECONDS = 20.0  # that all requests take, if each answer is as long as may be
_FEW_PLACES = 4  # fewer are not held by slow readers: other requests would wait for them beyond their deadlines


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
    plan = Plan(seed, profile, fleet, requests, faults, every, longest, turn, rounds, exits)
    plan = with_keepers(random.Random(f"keepers-{profile}-{seed}"), plan)
    return replace(plan, requests=_by_handle(random.Random(f"handles-{profile}-{seed}"), plan))


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


def _by_handle(draw: random.Random, plan: Plan) -> tuple[Request, ...]:
    """In half of the seeds kept answers are cancelled by their handles, too, and in all with keepers. Drawn apart, as
    grammars are.
    """
    share = draw.choice((0.1, 0.3, 0.6) if plan.fleet.keeps else (0.0, 0.0, 0.1, 0.3))
    if plan.profile == "plain":
        return plan.requests
    found = []
    for asked in plan.requests:
        if asked.keep and share and (asked.step_act == "cancel" or asked.cancel_seconds >= 0):
            asked = replace(asked, by_handle=draw.random() < 0.7)
        elif asked.keep and not asked.disturbs and not asked.drops and draw.random() < share:
            # Who waits for an answer that stands still gives it up: its router may be between two workers then.
            step = "stall" if draw.random() < 0.5 else draw.choice(CLIENT_STEPS)
            count, delay = draw.choice((1, 1, 2)), draw.choice(MOMENTS)
            asked = replace(asked, step=step, step_count=count, step_delay=delay, step_act="cancel", by_handle=True)
        found.append(asked)
    return tuple(found)


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
