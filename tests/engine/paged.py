"""A hand-made KV cache around a model: feeds chunks of sequences through scattered blocks."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from engine.context import reset_context, set_context
from engine.kv_cache import KVCache, KVFormat
from engine.model_config import ModelConfig
from kernels.metadata import AttentionMetadata


class Paged:
    """`step({name: ids})` appends ids to sequences in one ragged batch and returns the logits of all of them."""

    def __init__(self, model, config: ModelConfig, dtype: torch.dtype, block_size: int = 4, num_blocks: int = 256):
        self.model = model
        self.block_size = block_size
        self.kv = KVCache(
            KVFormat(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype), num_blocks
        )
        self.kv.slabs.view(dtype).fill_(float("nan"))  # what was never written must not matter
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        order = sorted(chunks, key=lambda name: len(chunks[name]) != 1)
        ids, positions, slots = [], [], []
        for name in order:
            table = self.blocks.setdefault(name, [])
            for token in chunks[name]:
                at = self.lengths.get(name, 0)
                if at // self.block_size == len(table):
                    table.append(self.free.pop())
                ids.append(token)
                positions.append(at)
                slots.append(table[at // self.block_size] * self.block_size + at % self.block_size)
                self.lengths[name] = at + 1
        widest = max(len(self.blocks[name]) for name in order)
        tables = [self.blocks[name] + [0] * (widest - len(self.blocks[name])) for name in order]
        metadata = AttentionMetadata(
            query_lens=[len(chunks[name]) for name in order],
            context_lens=[self.lengths[name] for name in order],
            num_decodes=sum(len(chunks[name]) == 1 for name in order),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_size=self.block_size,
        )
        set_context(metadata, self.kv)
        try:
            hidden = self.model(torch.tensor(ids), torch.tensor(positions))
        finally:
            reset_context()
        logits = self.model.compute_logits(hidden)
        return dict(zip(order, logits.split(metadata.query_lens), strict=True))

    def greedy(self, name: str, prompt: list[int], count: int) -> list[int]:
        ids = [int(self.step({name: prompt})[name][-1].argmax())]
        while len(ids) < count:
            ids.append(int(self.step({name: ids[-1:]})[name][-1].argmax()))
        return ids
