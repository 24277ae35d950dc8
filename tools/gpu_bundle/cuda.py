"""Leaves the machine code of other GPUs out of compiled modules.

nvcc puts code for several architectures beside each other, in the section .nv_fatbin. The driver reads the headers
there, and loads one. The code of the others becomes zeros, which compress to nothing; sizes and headers stay.

A region has the header {magic u32, version u16, header bytes u16, bytes of its entries u64}, and an entry {kind u16,
version u16, header bytes u32, payload bytes u64, ..., architecture u32 at 28}.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = struct.pack("<I", 0xBA55ED50)
_REGION = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
_ELF = 2


@dataclass(frozen=True, slots=True)
class Code:
    """Code for one architecture, such as 90: machine code, or PTX, which the driver compiles for later ones."""

    architecture: int
    is_machine_code: bool
    start: int
    end: int


def regions(content: bytes) -> Iterator[list[Code]]:
    """Yields the code of each region: the same functions for different GPUs."""
    at = content.find(_MAGIC)
    while at >= 0:
        found, end = _region(content, at)
        if found:
            yield found
        at = content.find(_MAGIC, max(end, at + 1))


def only_for(content: bytes, architecture: int) -> bytes:
    """Returns the same file, with zeros for the code that a GPU of this architecture never loads.

    It loads machine code of its own major version, up to its minor version, or else PTX of its or an earlier one.
    """
    kept = bytearray(content)
    for codes in regions(content):
        for code in unused(codes, architecture):
            kept[code.start : code.end] = bytes(code.end - code.start)
    return bytes(kept)


def unused(codes: list[Code], architecture: int) -> list[Code]:
    """The code that is not loaded."""
    major = architecture // 10
    fits = [each for each in codes if each.is_machine_code and each.architecture // 10 == major]
    own = {each.architecture for each in fits if each.architecture <= architecture}
    if own:
        return [each for each in codes if not each.is_machine_code or each.architecture != max(own)]
    return [each for each in codes if each.is_machine_code or each.architecture > architecture]


def _region(content: bytes, at: int) -> tuple[list[Code], int]:
    if at + _REGION.size > len(content):
        return [], at
    _, version, header, size = _REGION.unpack_from(content, at)
    end = at + header + size
    if version != 1 or header != _REGION.size or end > len(content):
        return [], at
    found, position = [], at + header
    while position + _ENTRY.size <= end:
        kind, _, entry_header, payload, architecture = _ENTRY.unpack_from(content, position)
        start, stop = position + entry_header, position + entry_header + payload
        if kind not in (1, _ELF) or not 32 <= entry_header <= 4096 or stop > end:
            return [], end  # another layout: left as it is
        found.append(Code(architecture, kind == _ELF, start, stop))
        position = stop
    return found, end
