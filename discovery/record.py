"""The worker record: what a worker says of itself to whoever looks for one, and its form as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

_Json: TypeAlias = object

_INTEGER_LIMIT = 2**64  # a record's integers travel on as uint64


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as others find it. `epoch` is of its process: another epoch is another process under the same id."""

    worker_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    roles: tuple[str, ...]  # encode, prefill, decode
    model: str
    engine: str
    layout_digest: str
    max_context_tokens: int
    capabilities: tuple[str, ...] = ()
    data_parallel_ranks: int = 1
    draining: bool = False
    certificate: str = ""  # the URI in its certificate, by which other workers know it

    @property
    def process(self) -> str:
        """Names one life of a worker: after a restart it is another."""
        return f"{self.worker_id}@{self.epoch}"

    def to_json(self) -> bytes:
        """The record as stored; unknown keys are for newer versions to add."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "WorkerRecord":
        """Reads a stored record, ignoring keys it does not know. Raises ValueError naming what is missing or wrong.

        Keys that have a default may be missing: an older version did not write them.
        """
        fields = _parse(text)
        return cls(
            worker_id=_text(fields, "worker_id"),
            epoch=_integer(fields, "epoch"),
            address=_text(fields, "address"),
            roles=_texts(fields, "roles"),
            model=_text(fields, "model"),
            engine=_text(fields, "engine"),
            layout_digest=_text(fields, "layout_digest"),
            max_context_tokens=_integer(fields, "max_context_tokens"),
            capabilities=_texts({"capabilities": [], **fields}, "capabilities"),
            data_parallel_ranks=_integer({"data_parallel_ranks": 1, **fields}, "data_parallel_ranks"),
            draining=_flag({"draining": False, **fields}, "draining"),
            certificate=_text({"certificate": "", **fields}, "certificate"),
        )


def _parse(text: bytes) -> Mapping[str, _Json]:
    try:
        parsed: _Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _value(fields: Mapping[str, _Json], key: str) -> _Json:
    if key not in fields:
        raise ValueError(f"{key} is missing")
    return fields[key]


def _text(fields: Mapping[str, _Json], key: str) -> str:
    value = _value(fields, key)
    if not isinstance(value, str) or not _is_unicode(value):
        raise ValueError(f"{key} is not a text: {value!r:.100}")
    return value


def _texts(fields: Mapping[str, _Json], key: str) -> tuple[str, ...]:
    value = _value(fields, key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list of texts: {value!r:.100}")
    return tuple(_text({f"{key}[{index}]": item}, f"{key}[{index}]") for index, item in enumerate(value))


def _integer(fields: Mapping[str, _Json], key: str) -> int:
    value = _value(fields, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INTEGER_LIMIT:
        raise ValueError(f"{key} is not an integer of 0 to 2^64 - 1: {value!r:.100}")
    return value


def _flag(fields: Mapping[str, _Json], key: str) -> bool:
    value = _value(fields, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is not true or false: {value!r:.100}")
    return value


def _is_unicode(text: str) -> bool:
    # JSON can spell half of a surrogate pair, which no message could carry on.
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)
