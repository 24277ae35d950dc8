"""Which workers can hand KV over to one another: those of one model whose layouts are equal."""

from collections import defaultdict
from collections.abc import Iterable

from discovery.record import WorkerRecord

WHOLE_REQUESTS = "whole_requests"  # the capability of a worker that is not meant to hand over

_OPPOSITE = {"prefill": "decode", "decode": "prefill"}
_NAMED = 3  # workers that a message names


def unpaired(records: Iterable[WorkerRecord]) -> dict[str, str]:
    """Why a worker can hand over to none, or from none, of those that it should: by `WorkerRecord.process`.

    A worker is there only if others have the opposite role for its model, and none of these has its layout. Draining
    workers are left out, and those that are for whole requests.
    """
    by_model: defaultdict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        if _hands_over(record):
            by_model[record.model].append(record)
    return {
        record.process: problem
        for of_model in by_model.values()
        if len({record.layout_digest for record in of_model}) > 1
        for record in of_model
        if (problem := _problem(record, of_model))
    }


def _hands_over(record: WorkerRecord) -> bool:
    is_meant_to = set(record.roles) & _OPPOSITE.keys() and WHOLE_REQUESTS not in record.capabilities
    return bool(is_meant_to and not record.draining)


def _problem(record: WorkerRecord, of_model: list[WorkerRecord]) -> str:
    for role in sorted(set(record.roles) & _OPPOSITE.keys()):
        opposite = _OPPOSITE[role]
        others = [one for one in of_model if opposite in one.roles and one is not record]
        if others and all(one.layout_digest != record.layout_digest for one in others):
            named = ", ".join(f"{one.worker_id} has {_named(one)}" for one in others[:_NAMED])
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            return f"its KV layout, {_named(record)}, fits no {opposite} worker: {named}{more}"
    return ""


def _named(record: WorkerRecord) -> str:
    return f"{record.layout_digest[:12]} {record.layout}".strip()
