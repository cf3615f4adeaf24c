"""The plain definition of every kernel, one loop each: slow, obvious, the oracle of the tests.

Shapes: T tokens, H query heads, K key/value heads (H a multiple of K), D head size. Caches are strided views
[num_blocks, block_size, K, D]; V's last stride is 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [T, K, D] at slots int64 [T]; a slot of -1 stores nothing."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int = 0
) -> Tensor:
    """Causal attention of q [T, H, D] over the cached keys of its own sequence: [T, H, D] of q's dtype.

    With a window a token sees that many positions, its own included. What it does not see does not exist for it; of
    what it sees, a NaN is passed on, and so is that of scores without a softmax.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    token = 0
    for sequence, (queries, context) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        table = meta.block_tables[sequence].tolist()
        for position in range(context - queries, context):
            first = max(0, position + 1 - window) if window else 0
            slots = [(table[at // meta.block_size], at % meta.block_size) for at in range(first, position + 1)]
            keys = torch.stack([k_cache[block, offset] for block, offset in slots]).float()
            values = torch.stack([v_cache[block, offset] for block, offset in slots]).float()
            for head in range(q.shape[1]):
                scores = keys[:, head // group] @ q[token, head].float() * scale
                out[token, head] = (torch.softmax(scores, 0) @ values[:, head // group]).to(q.dtype)
            token += 1
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32 and rounded once, to x's dtype.

    transformers' LlamaRMSNorm also rounds before it multiplies by the weight; in float32 both are the same.
    """
    wide = x.float()
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual in x's dtype, and x + residual in the residual's, as a rule float32."""
    total = residual + x
    return rms_norm(total, weight, eps).to(x.dtype), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, K, D] by angles whose cos, sin are float32 [T, D / 2]; halves pair up."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """`rope`, then `write_kv` of the rotated k; returns q rotated."""
    q, k = rope(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def argmax(logits: Tensor) -> Tensor:
    """The first index of the largest of each row [S, V]: int64 [S]; -1 where any is NaN or +inf, or all are -inf."""
    found = []
    for row in logits.float().tolist():
        bad = any(math.isnan(value) or value == math.inf for value in row) or max(row) == -math.inf
        found.append(-1 if bad else row.index(max(row)))
    return torch.tensor(found)


def head_argmax(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """`argmax` of logits [S, V] that are hidden [S, H] times weight [V, H], rounded; equal ones are told apart by the
    unrounded products."""
    found = argmax(logits)
    for row in (found >= 0).nonzero().flatten().tolist():
        tied = (logits[row] == logits[row, found[row]]).nonzero().flatten()
        found[row] = tied[(weight[tied].double() @ hidden[row].double()).argmax()]
    return found


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate | up] [T, 2 I]: [T, I]."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
