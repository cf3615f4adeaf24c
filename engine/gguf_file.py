"""Reading a GGUF file: metadata and tensors, from one memory map.

The gguf package's reader makes numpy objects of every token and merge of the vocabulary, which decides how long a
start takes. Its dequantisation is used as it is.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in row-major order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


class GGUFFile:
    """Metadata and tensors of one file; tensor bytes are read from the map when asked for.

    Raises ValueError with one line when the file is missing, no GGUF file, big-endian or cut short.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        self._at = 0
        if bytes(self._view[:4]) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        try:
            self._take(4)
            (version,) = self._unpack("I")
            if version not in VERSIONS:
                raise ValueError(f"{path} is GGUF version {version} (or big-endian), must be one of {VERSIONS}")
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path} is damaged or cut short: {error}") from None

    def _read_header(self) -> None:
        num_tensors, num_entries = self._unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("I")
            shape = self._unpack("Q" * num_dims)[::-1]
            entries.append((name, shape, *self._unpack("IQ")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: GGUFTensor(name, shape, kind, start + at) for name, shape, kind, at in entries}

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """A tensor dequantised to float32, or the given rows of it in that order.

        Raises ValueError for a quantisation that cannot be decoded, KeyError for an unknown name.
        """
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type)
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes = tensor.shape[-1] // block_size * block_bytes
            size = math.prod(tensor.shape[:-1]) * row_bytes
            if tensor.offset + size > len(self._view):
                raise ValueError(f"{self.path} is cut short: {name} ends after the end of the file")
            raw = np.frombuffer(self._view, np.uint8, size, tensor.offset).reshape(*tensor.shape[:-1], row_bytes)
            return dequantize(raw if rows is None else raw[rows], kind)
        except NotImplementedError:
            raise ValueError(f"{self.path}: {name} is quantised as {kind.name}, which cannot be decoded") from None

    def _take(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._view):
            raise IndexError("a string ends after the end of the file")
        return bytes(self._view[self._at - count : self._at])

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._view, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        return self._take(self._unpack("Q")[0]).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise IndexError(f"metadata of unknown type {kind}")
            return self._unpack(SCALARS[kind])[0]
        element, count = self._unpack("IQ")
        if element in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[element]}"))
        if element == STRING:
            return self._strings(count)
        return [self._value(element) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """_string, count times: a vocabulary has 100,000, so this loop decides how long opening a file takes."""
        view, at, length, strings = self._view, self._at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = at + 8 + length(view, at)[0]
            if end > len(view):
                raise IndexError("a string ends after the end of the file")
            strings.append(str(view[at + 8 : end], "utf-8"))
            at = end
        self._at = at
        return strings
