"""The values of options (whole numbers, times, ranges), and the options of all commands that call a process."""

import argparse
import math
from collections.abc import Callable
from typing import Any

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1

# Of rates and times. Beyond them a schedule or a deadline overflows.
SMALLEST = 1e-6
LARGEST = 1e8


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
    try:
        shortest, longest = count(UINT32)(least), count(UINT32)(most or least)
    except argparse.ArgumentTypeError:
        shortest, longest = 1, 0
    if shortest > longest:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor a range such as 100:900")
    return shortest, longest


def number(text: str) -> float:
    """Finite: `inf` and `nan` are no settings."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def positive(text: str) -> float:
    """A rate, a factor or a time."""
    if not (value := number(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    if not SMALLEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {SMALLEST:g} and {LARGEST:g}")
    return value


def not_negative(text: str) -> float:
    if (value := number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def share(text: str) -> float:
    """A part of a whole, from 0 to 1."""
    if not 0 <= (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def number_of(parser: argparse.ArgumentParser, *flags: str, default: float, help: str, **options: Any) -> None:
    """Adds an option that takes a number, and says its default."""
    parser.add_argument(*flags, default=default, help=f"{help} (default: {default:g})", **{"metavar": "N", **options})


def address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router (default: $BATON_ADDRESS, the cluster of `baton up`, or 127.0.0.1:7070)",
    )
    credentials(parser)


def credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by each of the next three ($BATON_TLS)")
    parser.add_argument("--ca", metavar="FILE", help="the certificate authority to trust ($BATON_CA)")
    parser.add_argument("--cert", metavar="FILE", help="the client certificate ($BATON_CERT)")
    parser.add_argument("--key", metavar="FILE", help="the key of the client certificate ($BATON_KEY)")
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the token to send ($BATON_TOKEN_FILE, or $BATON_TOKEN)"
    )
