"""The demo model in bfloat16: the same bits alone, in a batch and from the cache. Tiny models would not show a rare
difference."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.llm import Logprob, RequestOutput
from kernels import dispatch

BLOCK = 16
TEXTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,", "To bake bread you need"]
LONG = "In the middle of the journey of our life I found myself within a dark wood, for the straight way was lost. "
SHARED_TOKENS = 300  # attention merges its running states at multiples of 256
COUNT, LONG_EVERY, ALONE_EVERY = 31, 5, 3  # no two have a common divisor, nor with 2: all kinds meet
PICKED = range(0, COUNT, ALONE_EVERY)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dispatch.transposed_keys(torch.device("cpu"), torch.bfloat16), reason="bits are promised for native kernels"
    ),
]


def prompts_of(llm: LLM) -> list[list[int]]:
    """Short ones and, every LONG_EVERY, one of more than SHARED_TOKENS, which all begin alike."""
    assert llm.tokenizer is not None
    shared = llm.tokenizer.encode(LONG * 20)[:SHARED_TOKENS]
    assert len(shared) == SHARED_TOKENS
    prompts = []
    for i in range(COUNT):
        own = llm.tokenizer.encode(f"{i}: {TEXTS[i % len(TEXTS)]}")
        prompts.append([*shared, *own] if i % LONG_EVERY == 0 else own)
    return prompts


PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=20, logprobs=2, ignore_eos=True)
    for i in range(COUNT)
]


Answer = tuple[list[int], list[dict[int, Logprob]] | None]


def start(threads: int) -> LLM:
    return LLM(
        "demo:smollm2", kv_cache_memory_bytes=256 << 20, swap_space=0, threads=threads, max_num_batched_tokens=256
    )


def forget(llm: LLM) -> None:
    """Empty the prefix cache."""
    pool = llm.engine.scheduler.pool
    pool.release(pool.allocate(pool.available, spill=False), forget=True)
    assert pool.cached == 0


def answer(output: RequestOutput) -> Answer:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    """The oracle: picked requests, each for itself at one thread and without a cache."""
    before = torch.get_num_threads()
    llm = start(threads=1)
    prompts, found = prompts_of(llm), {}
    for i in PICKED:
        forget(llm)
        (output,) = llm.generate([prompts[i]], [PARAMS[i]])
        assert output.num_cached_tokens == 0
        found[i] = answer(output)
    torch.set_num_threads(before)
    return found


def test_the_oracle_has_every_kind() -> None:
    kinds = {(PARAMS[i].greedy, i % LONG_EVERY == 0) for i in PICKED}
    assert len(kinds) == 4


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_and_logprobs_alone_equal_those_among_many(threads: int, alone: dict[int, Answer]) -> None:
    before = torch.get_num_threads()
    llm = start(threads)
    prompts = prompts_of(llm)
    try:
        cold = llm.generate(prompts, PARAMS)
        again = llm.generate(prompts, PARAMS)  # each finds all its full blocks
        for i in PICKED:
            assert answer(cold[i]) == alone[i], i
            assert answer(again[i]) == alone[i], i
            assert again[i].num_cached_tokens == (len(prompts[i]) - 1) // BLOCK * BLOCK
        forget(llm)
        llm.generate([[*prompts[0][:SHARED_TOKENS], 5, 6, 7]], SamplingParams(max_tokens=1))
        partly = llm.generate(prompts, PARAMS)  # the long ones find what they share
        for i in PICKED:
            assert answer(partly[i]) == alone[i], i
            assert partly[i].num_cached_tokens == (SHARED_TOKENS // BLOCK * BLOCK if i % LONG_EVERY == 0 else 0)
    finally:
        torch.set_num_threads(before)
