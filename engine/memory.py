"""How many KV blocks fit: an explicit number, an explicit size, or a share of the memory."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ConfigError, EngineConfig
from engine.host import memory_limit_bytes
from engine.kv_cache import KVFormat

CPU_DEFAULT_BYTES = 4 << 30
"""On a host that also runs other things the KV cache stops here unless kv_cache_memory_bytes asks for more."""


@dataclass(frozen=True)
class MemoryPlan:
    num_blocks: int
    host_slots: int
    max_model_len: int
    reason: str  # for the log: where the number comes from


def activation_bytes(hidden_size: int, intermediate_size: int, vocab_size: int, tokens: int, seqs: int) -> int:
    """An upper estimate of one step's temporaries: hidden rows and the MLP in float32, logits and a sorted copy."""
    return tokens * (8 * hidden_size + 3 * intermediate_size) * 4 + seqs * vocab_size * 4 * 4


def plan_memory(
    config: EngineConfig,
    fmt: KVFormat,
    model_max_len: int,
    model_bytes: int,
    step_bytes: int,
    engines: int = 1,
    limit: int | None = None,
) -> MemoryPlan:
    """The KV plan of one of `engines` that share a host, whose memory is `limit` or else this host's.

    Raises ConfigError when nothing fits or an explicit max_model_len does not.
    """
    block = fmt.block_bytes
    longest = config.max_model_len or model_max_len
    swap = int(config.swap_space * (1 << 30))
    if config.num_gpu_blocks_override is not None:
        count, reason = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        count, reason = config.kv_cache_memory_bytes // block, "kv_cache_memory_bytes"
    else:
        share = config.max_gpu_memory_utilization * (limit if limit is not None else memory_limit_bytes())
        room = int(share / engines) - model_bytes - step_bytes
        swap = min(swap, max(room, 0) // 2)  # on CPU the host tier is in the same memory
        room -= swap
        useful = config.max_num_seqs * -(-longest // fmt.block_size) * block
        count = min(room, CPU_DEFAULT_BYTES, useful) // block
        reason = f"max_gpu_memory_utilization {config.max_gpu_memory_utilization:g}"
    if count < 1:
        raise ConfigError(f"no KV block of {block} bytes fits ({reason}); give it more memory or a smaller model")
    capacity = count * fmt.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the KV cache holds {capacity} tokens ({reason}); "
            f"lower max_model_len or raise kv_cache_memory_bytes to {fmt.block_bytes * -(-longest // fmt.block_size)}"
        )
    return MemoryPlan(count, swap // block, min(longest, capacity), reason)
