"""The accounting of the profile: own time by phase, and the work that rates are computed from."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.cases import prompts
from benchmarks.engine import add_options, run, setting, start
from benchmarks.phases import REST, Recorder, Steps, Work, attention_work, linear_work, watch
from benchmarks.profile import copy_gb_per_s, print_steps
from engine import LLM
from engine.kv_cache import KVCache, KVFormat
from engine.layers.linear import Linear
from kernels.metadata import AttentionMetadata


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def metadata(query_lens: list[int], context_lens: list[int]) -> AttentionMetadata:
    ones = sum(n == 1 for n in query_lens)
    none = torch.zeros(1, dtype=torch.int32)
    return AttentionMetadata(query_lens, context_lens, ones, none, none, 16)


def test_own_times_of_nested_phases_add_up_to_the_step() -> None:
    clock = Clock()
    recorder = Recorder(clock)

    def spend(seconds: float) -> None:
        clock.now += seconds

    inner = recorder.wrap("norms", lambda: spend(2))

    def outer() -> None:
        spend(3)
        inner()
        inner()

    middle = recorder.wrap("sampling", outer)

    def step() -> None:
        spend(1)
        middle()
        spend(10)

    for _ in range(2):
        recorder.wrap(REST, step)()
        spend(100)  # outside of steps
    assert recorder.decode.count == 2
    assert dict(recorder.decode.seconds) == {"norms": 8, "sampling": 6, REST: 22}
    assert recorder.decode.total == 36


def test_a_failing_call_is_counted_and_leaves_the_nesting_right() -> None:
    clock = Clock()
    recorder = Recorder(clock)

    def fail() -> None:
        clock.now += 2
        raise ValueError

    def step() -> None:
        clock.now += 1
        with pytest.raises(ValueError):
            recorder.wrap("norms", fail)()

    recorder.wrap(REST, step)()
    assert dict(recorder.decode.seconds) == {"norms": 2, REST: 1}


def test_steps_with_a_chunk_count_as_prefill() -> None:
    recorder = Recorder(Clock())
    q, k_cache = torch.zeros(3, 4, 8), torch.zeros(1, 16, 2, 8)
    attention = recorder.wrap("attention", lambda *args: None)
    for query_lens in ([1, 1], [1, 2], [5], [1]):
        recorder.wrap(REST, lambda lens=query_lens: attention(q, k_cache, k_cache, metadata(lens, [9] * len(lens))))()
    assert (recorder.decode.count, recorder.prefill.count) == (2, 2)


def test_linear_work_reads_the_weight_once() -> None:
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert linear_work(weight, 7) == Work(bytes=30, flops=2 * 3 * 5 * 7)


@pytest.mark.parametrize(("query_lens", "context_lens"), [([1], [1]), ([1, 1, 4], [9, 30, 4]), ([1, 5], [7, 23])])
def test_attention_work_counts_what_each_row_sees(query_lens: list[int], context_lens: list[int]) -> None:
    heads, kv_heads, head_dim = 6, 2, 8
    q = torch.zeros(sum(query_lens), heads, head_dim, dtype=torch.bfloat16)
    k_cache = torch.zeros(4, 16, kv_heads, head_dim, dtype=torch.bfloat16)
    flops = 0
    for queries, context in zip(query_lens, context_lens, strict=True):
        for position in range(context - queries, context):
            for _ in range(position + 1):  # each visible key: a dot product, and a value added
                flops += heads * (2 * head_dim + 2 * head_dim)
    bytes_read = sum(context_lens) * kv_heads * head_dim * 2 * 2
    assert attention_work(q, k_cache, metadata(query_lens, context_lens)) == Work(bytes_read, flops)


def test_rates() -> None:
    steps = Steps(1, {"linear": 0.5}, {"linear": Work(2 * 10**9, 10**12)})
    assert (steps.gb_per_s("linear"), steps.tflops("linear")) == (4.0, 2.0)


def test_a_profiled_run(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every phase of a real engine is seen, with the work its shapes mean, and the functions are put back."""
    llm = LLM(str(tiny_llama), max_model_len=64, enable_prefix_caching=False, skip_tokenizer_init=True)
    forward = Linear.forward
    with watch() as seen:
        run(llm, prompts(3, 10), 5)
    assert Linear.forward is forward
    assert (seen.prefill.count, seen.decode.count) == (1, 4)
    model = llm.engine.executor.model  # type: ignore[attr-defined]
    linears = [module.weight for module in model.modules() if isinstance(module, Linear)]
    assert seen.decode.work["linear"].bytes == 4 * sum(4 * weight.numel() for weight in linears)
    assert seen.decode.work["linear"].flops == 4 * 3 * sum(2 * weight.numel() for weight in linears)
    kv = llm.engine.executor.kv  # type: ignore[attr-defined]
    per_token = kv.format.block_bytes // kv.format.block_size
    assert seen.decode.work["attention"].bytes == 3 * (11 + 12 + 13 + 14) * per_token
    print_steps("decode", seen.decode, 10.0, 1.0)
    printed = capsys.readouterr().out
    for phase in ("linear", "attention", "norms", "activation", "sampling", "scheduling", REST):
        assert seen.decode.seconds[phase] > 0
        assert phase in printed
    assert "copy" in printed and "GB/s" in printed and "TFLOP/s" in printed


def test_copies_are_measured_both_ways() -> None:
    kv = KVCache(KVFormat(2, 1, 8, 16, torch.float32), num_blocks=8, host_slots=4)
    kv.slabs.fill_(3)
    assert all(rate > 0 for rate in copy_gb_per_s(kv))
    assert kv.host.eq(3).all()
    assert copy_gb_per_s(KVCache(kv.format, num_blocks=8)) == (0.0, 0.0)


def test_any_parameter_of_the_engine_can_be_set(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = [
        "--model",
        str(tiny_llama),
        "--set",
        "batch-invariant=false",
        "max_model_len=32",
        "--set",
        "dtype=bfloat16",
    ]
    llm = start(parser.parse_args(given))
    assert (llm.config.batch_invariant, llm.config.max_model_len, llm.config.dtype) == (False, 32, "bfloat16")
    assert "batch_invariant false" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="batch_invariant is 'perhaps', must be true or false"):
        start(parser.parse_args(["--model", str(tiny_llama), "--set", "batch_invariant=perhaps"]))
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=VALUE"):
        setting("threads")
