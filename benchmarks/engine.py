"""The bare engine: decode at several batch sizes and prefill, without Ray.

    python -m benchmarks.engine [--model demo:smollm2] [--repeats 3] [--quick] [--set batch_invariant=false ...]

What batch_invariant and a missing compiler cost: benchmarks/factors.py. Against another engine: benchmarks/peer.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch

from benchmarks.cases import cases
from benchmarks.machine import describe
from engine import LLM, SamplingParams
from engine.config import ConfigError
from kernels import dispatch

WARM_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="end with a line for benchmarks/compare.py")
    add_options(parser)
    options = parser.parse_args()
    print(describe())
    llm = start(options)
    ready_at = time.monotonic()
    rates: dict[str, list[float]] = {}
    for case in cases(options.quick):
        run(llm, case.prompts, min(WARM_TOKENS, case.output))
        seen = [case.tokens / run(llm, case.prompts, case.output) for _ in range(options.repeats)]
        rates[case.name] = seen
        print(
            f"{case.name:<34} {statistics.median(seen):8.1f} tok/s   (min {min(seen):.1f}, max {max(seen):.1f}, "
            f"{options.repeats} runs)"
        )
    if options.json:
        facts = {"kernels": kernels(llm), "torch": torch.__version__, "Python": platform.python_version()}
        print(json.dumps({"ready_at": ready_at, "rates": rates, "facts": facts}))


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
    dtype = str(kv.dtype).removeprefix("torch.")
    invariant = str(llm.config.batch_invariant).lower()
    print(f"{dtype}, {kernels(llm)} kernels, {torch.get_num_threads()} threads, batch_invariant {invariant}")
    print(f"{'start':<34} {seconds:8.1f} s")
    return llm


def kernels(llm: LLM) -> str:
    """Whose kernels an engine computes with: "native" or "torch's"."""
    dtype = llm.engine.executor.kv.format.dtype  # type: ignore[attr-defined]
    return "torch's" if dispatch.numerics(torch.device("cpu"), dtype) == "torch" else "native"


def run(llm: LLM, prompts: list[list[int]], output: int) -> float:
    """Seconds for all prompts with `output` new tokens each."""
    vocab = llm.engine.vocab_size
    within = [[token % vocab for token in prompt] for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    done = llm.generate(within, params)
    seconds = time.perf_counter() - started
    if any(len(answer.outputs[0].token_ids) != output for answer in done):
        sys.exit(f"error: not every prompt was continued by {output} tokens")
    return seconds


if __name__ == "__main__":
    main()
