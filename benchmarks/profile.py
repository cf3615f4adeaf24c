"""Where a step's time goes, against what the machine can do.

    python -m benchmarks.profile [--model demo:smollm2] [--batch 1 16 64] [--set threads=1 ...]

Phases are measured by timing the calls of one run (benchmarks/phases.py). Limits are probed in the same run with the
same threads: memory read (GB/s) and bfloat16 matrix product (FLOP/s).
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.cases import prompts
from benchmarks.engine import add_options, run, start
from benchmarks.machine import describe
from benchmarks.phases import PHASES, Steps, watch
from engine.host import memory_bandwidth
from engine.kv_cache import KVCache
from engine.layers.linear import Linear

PROBED_BYTES = 512 << 20
COPIED_BLOCKS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    add_options(parser)
    options = parser.parse_args()
    print(describe())
    llm = start(options)
    memory, product = memory_bandwidth(PROBED_BYTES) / 1e9, bf16_tflops()
    print(f"limits: memory read {memory:.1f} GB/s, bf16 matrix product {product:.2f} TFLOP/s")
    for batch in options.batch:
        run(llm, prompts(batch, 128), 8)
        with watch() as seen:
            run(llm, prompts(batch, 128), 64)
        print_steps(f"decode, batch {batch}, contexts of 128 to 192", seen.decode, memory, product)
    run(llm, prompts(1, 512), 1)
    with watch() as seen:
        run(llm, prompts(1, 512), 1)
    print_steps("prefill 512", seen.prefill, memory, product)
    out, back = copy_gb_per_s(llm.engine.executor.kv)  # type: ignore[attr-defined]
    print(f"copy of KV blocks: to the host tier {out:.1f} GB/s, back {back:.1f} GB/s")


def print_steps(title: str, steps: Steps, memory: float, product: float) -> None:
    """A line a phase; for linear layers and attention what they reached, of limits in GB/s and TFLOP/s."""
    print(f"{title}: {steps.total / steps.count * 1e3:.2f} ms a step")
    for phase in dict.fromkeys(name for name, _, _ in PHASES):
        seconds = steps.seconds[phase]
        reached = ""
        if phase in steps.work:
            read, done = steps.gb_per_s(phase), steps.tflops(phase)
            reached = f"   {read:6.2f} GB/s ({read / memory:4.0%}), {done:6.3f} TFLOP/s ({done / product:4.0%})"
        print(f"  {phase:<18} {seconds / steps.count * 1e3:7.2f} ms {seconds / steps.total:6.1%}{reached}")


def copy_gb_per_s(kv: KVCache) -> tuple[float, float]:
    """Block bytes a second to the host tier and back, the second of two runs: host memory is mapped on first use."""
    count = min(COPIED_BLOCKS, len(kv.slabs), len(kv.host))
    if not count:
        return 0.0, 0.0
    pairs = [(i, i) for i in range(count)]
    for _ in range(2):
        times = [time.perf_counter()]
        for copy in (kv.swap_out, kv.swap_in):
            copy(pairs)
            times.append(time.perf_counter())
    size = count * kv.format.block_bytes / 1e9
    return size / (times[1] - times[0]), size / (times[2] - times[1])


def bf16_tflops(n: int = 2048, repeats: int = 4) -> float:
    """The best of a few products, after one to warm up."""
    layer = Linear(n, n)
    layer.weight.data = torch.randn(n, n).bfloat16()
    layer.finish_loading()
    x = torch.randn(n, n).bfloat16()
    best = float("inf")
    for _ in range(repeats + 1):
        started = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best / 1e12


if __name__ == "__main__":
    main()
