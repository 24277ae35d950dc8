"""Secrets and ids of this process, which cannot be guessed. A simulation that puts a seeded source here repeats them.

Jitter and choices, which may be guessed, come from the module `random`, which has a seed of its own.
"""

from os import urandom as token_bytes
from secrets import token_urlsafe as token_urlsafe

__all__ = ["token_bytes", "token_hex", "token_urlsafe"]


def token_hex(size: int) -> str:
    """So many random bytes, in hexadecimal. What `secrets` does, with less than half of its calls."""
    return token_bytes(size).hex()
