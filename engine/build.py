"""From a configuration to a running engine: model, KV cache, scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch

from engine.config import EngineConfig, dtype_name
from engine.engine import Engine
from engine.host import SERVICE_CORES, Share, claim_cores, default_threads, memory_bandwidth
from engine.kv import BlockPool, HostTier
from engine.kv_cache import KVCache, KVFormat
from engine.layers.invariance import make_invariant, rounding_of
from engine.loader import load_model
from engine.memory import activation_bytes, plan_memory
from engine.model_config import ModelConfig, check_lengths
from engine.runner import ModelRunner
from engine.scheduler import SchedulerConfig
from engine.source import resolve_model
from engine.text.tokenizer import load_tokenizer
from kernels import dispatch

logger = logging.getLogger("ferry.engine")

ENDS_BYTES = 1 << 16
ALONE = Share()


def build_engine(
    config: EngineConfig,
    on_phase: Callable[[str], None] = lambda phase: None,
    pin_cores: bool = False,
    share: Share = ALONE,
) -> Engine:
    """Load the model of a configuration and make its engine. `on_phase` hears what start-up is doing; `share` is what
    the engine has of this host's cores and memory.

    With pin_cores this thread, and the kernels' threads it will start, keep to cores that no other engine of this host
    has. Raises ConfigError or ValueError with a one-line message.
    """
    threads = config.threads or default_threads(share, reserved=SERVICE_CORES if pin_cores else 0)
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
    check_lengths(config, model_config.max_position_embeddings)
    on_phase("loading weights")
    started = time.perf_counter()
    model = load_model(path, model_config, load_format=config.load_format, dtype=dtype, seed=config.seed)
    device = torch.device("cpu")
    numerics = dispatch.numerics(device, dtype)
    invariant, invariance = False, "off"
    if config.batch_invariant and dtype == torch.float32:
        invariance = "for tokens, not bits (float32)"
    elif config.batch_invariant:
        on_phase("checking that results do not depend on the batch")
        outcome = make_invariant(model, config.max_num_batched_tokens, config.max_num_seqs)
        invariant = outcome.invariant and numerics != "torch"
        invariance = f"{'on' if invariant else 'not kept'}, {len(outcome.mended)} shapes of linear layers mended"
        if not invariant:
            whose = "torch's kernels" if outcome.invariant else f"{len(outcome.dependent)} shapes of linear layers"
            logger.warning("batch_invariant is not kept by %s: a token's bits may depend on its batch", whose)
    on_phase("allocating the KV cache")
    fmt = KVFormat(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.block_size,
        dtype,
        transposed_keys=dispatch.transposed_keys(device, dtype),
    )
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    step = activation_bytes(
        model_config.hidden_size,
        model_config.intermediate_size,
        model_config.vocab_size,
        config.max_num_batched_tokens,
        config.max_num_seqs,
    )
    plan = plan_memory(config, fmt, model_config.max_position_embeddings, weight_bytes, step, share.engines)
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
        eos_token_ids=_eos_token_ids(config, model_config, path),
    )
    # Other bits than an invariant engine's, or than one whose layers multiply in another way
    rounding = f"{numerics}-{rounding_of(model) if invariant else 'by-batch'}"
    key = f"{weights_id(path)}:{fmt.key()}:{rounding}"
    engine = Engine(
        ModelRunner(model, kv),
        pool,
        scheduling,
        vocab_size=model_config.vocab_size,
        seed=config.seed,
        compat_key=key,
        reproducible=invariant,
    )
    where = f"cores {','.join(map(str, cores))}" if cores else "not pinned"
    logger.info(
        "%d threads (%s) read memory at %.1f GB/s; kernels %s; batch_invariant %s",
        *(threads, where, memory_bandwidth() / 1e9, numerics, invariance),
    )
    logger.info(
        "%s ready in %.1f s: %s, %d KV blocks of %d tokens (%s), max_model_len %d, %d host slots",
        *(config.model, time.perf_counter() - started, str(dtype).removeprefix("torch."), plan.num_blocks),
        *(config.block_size, plan.reason, plan.max_model_len, plan.host_slots),
    )
    return engine


def _eos_token_ids(config: EngineConfig, model_config: ModelConfig, path: Path) -> tuple[int, ...]:
    """What ends a sequence: the checkpoint's ids and its tokenizer's, which chat fine-tunes often change alone."""
    if config.skip_tokenizer_init:
        return model_config.eos_token_ids
    return tuple(dict.fromkeys((*model_config.eos_token_ids, *load_tokenizer(path).eos_token_ids)))


def weights_id(path: Path) -> str:
    """Names a checkpoint by its weight files: names, sizes, and what lies at their ends."""
    digest = blake2b(digest_size=12)
    for file in [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")]):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(ENDS_BYTES))
            stream.seek(max(0, size - ENDS_BYTES))
            digest.update(stream.read(ENDS_BYTES))
    return digest.hexdigest()
