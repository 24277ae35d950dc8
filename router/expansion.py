"""Placeholders in a prompt: one for each medium as the client wrote it, and as many as its embedding has rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expanded:
    """The ids with all placeholders, and where those of each medium begin."""

    token_ids: tuple[int, ...]
    starts: tuple[int, ...]


def expand(token_ids: Sequence[int], placeholder: int, lengths: Sequence[int]) -> Expanded:
    """Repeats each placeholder as often as its medium has rows. There is one placeholder for each length."""
    remaining = iter(lengths)
    ids: list[int] = []
    starts: list[int] = []
    for token_id in token_ids:
        if token_id == placeholder:
            starts.append(len(ids))
            ids += [placeholder] * next(remaining)
        else:
            ids.append(token_id)
    return Expanded(tuple(ids), tuple(starts))
