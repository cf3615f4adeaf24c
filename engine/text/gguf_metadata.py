"""Metadata of a GGUF file, read without touching the tensors.

gguf.GGUFReader makes a numpy view for each of the 100,000 strings of a vocabulary and takes seconds; this takes
tens of milliseconds, and the front end needs nothing but the metadata.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# GGUF value type -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header: numbers, bools, strings and lists of them.

    Raises ValueError with one line when the file is not a little-endian GGUF of a known version, or is cut short.
    """
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path.name} is not a GGUF file: it does not start with {MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(path.name, data)
            except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
                raise ValueError(f"{path.name} is cut short or damaged: its metadata cannot be read") from error


def _header(name: str, data: mmap.mmap) -> dict[str, Any]:
    (version,) = _U32.unpack_from(data, 4)
    if version not in VERSIONS:
        raise ValueError(f"{name} has GGUF version {version}, known versions are {VERSIONS}")
    (count,) = _U64.unpack_from(data, 16)  # the tensor count at 8 is of no use here
    metadata: dict[str, Any] = {}
    at = 24
    for _ in range(count):
        key, at = _string(data, at)
        (kind,) = _U32.unpack_from(data, at)
        metadata[key], at = _value(data, at + 4, kind)
    return metadata


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        (kind,) = _U32.unpack_from(data, at)
        (length,) = _U64.unpack_from(data, at + 4)
        return _array(data, at + 12, kind, length)
    values, at = _array(data, at, kind, 1)
    return values[0], at


def _array(data: mmap.mmap, at: int, kind: int, length: int) -> tuple[list[Any], int]:
    if kind in _SCALARS:
        form = f"<{length}{_SCALARS[kind]}"
        return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    if kind != _STRING:
        raise struct.error(f"value type {kind}")
    unpack = _U64.unpack_from
    raw = []
    for _ in range(length):
        (size,) = unpack(data, at)
        at += 8 + size
        raw.append(data[at - size : at])
    return [text.decode() for text in raw], at


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (size,) = _U64.unpack_from(data, at)
    if at + 8 + size > len(data):
        raise struct.error("string past the end")
    return data[at + 8 : at + 8 + size].decode(), at + 8 + size
