"""Real engines whose bits are compared: bfloat16 on the native kernels, one model loaded once, an engine around it for
each schedule. A request alone in an engine is the oracle: its tokens and its logprobs, compared as floats."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.kv import BlockPool, HostTier
from engine.kv_cache import KVCache, KVFormat
from engine.layers.invariance import make_invariant
from engine.loader import load_model
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.scheduler import SchedulerConfig
from engine.step import TokenLogprobs
from kernels import dispatch
from tests.models import make_llama, make_qwen3

BLOCK = 16
CPU = torch.device("cpu")
NARROW = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "hidden_size": 96}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 96}
"""Heads as common models have them, which decoding reads straight from the cache (kernels/cpu/native/attention.h)."""
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "llama": (make_llama, NARROW),
    "qwen3": (make_qwen3, NARROW),
    "wide": (make_llama, WIDE),
}

Answer = list[tuple[int, TokenLogprobs | None]]


def promised() -> bool:
    """Bits are promised for the native kernels only."""
    return dispatch.transposed_keys(CPU, torch.bfloat16)


@dataclass(repr=False)  # of all its weights
class Loaded:
    family: str
    model: torch.nn.Module
    config: ModelConfig
    alone: dict[Any, Answer] = field(default_factory=dict)


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams


def load(family: str, path: Path) -> Loaded:
    """A random model of one of the FAMILIES; its checkpoint is made in `path`."""
    make, shape = FAMILIES[family]
    made = make(path, max_position_embeddings=2048, **shape)
    config = ModelConfig.from_pretrained(made)
    model = load_model(made, config, dtype=torch.bfloat16)
    make_invariant(model, 2048, 64)
    return Loaded(family, model, config)


def make_engine(loaded: Loaded, blocks: int = 400, host: int = 0, block_size: int = BLOCK, **options: Any) -> Engine:
    config = loaded.config
    fmt = KVFormat(
        *(config.num_layers, config.num_kv_heads, config.head_dim, block_size, torch.bfloat16),
        transposed_keys=dispatch.transposed_keys(CPU, torch.bfloat16),
    )
    keep = options.pop("keep_evicted", False)
    scheduling = SchedulerConfig(**{"max_model_len": 2048, "max_num_seqs": 64, **options})
    runner = ModelRunner(loaded.model, KVCache(fmt, blocks, host))
    return Engine(runner, BlockPool(blocks, block_size, HostTier(host), keep), scheduling, vocab_size=config.vocab_size)


def add(engine: Engine, name: str, wanted: Job) -> None:
    engine.add_request(name, wanted.prompt, wanted.params)


def collect(events: list[Any], answers: dict[str, Answer]) -> None:
    for event in events:
        answer = answers.setdefault(event.request.id, [])
        assert event.index == len(answer)
        answer.append((event.token, event.logprobs))


def run(engine: Engine, jobs: dict[str, Job]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for name, wanted in jobs.items():
        add(engine, name, wanted)
    while engine.has_work:
        collect(engine.step(), answers)
    engine.scheduler.check()
    return answers


def alone(loaded: Loaded, name: str, wanted: Job) -> Answer:
    """The oracle: nobody else, no cache, the whole prompt at once."""
    key = (name, tuple(wanted.prompt), wanted.params)
    if key not in loaded.alone:
        engine = make_engine(loaded, max_num_batched_tokens=2048, prefix_caching=False)
        loaded.alone[key] = run(engine, {name: wanted})[name]
    return loaded.alone[key]
