"""Where a step's time goes, against what the machine can do.

    python -m benchmarks.profile [--model demo:smollm2] [--batch 1 16 64] [--threads N]

Phases are measured by timing the calls of one run; what remains of a step is Python. Limits are probed in the same run:
memory read (GB/s) and bf16 matrix product (FLOP/s).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine import TEXT, run
from benchmarks.machine import describe
from engine import LLM
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler
from kernels import dispatch

PHASES: list[tuple[str, Any, str]] = [
    ("linear", Linear, "forward"),
    ("attention", dispatch, "attention"),
    ("rope and KV write", dispatch, "rope_and_cache"),
    ("norms", dispatch, "add_rms_norm"),
    ("activation", dispatch, "silu_mul"),
    ("sampling", Sampler, "sample"),
    ("scheduling", Scheduler, "schedule"),
    ("scheduling", Scheduler, "update"),
    ("copy", KVCache, "swap_out"),
    ("copy", KVCache, "swap_in"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(describe())
    llm = LLM(options.model, enable_prefix_caching=False, max_model_len=2048, threads=options.threads)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT * 60)[:512]
    weights = linear_bytes(llm)
    memory, flops = memory_gb_per_s(), bf16_flops()
    print(f"limits: memory read {memory:.1f} GB/s, bf16 matrix product {flops / 1e12:.2f} TFLOP/s")
    for batch in options.batch:
        run(llm, ids, batch, 128, 8)
        with phases() as times:
            run(llm, ids, batch, 128, 64)
        report(f"decode, batch {batch}", times, llm.engine)
        per_step = times["linear"] / times["steps"]
        print(f"  weights read at {weights / per_step / 1e9:.1f} GB/s of {memory:.1f} (prefill included)")
    run(llm, ids, 1, 512, 1)
    with phases() as times:
        run(llm, ids, 1, 512, 1)
    report("prefill 512", times, llm.engine)
    done = 2 * 512 * weights / 2  # the head, which runs on one row, included
    print(f"  linear layers at {done / times['linear'] / 1e12:.2f} TFLOP/s of {flops / 1e12:.2f}")


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds by phase of what runs inside."""
    times: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                times[name] += time.perf_counter() - started
                times["steps"] += name == "step"

        return wrapper

    patches = [patch.object(owner, name, timed(phase, getattr(owner, name))) for phase, owner, name in PHASES]
    patches.append(patch.object(Engine, "step", timed("step", Engine.step)))
    for each in patches:
        each.start()
    try:
        yield times
    finally:
        for each in patches:
            each.stop()


def report(title: str, times: dict[str, float], engine: Engine) -> None:
    steps, total = times["steps"], times["step"]
    print(f"{title}: {total / steps * 1e3:.2f} ms a step")
    rest = total
    for phase in dict.fromkeys(name for name, _, _ in PHASES):
        rest -= times[phase]
        print(f"  {phase:<18} {times[phase] / steps * 1e3:7.2f} ms {times[phase] / total:6.1%}")
    print(f"  {'Python and rest':<18} {rest / steps * 1e3:7.2f} ms {rest / total:6.1%}")


def linear_bytes(llm: LLM) -> int:
    """Bytes of all linear weights: what a decode step reads at least."""
    model = llm.engine.executor.model  # type: ignore[attr-defined]
    return sum(m.weight.numel() * m.weight.element_size() for m in model.modules() if isinstance(m, Linear))


def memory_gb_per_s(size: int = 512 << 20) -> float:
    from engine.host import memory_bandwidth

    return memory_bandwidth(size) / 1e9


def bf16_flops(n: int = 2048) -> float:
    layer = Linear(n, n)
    layer.weight.data = torch.randn(n, n).bfloat16()
    layer.finish_loading()
    x = torch.randn(n, n).bfloat16()
    layer(x)
    started = time.perf_counter()
    for _ in range(4):
        layer(x)
    return 4 * 2 * n**3 / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
