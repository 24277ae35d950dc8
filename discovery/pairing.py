"""Which workers can hand KV over to one another: those of one model with equal layouts and a transport in common."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.errors import LayoutMismatch
from discovery.record import CHECKS_HANDOFFS, DIGESTS_HANDOFFS, Domain, WorkerRecord, is_within

WHOLE_REQUESTS = "whole_requests"  # the capability of a worker that is not meant to hand over

# Beside LayoutMismatch.reason, why workers are unpaired.
NO_COMMON_TRANSPORT = "NO_COMMON_TRANSPORT"
TOO_FAR_APART = "TOO_FAR_APART"
NOT_CHECKABLE = "NOT_CHECKABLE"

_OPPOSITE = {"prefill": "decode", "decode": "prefill"}
_NAMED = 3  # workers that a message names


@dataclass(frozen=True, slots=True)
class Unpaired:
    """The reason that a worker fits no other for a handoff: `reason` for programs, `problem` for people."""

    reason: str
    problem: str


def can_hand_over(prefill: WorkerRecord, decode: WorkerRecord, within: Domain | None = None) -> bool:
    """True if a prefill worker can hand over to a decode worker of its model.

    They are other processes, have the same KV layout, the one offers a transport that the other reads, and digests
    what it holds if the other checks it. If handoffs stay `within` a zone, rack or host, both are known to be in the
    same one.
    """
    return (
        prefill.layout_digest == decode.layout_digest
        and (prefill.worker_id, prefill.epoch) != (decode.worker_id, decode.epoch)
        and share_transport(prefill.offers, decode.reads)
        and is_checkable(prefill, decode)
        and (within is None or is_within(within, prefill.known_location, decode.known_location))
    )


def outside(record: WorkerRecord, within: Domain, other: WorkerRecord) -> str:
    """The reason to leave out a worker outside the zone, rack or host of another one; empty if it is inside."""
    if is_within(within, record.known_location, other.known_location):
        return ""
    here, there = record.known_location.in_words, other.known_location.in_words
    return f"is at {here}, not in the {within} of {other.worker_id} ({there}), which handoffs must not leave"


def share_transport(offers: Sequence[str] | None, reads: Sequence[str] | None) -> bool:
    """True if a worker that reads these transports can read from one that offers those. Unknown ones may fit."""
    return offers is None or reads is None or bool(set(offers) & set(reads))


def is_checkable(owner: WorkerRecord, reader: WorkerRecord) -> bool:
    """True unless the reader would check a handoff that the owner, of an earlier version, cannot digest."""
    return CHECKS_HANDOFFS not in reader.capabilities or DIGESTS_HANDOFFS in owner.capabilities


def transport_names(names: Sequence[str] | None) -> str:
    """Transports as messages name them."""
    return ", ".join(names or ()) or "none"


def layout_name(record: WorkerRecord) -> str:
    """A worker's KV layout as messages name it: the start of its digest, and the layout in words."""
    return f"{record.layout_digest[:12]} {record.layout}".strip()


def layout_mismatch(records: Iterable[WorkerRecord], model: str) -> str:
    """The reason that no prefill worker of a model can ever hand over to a decode worker: both layouts, in words.

    Empty if two processes have equal layouts, ready or not, and if there are no two processes of these roles.
    """
    serving = [record for record in records if record.model == model and not record.draining]
    prefills, decodes = ([record for record in serving if role in record.roles] for role in ("prefill", "decode"))
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for record in prefills:
        owners[record.layout_digest].add(record.process)
    has_pair = any(owners[record.layout_digest] - {record.process} for record in decodes)
    if has_pair or not prefills or not decodes or len({record.process for record in (*prefills, *decodes)}) < 2:
        return ""
    named = _list(prefills, _has_layout), _list(decodes, _has_layout)
    return f"no prefill and decode worker of {model} have equal KV layouts: prefill {named[0]}; decode {named[1]}"


