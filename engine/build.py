"""From a configuration to a running engine: model, KV cache, scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from engine.config import ConfigError, EngineConfig, dtype_name
from engine.engine import Engine
from engine.host import SERVICE_CORES, claim_cores, default_threads, memory_bandwidth
from engine.kv import BlockPool, HostTier
from engine.kv_cache import KVCache, KVFormat
from engine.layers.invariance import make_invariant
from engine.loader import load_model
from engine.loader.source import resolve_model
from engine.memory import activation_bytes, plan_memory
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.scheduler import SchedulerConfig
from kernels import dispatch

logger = logging.getLogger("ferry.engine")


def build_engine(
    config: EngineConfig, on_phase: Callable[[str], None] = lambda phase: None, pin_cores: bool = False
) -> Engine:
    """Load the model of a configuration and make its engine. `on_phase` hears what start-up is doing.

    With pin_cores this thread, and the kernels' threads it will start, keep to cores that no other engine of this host
    has. Raises ConfigError or ValueError with a one-line message.
    """
    threads = config.threads or default_threads(config.num_replicas, reserved=SERVICE_CORES if pin_cores else 0)
    torch.set_num_threads(threads)
    cores = claim_cores(threads) if pin_cores else []
    if cores:
        os.sched_setaffinity(0, cores)
    on_phase("finding the model")
    path = resolve_model(config.model)
    model_config = ModelConfig.from_pretrained(path)
    dtype = getattr(torch, dtype_name(config.dtype, model_config.dtype))
    if config.dtype == "half":
        logger.info("dtype half means bfloat16 on CPU; ask for float16 to get it")
    on_phase("loading weights")
    started = time.perf_counter()
    model = load_model(path, model_config, load_format=config.load_format, dtype=dtype, seed=config.seed)
    device = torch.device("cpu")
    if config.batch_invariant and dtype != torch.float32:
        on_phase("proving that results do not depend on the batch")
        make_invariant(model, config.max_num_batched_tokens, config.max_num_seqs)
    on_phase("allocating the KV cache")
    fmt = KVFormat(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.block_size,
        dtype,
        transposed_keys=dispatch.transposed_keys(device, dtype),
    )
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    step = activation_bytes(
        model_config.hidden_size,
        model_config.intermediate_size,
        model_config.vocab_size,
        config.max_num_batched_tokens,
        config.max_num_seqs,
    )
    plan = plan_memory(config, fmt, model_config.max_position_embeddings, weights, step)
    if config.max_model_len is not None and config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model's longest is {model_config.max_position_embeddings}"
        )
    if not config.enable_chunked_prefill and plan.max_model_len > config.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, without chunked prefill it must be at least "
            f"max_model_len ({plan.max_model_len})"
        )
    kv = KVCache(fmt, plan.num_blocks, plan.host_slots)
    host = HostTier(plan.host_slots)
    pool = BlockPool(plan.num_blocks, config.block_size, host, keep_evicted=config.prompt_cache_enable_swap)
    scheduling = SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_num_queued=config.max_num_queued,
        max_queue_time_s=config.max_queue_time,
        policy=config.scheduling_policy,
        preempt=config.preempt_strategy,
        prefix_caching=config.enable_prefix_caching,
        chunked_prefill=config.enable_chunked_prefill,
        delay_factor=config.scheduler_delay_factor,
        eos_token_ids=model_config.eos_token_ids,
    )
    key = f"{path.name}:{weights}:{fmt.key()}:{dispatch.numerics(device, dtype)}"
    engine = Engine(
        ModelRunner(model, kv), pool, scheduling, vocab_size=model_config.vocab_size, seed=config.seed, compat_key=key
    )
    where = f"cores {','.join(map(str, cores))}" if cores else "not pinned"
    logger.info(
        "%d threads (%s) read memory at %.1f GB/s; kernels %s",
        *(threads, where, memory_bandwidth() / 1e9, dispatch.numerics(device, dtype)),
    )
    logger.info(
        "%s ready in %.1f s: %s, %d KV blocks of %d tokens (%s), max_model_len %d, %d host slots",
        *(config.model, time.perf_counter() - started, str(dtype).removeprefix("torch."), plan.num_blocks),
        *(config.block_size, plan.reason, plan.max_model_len, plan.host_slots),
    )
    return engine
