"""Secrets and ids of this process, which nobody can guess. A simulation that puts a seeded source here repeats them.

Jitter and choices, which may be guessed, come from the module `random`, which has a seed of its own.
"""

from secrets import token_bytes as token_bytes
from secrets import token_hex as token_hex
from secrets import token_urlsafe as token_urlsafe

__all__ = ["token_bytes", "token_hex", "token_urlsafe"]