def unpaired(records: Iterable[WorkerRecord], within: Domain | None = None) -> dict[str, Unpaired]:
    """The reason that a worker can hand over to none, or from none, that it should: by `WorkerRecord.process`.

    A worker is there only if others have the opposite role for its model, and it can hand over to none of these, or
    from none. Draining workers are left out, and those that are for whole requests.
    """
    by_role: defaultdict[tuple[str, str], list[WorkerRecord]] = defaultdict(list)
    near: defaultdict[tuple[str, str, object], list[WorkerRecord]] = defaultdict(list)
    handing_over = [record for record in records if _hands_over(record)]
    for record in handing_over:
        for role in record.roles:
            by_role[record.model, role].append(record)
            near[record.model, role, _domain(record, within)].append(record)
    examples = {key: _examples(of_role) for key, of_role in near.items()}
    found: dict[str, Unpaired] = {}
    for record in handing_over:
        for role in sorted(set(record.roles) & _OPPOSITE.keys()):
            key = record.model, _OPPOSITE[role]
            fitting = examples.get((*key, _domain(record, within)), ())
            if _fits_one(record, role, fitting, within):
                continue
            if problem := _problem(record, role, by_role[key], within):
                found.setdefault(record.process, problem)
    return found


def partly_unpaired(records: Iterable[WorkerRecord], within: Domain | None = None) -> dict[str, list[str]]:
    """The pairs that cannot be, in words, of workers that `unpaired` leaves out: by `WorkerRecord.process`.

    Also those that prefill where none decodes. It compares kinds of workers, of which a fleet has few unless handoffs
    stay within hosts.
    """
    handing_over = [record for record in records if _hands_over(record)]
    whole = unpaired(handing_over, within)
    kinds: defaultdict[tuple[str, str], dict[object, list[WorkerRecord]]] = defaultdict(dict)
    for record in handing_over:
        for role in record.roles:
            kinds[record.model, role].setdefault(_kind(record, within), []).append(record)
    said: dict[object, str] = {}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for record in handing_over:
        for role in sorted(set(record.roles) & _OPPOSITE.keys()):
            opposite = kinds.get((record.model, _OPPOSITE[role]), {})
            if not opposite and role == "prefill":
                found[record.process].append(f"no worker of {record.model} has the role {_OPPOSITE[role]}")
            if record.process in whole:
                continue
            # Its own kind may include the worker itself, which it does not hand over to.
            key = record.model, role, _kind(record, within), record.process if len(record.roles) > 1 else ""
            if key not in said:
                said[key] = _unfit(record, role, opposite.values(), within)
            if said[key]:
                found[record.process].append(said[key])
    return dict(found)


def _kind(record: WorkerRecord, within: Domain | None) -> tuple[object, ...]:
    """The facts that decide which workers a worker can be paired with."""
    return (*_likeness(record), _domain(record, within))


def _likeness(record: WorkerRecord) -> tuple[object, ...]:
    checking = [name in record.capabilities for name in (CHECKS_HANDOFFS, DIGESTS_HANDOFFS)]
    return record.layout_digest, record.offers, record.reads, *checking


def _unfit(record: WorkerRecord, role: str, opposite: Iterable[Sequence[WorkerRecord]], within: Domain | None) -> str:
    """The workers of the other role that it cannot be paired with; empty if there is none. `opposite` is by kind."""
    unfit: list[WorkerRecord] = []
    for of_kind in opposite:
        others = [other for other in of_kind[:2] if other.process != record.process]
        if others and not _fits_one(record, role, others, within):
            unfit += [other for other in of_kind if other.process != record.process]
    if not unfit:
        return ""
    cannot = "cannot hand over to" if role == "prefill" else "cannot be handed over to by"
    return f"{cannot} {_list(unfit, lambda other: f'({_cause(record, role, other, within)})')}"


