"""The seeds in which workers have keepers, and what happens to these."""

import random
from dataclasses import replace

from simulation.plan import LENGTHS, MOMENTS, Fault, Fleet, Plan

_KEEPING = 0.25  # of the seeds
_FAULTS = 0.6  # of the faults in them are of these kinds
# Of a keeper, and of a worker that has one.
KEEPER_KINDS = ("kill_keeper", "pause_keeper", "upgrade", "refuse", "reconfigure", "roll_out", "roll_out")
_LONGEST_PAUSE = 1.7  # seconds of a roll-out, between two workers
# Of a process that begins, and of one that takes over: what is aimed at these steps happens amid them.
_STEPS = ("start", "takeover")
_AMID = ("kill", "kill", "pause", "kill_keeper", "pause_keeper", "upgrade", "reconfigure")


def with_keepers(draw: random.Random, plan: Plan) -> Plan:
    """In some seeds workers have keepers, and more of the answers are kept. Drawn apart, as grammars are."""
    if draw.random() >= _KEEPING or plan.fleet.shares_memory:
        return plan
    fleet = replace(
        plan.fleet,
        keeps=True,
        ranks=1,
        stands_by=draw.random() < 0.3,
        hang_seconds=draw.choice((2.0, 10.0)),
        kept_slots=draw.choice((2, 64, 64)),
        kept_damage=draw.choice((0.0, 0.0, 0.3)),
    )
    share = draw.choice((0.0, 0.5, 0.9))
    requests = tuple(
        replace(asked, keep=draw.choice((2.0, 8.0)))
        if not (asked.api or asked.keep or asked.disturbs) and draw.random() < share
        else asked
        for asked in plan.requests
    )
    faults = [_kept_fault(draw, fleet, fault) for fault in plan.faults]
    if plan.profile == "storm":
        faults += [_kept_fault(draw, fleet, fault, 1.0) for fault in draw.sample(faults, min(3, len(faults)))]
        faults += [_amid(draw) for _ in range(draw.choice((0, 1, 3)))]
    faults = sorted(faults, key=lambda one: one.at)
    return replace(plan, fleet=fleet, requests=requests, faults=tuple(faults))


def _kept_fault(draw: random.Random, fleet: Fleet, fault: Fault, share: float = _FAULTS) -> Fault:
    """A fault of a process with a keeper, in the place of a share of all."""
    names = [name for name in fleet.workers if not name.startswith("encode")]
    if draw.random() >= share:
        return fault
    kind = draw.choice(("kill", "kill", "pause", *KEEPER_KINDS))
    seconds = draw.choice(LENGTHS)
    target = fault.target if fault.target in names or not fault.target else draw.choice(names)
    others: tuple[str, ...] = ()
    if kind == "roll_out":
        others, seconds = tuple(names), min(seconds, _LONGEST_PAUSE)
    if not target and kind not in ("kill", "pause"):  # what is aimed at a step hits the worker that does it
        target = draw.choice(names)
    return replace(fault, kind=kind, target=target, others=others, seconds=seconds)


def _amid(draw: random.Random) -> Fault:
    """A fault of a worker of which a process has just begun, or taken over what the one before has left."""
    step, count = draw.choice(_STEPS), draw.randint(1, 4)
    return Fault(draw.choice(MOMENTS), draw.choice(_AMID), "", (), draw.choice(LENGTHS), step, count)
