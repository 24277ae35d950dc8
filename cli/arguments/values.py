"""What options take: whole numbers, times, ranges. Each refuses with what is wrong."""

import argparse
from collections.abc import Callable

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1


def integer(largest: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not 0 <= value <= largest:
            raise argparse.ArgumentTypeError(f"{value} is not between 0 and {largest}")
        return value

    return parse_integer


def count(largest: int) -> Callable[[str], int]:
    """A whole number from 1 on."""
    parse_integer = integer(largest)

    def parse_count(text: str) -> int:
        if not (value := parse_integer(text)):
            raise argparse.ArgumentTypeError("0 is not a positive number")
        return value

    return parse_count


def span(text: str) -> tuple[int, int]:
    """`100`, or `100:900` for lengths from 100 to 900."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 0 < int(least) <= int(most or least)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor a range such as 100:900")
    return int(least), int(most or least)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
