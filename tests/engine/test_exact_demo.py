"""The demo model in bfloat16: the same bits alone and in a batch. Tiny models would not show a rare difference."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from kernels import dispatch

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,", "To bake bread you need"]


@pytest.mark.slow
@pytest.mark.skipif(
    not dispatch.transposed_keys(torch.device("cpu"), torch.bfloat16), reason="bits are promised for native kernels"
)
def test_tokens_and_logprobs_alone_equal_those_among_many() -> None:
    llm = LLM("demo:smollm2", kv_cache_memory_bytes=256 << 20, swap_space=0, threads=1, max_num_batched_tokens=256)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(f"{text} {i}") for i in range(8) for text in PROMPTS]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=24, logprobs=2, ignore_eos=True)
        for i in range(len(prompts))
    ]
    together = llm.generate(prompts, params)
    for i in range(0, len(prompts), 4):
        alone = llm.generate([prompts[i]], [params[i]])[0].outputs[0]
        assert alone.token_ids == together[i].outputs[0].token_ids
        assert alone.logprobs == together[i].outputs[0].logprobs
