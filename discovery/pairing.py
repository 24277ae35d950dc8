"""Which workers can hand KV over to one another: those of one model with equal layouts and a transport in common."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.errors import LayoutMismatch
from discovery.record import WorkerRecord

WHOLE_REQUESTS = "whole_requests"  # the capability of a worker that is not meant to hand over

NO_COMMON_TRANSPORT = "NO_COMMON_TRANSPORT"  # beside LayoutMismatch.reason, why workers are unpaired

_OPPOSITE = {"prefill": "decode", "decode": "prefill"}
_NAMED = 3  # workers that a message names


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Why a worker fits no other for a handoff: `reason` for programs, `problem` for people."""

    reason: str
    problem: str


def can_hand_over(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    """Whether a prefill worker can hand over to a decode worker of its model.

    They are other processes, have the same KV layout, and the one offers a transport that the other reads.
    """
    return (
        prefill.layout_digest == decode.layout_digest
        and (prefill.worker_id, prefill.epoch) != (decode.worker_id, decode.epoch)
        and share_transport(prefill.offers, decode.reads)
    )


def share_transport(offers: Sequence[str] | None, reads: Sequence[str] | None) -> bool:
    """Whether a worker that reads these transports can read from one that offers those. Unknown ones may fit."""
    return offers is None or reads is None or bool(set(offers) & set(reads))


def transport_names(names: Sequence[str] | None) -> str:
    """Transports as messages name them."""
    return ", ".join(names or ()) or "none"


def layout_name(record: WorkerRecord) -> str:
    """A worker's KV layout as messages name it: the start of its digest, and the layout in words."""
    return f"{record.layout_digest[:12]} {record.layout}".strip()


def layout_mismatch(records: Iterable[WorkerRecord], model: str) -> str:
    """Why no prefill worker of a model can ever hand over to a decode worker: the layouts of both, in words.

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


def unpaired(records: Iterable[WorkerRecord]) -> dict[str, Unpaired]:
    """Why a worker can hand over to none, or from none, of those that it should: by `WorkerRecord.process`.

    A worker is there only if others have the opposite role for its model, and it can hand over to none of these, or
    from none. Draining workers are left out, and those that are for whole requests.
    """
    by_role: defaultdict[tuple[str, str], list[WorkerRecord]] = defaultdict(list)
    handing_over = [record for record in records if _hands_over(record)]
    for record in handing_over:
        for role in record.roles:
            by_role[record.model, role].append(record)
    examples = {key: _examples(of_role) for key, of_role in by_role.items()}
    found: dict[str, Unpaired] = {}
    for record in handing_over:
        for role in sorted(set(record.roles) & _OPPOSITE.keys()):
            key = record.model, _OPPOSITE[role]
            if not _fits_one(record, role, examples.get(key, ())) and (problem := _problem(record, role, by_role[key])):
                found.setdefault(record.process, problem)
    return found


def _hands_over(record: WorkerRecord) -> bool:
    is_meant_to = set(record.roles) & _OPPOSITE.keys() and WHOLE_REQUESTS not in record.capabilities
    return bool(is_meant_to and not record.draining)


def _examples(records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Two of those that are alike for a handoff: in large fleets most are. One would not do, as none fits itself."""
    alike: defaultdict[object, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        alike[record.layout_digest, record.offers, record.reads].append(record)
    return [record for of_kind in alike.values() for record in of_kind[:2]]


def _fits_one(record: WorkerRecord, role: str, opposite: Iterable[WorkerRecord]) -> bool:
    if role == "prefill":
        return any(can_hand_over(record, other) for other in opposite)
    return any(can_hand_over(other, record) for other in opposite)


def _problem(record: WorkerRecord, role: str, opposite: Sequence[WorkerRecord]) -> Unpaired | None:
    """Why a worker fits none of those of the opposite role; None if there is no other."""
    own = record.worker_id, record.epoch
    others = [other for other in opposite if (other.worker_id, other.epoch) != own]
    if not others:
        return None
    alike = [other for other in others if other.layout_digest == record.layout_digest]
    if not alike:
        layouts = _list(others, _has_layout)
        fits_none = f"its KV layout, {layout_name(record)}, fits no {_OPPOSITE[role]} worker: {layouts}"
        return Unpaired(LayoutMismatch.reason, fits_none)
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
