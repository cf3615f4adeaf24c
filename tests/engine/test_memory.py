"""How many KV blocks fit, from the memory or from what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.kv_cache import KVFormat
from engine.memory import CPU_DEFAULT_BYTES, MemoryPlan, activation_bytes, plan_memory

FORMAT = KVFormat(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.float16)
BLOCK = 2 * 2 * 2 * 8 * 16 * 2  # layers x (K, V) x heads x dim x tokens x bytes
GIB = 1 << 30


def plan(
    limit: int = 64 * GIB, model: int = 0, step: int = 0, longest: int = 1024, engines: int = 1, **options: Any
) -> MemoryPlan:
    return plan_memory(EngineConfig(model="m", **options), FORMAT, longest, model, step, engines, limit)


def test_a_block_is_all_layers_of_its_tokens() -> None:
    assert FORMAT.block_bytes == BLOCK == 2048


def test_an_explicit_number_of_blocks_is_taken_as_it_is() -> None:
    found = plan(limit=1, num_gpu_blocks_override=7)
    assert (found.num_blocks, found.reason) == (7, "num_gpu_blocks_override")


def test_explicit_bytes_are_whole_blocks_whatever_the_memory() -> None:
    found = plan(limit=1, kv_cache_memory_bytes=10 * BLOCK + BLOCK - 1)
    assert (found.num_blocks, found.reason) == (10, "kv_cache_memory_bytes")
    assert plan(limit=1, kv_cache_memory_bytes=8 * GIB).num_blocks == 8 * GIB // BLOCK


def test_a_share_of_the_memory_pays_for_weights_and_a_step_first() -> None:
    limit, weights, step = 1000 * BLOCK, 100 * BLOCK, 50 * BLOCK
    found = plan(limit, weights, step, max_gpu_memory_utilization=0.5, swap_space=0.0)
    assert found.num_blocks == 500 - 150
    assert found.reason == "max_gpu_memory_utilization 0.5"


def test_engines_of_one_host_divide_the_share_whatever_others_elsewhere() -> None:
    options = {"max_gpu_memory_utilization": 0.5, "num_replicas": 40, "swap_space": 0.0}
    assert plan(1000 * BLOCK, engines=4, **options).num_blocks == 125
    assert plan(1000 * BLOCK, 100 * BLOCK, engines=4, **options).num_blocks == 25
    assert plan(1000 * BLOCK, **options).num_blocks == 500


def test_the_host_tier_is_paid_from_the_same_memory() -> None:
    """Both together stay within the share; a host tier that asks for more than half of it gets half."""
    share = 1000 * BLOCK
    some = plan(share, max_gpu_memory_utilization=1.0, swap_space=100 * BLOCK / GIB)
    assert (some.num_blocks, some.host_slots) == (900, 100)
    much = plan(share, max_gpu_memory_utilization=1.0, swap_space=4.0)
    assert (much.num_blocks, much.host_slots) == (500, 500)
    explicit = plan(share, num_gpu_blocks_override=700, swap_space=900 * BLOCK / GIB)
    assert (explicit.num_blocks, explicit.host_slots) == (700, 900)


def test_the_share_stops_at_the_cpu_default() -> None:
    assert plan(1 << 50, longest=1 << 20).num_blocks == CPU_DEFAULT_BYTES // BLOCK


def test_no_more_blocks_than_the_largest_batch_can_fill() -> None:
    assert plan(longest=1024, max_num_seqs=3).num_blocks == 3 * 64


@pytest.mark.parametrize("longest", [1, 15, 17, 100])
def test_the_largest_batch_fills_part_blocks_too(longest: int) -> None:
    found = plan(longest=longest, max_num_seqs=1, max_model_len=longest)
    assert found.num_blocks == -(-longest // 16) and found.max_model_len == longest
    assert plan(longest=longest, max_num_seqs=3).num_blocks == 3 * -(-longest // 16)


def test_the_longest_sequence_is_the_models_unless_the_cache_is_smaller() -> None:
    assert plan(num_gpu_blocks_override=100, longest=1024).max_model_len == 1024
    assert plan(num_gpu_blocks_override=10, longest=1024).max_model_len == 160
    assert plan(num_gpu_blocks_override=100, longest=1024, max_model_len=77).max_model_len == 77


def test_an_explicit_max_model_len_must_fit_and_the_error_says_how_much_would() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(kv_cache_memory_bytes=4 * BLOCK, max_model_len=65)
    assert "max_model_len is 65" in str(caught.value) and "holds 64 tokens" in str(caught.value)
    assert str(5 * BLOCK) in str(caught.value)
    assert plan(kv_cache_memory_bytes=5 * BLOCK, max_model_len=65).max_model_len == 65


@pytest.mark.parametrize(
    "arguments", [{"kv_cache_memory_bytes": BLOCK - 1}, {"limit": 10 * BLOCK, "model": 20 * BLOCK}, {"limit": BLOCK}]
)
def test_memory_without_room_for_a_block_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"no KV block of {BLOCK} bytes fits"):
        plan(**arguments)


def test_swap_space_is_counted_in_whole_slabs() -> None:
    assert plan(num_gpu_blocks_override=1, swap_space=4.0).host_slots == 4 * GIB // BLOCK
    assert plan(num_gpu_blocks_override=1, swap_space=0.0).host_slots == 0


def test_activations_grow_with_every_size() -> None:
    base = activation_bytes(64, 128, 1000, 32, 4)
    assert base == 32 * (8 * 64 + 3 * 128) * 4 + 4 * 1000 * 16
    for larger in ((65, 128, 1000, 32, 4), (64, 129, 1000, 32, 4), (64, 128, 1001, 32, 4), (64, 128, 1000, 33, 4)):
        assert activation_bytes(*larger) > base
