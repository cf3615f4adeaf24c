"""The bare engine: decode at several batch sizes and prefill, without Ray.

python -m benchmarks.engine [--model demo:smollm2] [--repeats 3] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.machine import describe
from engine import LLM, SamplingParams

TEXT = "The history of distributed computing began when people wanted machines to cooperate. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(describe())
    started = time.perf_counter()
    llm = LLM(options.model, enable_prefix_caching=False, max_model_len=2048, threads=options.threads)
    print(f"start                        {time.perf_counter() - started:8.1f} s")
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT * 60)[:512]
    run(llm, ids, 1, 16, 8)  # warm
    rows = [
        ("prefill 512, batch 1", 1, 512, 1, 512),
        ("decode, batch 1 (16 in)", 1, 16, 128, 128),
        ("batch 16, 128 in 128 out", 16, 128, 128, 16 * 128),
        ("batch 64, 128 in 128 out", 64, 128, 128, 64 * 128),
    ]
    for name, batch, prompt, output, tokens in rows:
        rates = [tokens / run(llm, ids, batch, prompt, output) for _ in range(options.repeats)]
        print(
            f"{name:<28} {statistics.median(rates):8.1f} tok/s   (min {min(rates):.1f}, max {max(rates):.1f}, "
            f"{options.repeats} runs)"
        )


def run(llm: LLM, ids: list[int], batch: int, prompt: int, output: int) -> float:
    """Seconds for `batch` different prompts of `prompt` tokens with `output` new tokens each."""
    prompts = [[(token + i) % 40_000 for token in ids[:prompt]] for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
