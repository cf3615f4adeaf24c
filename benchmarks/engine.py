"""The bare engine: decode at several batch sizes and prefill, without Ray.

    python -m benchmarks.engine [--model demo:smollm2] [--repeats 3] [--quick] [--set batch_invariant=false ...]

What torch's kernels lose against the native ones: run it with a C compiler on the PATH, and without one and
with XDG_CACHE_HOME at an empty folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from benchmarks.machine import describe
from engine import LLM, SamplingParams
from engine.config import ConfigError
from kernels import dispatch

TEXT = "The history of distributed computing began when people wanted machines to cooperate. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    add_options(parser)
    options = parser.parse_args()
    print(describe())
    llm = start(options)
    ids = prompt_ids(llm)
    run(llm, ids, 1, 16, 8)  # warm
    output = 4 if options.quick else 128
    rows = [
        ("prefill 512, batch 1", 1, 512, 1, 512),
        (f"decode, batch 1 (16 in, {output} out)", 1, 16, output, output),
        (f"batch 16, 128 in {output} out", 16, 128, output, 16 * output),
        (f"batch 64, 128 in {output} out", 64, 128, output, 64 * output),
    ]
    for name, batch, prompt, output, tokens in rows:
        rates = [tokens / run(llm, ids, batch, prompt, output) for _ in range(options.repeats)]
        print(
            f"{name:<34} {statistics.median(rates):8.1f} tok/s   (min {min(rates):.1f}, max {max(rates):.1f}, "
            f"{options.repeats} runs)"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `start`."""
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        type=setting,
        help="parameters of the engine by any of their names, as in docs/parameters.md",
    )


def setting(text: str) -> tuple[str, str]:
    """`name=value` as a pair. Raises ArgumentTypeError for anything else."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, such as batch_invariant=false")
    return name.lstrip("-").replace("-", "_"), value


def start(options: argparse.Namespace) -> LLM:
    """The engine that `add_options` describes; prints how long it took and what it computes with.

    Ends the process with one line where a parameter is wrong.
    """
    started = time.perf_counter()
    try:
        llm = LLM(options.model, **{"enable_prefix_caching": False, "max_model_len": 2048, **dict(options.set)})
    except (ConfigError, ValueError) as error:
        sys.exit(f"error: {error}")
    seconds = time.perf_counter() - started
    kv = llm.engine.executor.kv.format  # type: ignore[attr-defined]
    kernels = "torch's" if dispatch.numerics(torch.device("cpu"), kv.dtype) == "torch" else "native"
    dtype = str(kv.dtype).removeprefix("torch.")
    invariant = str(llm.config.batch_invariant).lower()
    print(f"{dtype}, {kernels} kernels, {torch.get_num_threads()} threads, batch_invariant {invariant}")
    print(f"{'start':<34} {seconds:8.1f} s")
    return llm


def prompt_ids(llm: LLM) -> list[int]:
    """512 token ids."""
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(TEXT * 60)[:512]


def run(llm: LLM, ids: list[int], batch: int, prompt: int, output: int) -> float:
    """Seconds for `batch` different prompts of `prompt` tokens with `output` new tokens each."""
    vocab = llm.engine.vocab_size
    prompts = [[(token + i) % vocab for token in ids[:prompt]] for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
