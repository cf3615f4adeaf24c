"""What the attention of one step needs, the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class AttentionMetadata:
    """One ragged batch: S sequences, T query tokens in all, one-token sequences first.

    `slot_mapping[t] = block * block_size + offset` is where token t's K and V go; -1 means do not write.
    """

    query_lens: list[int]  # S: tokens of this step
    context_lens: list[int]  # S: tokens in the KV cache, those of this step included
    num_decodes: int  # the first num_decodes sequences have query_len 1
    block_tables: Tensor  # int32 [S, max_blocks], padded with 0
    slot_mapping: Tensor  # int64 [T]
    block_size: int
