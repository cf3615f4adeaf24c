"""The KV cache's memory: one byte slab a block, holding all layers.

    block = [layer 0 K | layer 0 V | layer 1 K | layer 1 V | ...]      each [kv_heads, block_size, head_dim];
                                                                       K perhaps [kv_heads, head_dim, block_size]

Moving, swapping and handing over a request copy whole slabs; attention gets strided views. `KVFormat` is the only
place that knows where a layer's K and V lie, so mixed formats or scales change nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Slabs = np.ndarray | list[np.ndarray]  # blocks: uint8 [count, block_bytes], or as many of [block_bytes]


@dataclass(frozen=True)
class KVFormat:
    """Where (layer, K or V) lies in a block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    transposed_keys: bool = False  # K is [kv_heads, head_dim, block_size]: tokens side by side, for vector lanes

    @property
    def part_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.part_bytes

    def offset(self, layer: int, value: bool) -> int:
        """Byte offset of a layer's K (or V) inside its block."""
        return (2 * layer + value) * self.part_bytes

    def key(self) -> str:
        """Two caches with equal keys may exchange slabs."""
        dtype = str(self.dtype).removeprefix("torch.")
        keys = "t" if self.transposed_keys else "n"
        return f"{self.num_layers}x{self.num_kv_heads}x{self.head_dim}x{self.block_size}:{dtype}:{keys}"


class KVCache:
    """The block slabs of one rank, and the host tier's slabs beside them.

    Host memory is mapped lazily, so a tier that is never used costs nothing.
    """

    def __init__(self, fmt: KVFormat, num_blocks: int, host_slots: int = 0, device: str = "cpu"):
        self.format = fmt
        self.slabs = torch.empty((num_blocks, fmt.block_bytes), dtype=torch.uint8, device=device)
        self.host = torch.empty((host_slots, fmt.block_bytes), dtype=torch.uint8)
        self._bytes = self.slabs.numpy() if self.slabs.device.type == "cpu" else None
        typed = self.slabs.view(fmt.dtype)
        self._layers = [(self._view(typed, i, False), self._view(typed, i, True)) for i in range(fmt.num_layers)]

    def _view(self, typed: Tensor, layer: int, value: bool) -> Tensor:
        fmt = self.format
        shape = (typed.shape[0], fmt.block_size, fmt.num_kv_heads, fmt.head_dim)
        inner = (1, fmt.block_size) if fmt.transposed_keys and not value else (fmt.head_dim, 1)
        strides = (typed.stride(0), inner[0], fmt.block_size * fmt.head_dim, inner[1])
        return typed.as_strided(shape, strides, fmt.offset(layer, value) // fmt.dtype.itemsize)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer: views [num_blocks, block_size, kv_heads, head_dim]; V's last stride is 1."""
        return self._layers[index]

    def swap_out(self, copies: list[tuple[int, int]]) -> None:
        """Copy (device block, host slot) pairs; a slot named twice keeps its last block."""
        if copies:
            slots, blocks = zip(*{slot: block for block, slot in copies}.items(), strict=True)
            self.host[torch.tensor(slots)] = self.slabs[torch.tensor(blocks)].cpu()

    def swap_in(self, copies: list[tuple[int, int]]) -> None:
        """Copy (host slot, device block) pairs."""
        if copies:
            slots, blocks = zip(*copies, strict=True)
            self.slabs[torch.tensor(blocks)] = self.host[torch.tensor(slots)].to(self.slabs.device)

    def read(self, blocks: list[int]) -> np.ndarray:
        """A copy of some blocks: uint8 [len(blocks), block_bytes]. On any thread; one pass over the bytes."""
        if self._bytes is None:
            return self.slabs[torch.tensor(blocks, dtype=torch.int64)].cpu().numpy()
        data = np.empty((len(blocks), self.format.block_bytes), dtype=np.uint8)
        for row, block in zip(data, blocks, strict=True):
            np.copyto(row, self._bytes[block])  # without the GIL, and without torch's threads
        return data

    def views(self, blocks: list[int]) -> Slabs:
        """Some blocks where they lie, read-only; on other devices copies."""
        if self._bytes is None:
            return self.read(blocks)
        rows = [self._bytes[block] for block in blocks]
        for row in rows:
            row.flags.writeable = False
        return rows

    def write(self, blocks: list[int], data: Slabs) -> None:
        """Fill blocks with slabs read elsewhere, perhaps read-only. On any thread; one
        pass over the bytes. Raises ValueError for slabs of another number or size."""
        shapes = {row.shape for row in data} - {(self.format.block_bytes,)}
        if len(data) != len(blocks) or shapes:
            found = f"{len(data)} slabs of shape {shapes.pop() if shapes else (self.format.block_bytes,)}"
            raise ValueError(f"{found} for {len(blocks)} blocks of {self.format.block_bytes} bytes")
        if self._bytes is None:
            self.slabs[torch.tensor(blocks, dtype=torch.int64)] = torch.from_numpy(np.array(data)).to(self.slabs.device)
            return
        for row, block in zip(data, blocks, strict=True):
            np.copyto(self._bytes[block], row)
