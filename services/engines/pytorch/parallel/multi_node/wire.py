"""Messages between ranks as bytes: a length, a JSON header, and the message's arrays. Nothing in them is executed."""

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Ready, ZeroBlocks
from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays

LENGTHS = struct.Struct("!II")
"""The bytes of a frame after this, and those of them that are its header."""


@dataclass(frozen=True, slots=True)
class Join:
    """A follower's first message. `settings` are names and values that must be the same on all ranks."""

    rank: int
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Rank 0's answer to Join."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0's answer to a Join that it does not accept, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says only that the sender is there."""


@dataclass(frozen=True, slots=True)
class End:
    """Rank 0's last message: `None` among orders."""


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Join, Welcome, Refused, Heartbeat, End),
        *(Loaded, NotLoaded, Begin, Ready, ZeroBlocks, DecodeArrays, StepArrays),
    )
}
_DTYPES = ("int32", "int64")


def encode(message: Any) -> bytes:
    """Returns the frame of a message."""
    values: dict[str, Any] = {}
    arrays: list[tuple[str, str, int]] = []
    parts: list[bytes] = []
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray):
            arrays.append((field.name, str(value.dtype), value.nbytes))
            parts.append(value.tobytes())
        else:
            values[field.name] = asdict(value) if isinstance(value, Sizes) else value
    header = json.dumps([type(message).__name__, values, arrays]).encode()
    body = b"".join([header, *parts])
    return LENGTHS.pack(len(body), len(header)) + body


def decode(body: bytearray, header_bytes: int) -> Any:
    """Returns the message of a frame's body, whose arrays are parts of it. Raises ValueError if it is none."""
    try:
        name, values, arrays = json.loads(body[:header_bytes])
        found = {key: _tuples(value) for key, value in values.items()}
        if name == Begin.__name__:
            found["sizes"] = Sizes(**values["sizes"])
        start = header_bytes
        for field, dtype, size in arrays:
            if dtype not in _DTYPES:
                raise ValueError(f"an array of {dtype}")
            found[field] = np.frombuffer(memoryview(body)[start : start + size], dtype=dtype)
            start += size
        return _KINDS[name](**found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no message of a rank: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
