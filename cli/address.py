"""Finds the address of the router."""

import os
from dataclasses import dataclass
from pathlib import Path

from baton.connection.settings import DEFAULT_ADDRESS

LOCAL_ADDRESS_FILE = Path(".baton") / "address"


@dataclass(frozen=True, slots=True)
class Address:
    """A router's `host:port`, and where it was configured, for messages."""

    value: str
    source: str


def find_address(given: str | None) -> Address:
    """The given address, else $BATON_ADDRESS, else the local cluster's in this folder, else the default."""
    if given:
        return Address(given, "--address")
    if from_environment := os.environ.get("BATON_ADDRESS"):
        return Address(from_environment, "$BATON_ADDRESS")
    if from_file := _read(LOCAL_ADDRESS_FILE):
        return Address(from_file, str(LOCAL_ADDRESS_FILE))
    return Address(DEFAULT_ADDRESS, "the default")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
