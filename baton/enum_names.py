"""The values of enums in words. Enums are open: a peer of a newer version may send numbers without a name here."""

from typing import Any

UNKNOWN = "unknown"


def value_name(enum: Any, value: int) -> str:
    """A value without its enum's prefix, such as `end_of_sequence`; `unknown` for each number that has no name here.

    One word for all unknown numbers: metrics have it as a label, and a peer may send any of 2^32.
    """
    descriptor = enum.DESCRIPTOR
    known = descriptor.values_by_number.get(value)
    if known is None:
        return UNKNOWN
    prefix, unspecified, _ = descriptor.values_by_number[0].name.partition("UNSPECIFIED")
    return str(known.name).removeprefix(prefix if unspecified else "").lower()
