"""Where the time of steps goes: each phase's own seconds, and the work that linear layers and attention did in them.

Functions of a running engine are wrapped while they are watched. A phase's seconds exclude phases called from it, so
the phases of a step, what is left of it included, add up to the whole step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.models.llama import LlamaForCausalLM
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler
from kernels import dispatch
from kernels.metadata import AttentionMetadata

REST = "Python and rest"
PHASES: list[tuple[str, Any, str]] = [
    ("linear", Linear, "forward"),
    ("attention", dispatch, "attention"),
    ("rope and KV write", dispatch, "rope_and_cache"),
    ("norms", dispatch, "rms_norm"),
    ("norms", dispatch, "add_rms_norm"),
    ("activation", dispatch, "silu_mul"),
    ("sampling", Sampler, "sample"),
    ("sampling", LlamaForCausalLM, "greedy_tokens"),
    ("scheduling", Scheduler, "schedule"),
    ("scheduling", Scheduler, "update"),
    ("copy", KVCache, "swap_out"),
    ("copy", KVCache, "swap_in"),
    (REST, Engine, "step"),
]


@dataclass
class Work:
    """Bytes that have to come from memory at least, and floating-point operations (a multiply-add is two)."""

    bytes: int = 0
    flops: int = 0

    def __iadd__(self, other: Work) -> Work:
        self.bytes += other.bytes
        self.flops += other.flops
        return self


@dataclass
class Steps:
    """Sums over some steps."""

    count: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    work: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))  # by phase

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def gb_per_s(self, phase: str) -> float:
        return self.work[phase].bytes / self.seconds[phase] / 1e9

    def tflops(self, phase: str) -> float:
        return self.work[phase].flops / self.seconds[phase] / 1e12

    def add(self, step: Steps) -> None:
        self.count += step.count
        for phase, seconds in step.seconds.items():
            self.seconds[phase] += seconds
        for phase, work in step.work.items():
            self.work[phase] += work


@dataclass
class Recorder:
    """Takes the time of wrapped functions; sorts whole steps into pure decodes and all others."""

    clock: Callable[[], float] = time.perf_counter
    decode: Steps = field(default_factory=Steps)
    prefill: Steps = field(default_factory=Steps)  # steps with any sequence of more than one token
    _step: Steps = field(default_factory=Steps)  # the one under way
    _pure: bool = True
    _inner: list[float] = field(default_factory=list)  # seconds of phases inside each one under way

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._note_work(phase, args)
            self._inner.append(0.0)
            started = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = self.clock() - started
                self._step.seconds[phase] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed
                if phase == REST:
                    self._finish_step()

        return wrapper

    def _note_work(self, phase: str, args: tuple[Any, ...]) -> None:
        if phase == "linear":
            layer, x = args
            self._step.work[phase] += linear_work(layer.weight, len(x))
        elif phase == "attention":
            q, k_cache, _, meta = args[:4]
            self._step.work[phase] += attention_work(q, k_cache, meta)
            self._pure = meta.num_decodes == len(meta.query_lens)

    def _finish_step(self) -> None:
        self._step.count = 1
        (self.decode if self._pure else self.prefill).add(self._step)
        self._step, self._pure = Steps(), True


def linear_work(weight: Tensor, rows: int) -> Work:
    """Of rows times a weight: the weight is read once."""
    return Work(weight.numel() * weight.element_size(), 2 * rows * weight.numel())


def attention_work(q: Tensor, k_cache: Tensor, meta: AttentionMetadata) -> Work:
    """Of one layer, causal, no window: every sequence's K and V are read once; scores and values are two products."""
    heads, head_dim = q.shape[1:]
    kv_bytes = 2 * k_cache.shape[2] * head_dim * k_cache.element_size()
    pairs = sum(
        queries * (context - queries) + queries * (queries + 1) // 2
        for queries, context in zip(meta.query_lens, meta.context_lens, strict=True)
    )
    return Work(kv_bytes * sum(meta.context_lens), 2 * 2 * heads * head_dim * pairs)


@contextmanager
def watch() -> Iterator[Recorder]:
    """Record the steps of engines of this process that run inside."""
    recorder = Recorder()
    with ExitStack() as stack:
        for phase, owner, name in PHASES:
            stack.enter_context(patch.object(owner, name, recorder.wrap(phase, getattr(owner, name))))
        yield recorder