def _cause(record: WorkerRecord, role: str, other: WorkerRecord, within: Domain | None) -> str:
    """The reason that two workers are no pair."""
    if record.layout_digest != other.layout_digest:
        return f"KV layout {layout_name(other)}; its own is {layout_name(record)}"
    if within is not None and not is_within(within, record.known_location, other.known_location):
        return f"at {other.known_location.in_words}; handoffs stay within the {within}"
    owner, reader = _pair(record, role, other)
    if share_transport(owner.offers, reader.reads):
        return _not_checkable(owner, reader)
    return f"offers {transport_names(other.offers)} and reads {transport_names(other.reads)}"


def _hands_over(record: WorkerRecord) -> bool:
    is_meant_to = set(record.roles) & _OPPOSITE.keys() and WHOLE_REQUESTS not in record.capabilities
    return bool(is_meant_to and not record.draining)


def _examples(records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Two of those that are alike for a handoff: in large fleets most are. One would not do, as none fits itself."""
    alike: defaultdict[object, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        alike[_likeness(record)].append(record)
    return [record for of_kind in alike.values() for record in of_kind[:2]]


def _domain(record: WorkerRecord, within: Domain | None) -> tuple[str, ...]:
    return record.known_location.key(within) if within else ()


def _fits_one(record: WorkerRecord, role: str, opposite: Iterable[WorkerRecord], within: Domain | None) -> bool:
    if role == "prefill":
        return any(can_hand_over(record, other, within) for other in opposite)
    return any(can_hand_over(other, record, within) for other in opposite)


def _pair(record: WorkerRecord, role: str, other: WorkerRecord) -> tuple[WorkerRecord, WorkerRecord]:
    """The owner and the reader of handoffs between them."""
    return (record, other) if role == "prefill" else (other, record)


def _not_checkable(owner: WorkerRecord, reader: WorkerRecord) -> str:
    checks = f"{reader.worker_id} checks handoffs (handoff.verify)"
    return f"{checks}, and {owner.worker_id}, of an earlier version, cannot digest what it holds"


def _problem(
    record: WorkerRecord, role: str, opposite: Sequence[WorkerRecord], within: Domain | None
) -> Unpaired | None:
    """The reason that a worker fits none of the opposite role; None if there is no other."""
    own = record.worker_id, record.epoch
    others = [other for other in opposite if (other.worker_id, other.epoch) != own]
    if not others:
        return None
    alike = [other for other in others if other.layout_digest == record.layout_digest]
    if not alike:
        layouts = _list(others, _has_layout)
        fits_none = f"its KV layout, {layout_name(record)}, fits no {_OPPOSITE[role]} worker: {layouts}"
        return Unpaired(LayoutMismatch.reason, fits_none)
    near = [
        other for other in alike if within is None or is_within(within, record.known_location, other.known_location)
    ]
    if not near:
        places = _list(alike, lambda other: f"is at {other.known_location.in_words}")
        apart = f"no {_OPPOSITE[role]} worker is in its {within}, which handoffs must not leave"
        return Unpaired(TOO_FAR_APART, f"{apart}: it is at {record.known_location.in_words}; {places}")
    alike = near
    pairs = [_pair(record, role, other) for other in alike]
    unchecked = [_not_checkable(*pair) for pair in pairs if share_transport(pair[0].offers, pair[1].reads)]
    if unchecked:
        return Unpaired(NOT_CHECKABLE, unchecked[0])
    if role == "prefill":
        transports = f"it offers {transport_names(record.offers)}; "
        transports += _list(alike, lambda other: f"reads {transport_names(other.reads)}")
    else:
        transports = f"it reads {transport_names(record.reads)}; "
        transports += _list(alike, lambda other: f"offers {transport_names(other.offers)}")
    return Unpaired(NO_COMMON_TRANSPORT, f"no transport in common with any {_OPPOSITE[role]} worker: {transports}")


def _list(others: Sequence[WorkerRecord], say: Callable[[WorkerRecord], str]) -> str:
    named = ", ".join(f"{other.worker_id} {say(other)}" for other in others[:_NAMED])
    return f"{named} and {len(others) - _NAMED} more" if len(others) > _NAMED else named


def _has_layout(record: WorkerRecord) -> str:
    return f"has {layout_name(record)}"
