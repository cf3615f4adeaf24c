"""What each working parameter of the manuals changes, seen at an engine; EFFECTS says where the others are seen."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.build import build_engine
from engine.config import ConfigError
from engine.engine import Engine
from engine.options.option import canonical
from engine.runner import ModelRunner
from engine.step import StepPlan
from serving.logs import configure_logging
from tests.models import make_llama

ROOT = Path(__file__).parents[2]
HERE = "tests/engine/test_parameters.py"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG, SHORT = [7 + i % 50 for i in range(100)], [5, 6, 7]

CLUSTER = "tests/integration/test_cluster_api.py"
EFFECTS = {
    "host": "tests/integration/test_commands.py::test_blade_llm_server_serves",
    "port": "tests/integration/test_commands.py::test_blade_llm_server_serves",
    "log_level": f"{HERE}::test_log_level",
    "max_gpu_memory_utilization": f"{HERE}::test_max_gpu_memory_utilization",
    "gpu_memory_utilization": f"{HERE}::test_max_gpu_memory_utilization",
    "preempt_strategy": f"{HERE}::test_preempt_strategy",
    "preemption_mode": f"{HERE}::test_preempt_strategy",
    "ragged_flash_max_batch_tokens": f"{HERE}::test_max_num_batched_tokens",
    "max_num_batched_tokens": f"{HERE}::test_max_num_batched_tokens",
    "disable_prompt_cache": f"{HERE}::test_prefix_caching",
    "enable_prefix_caching": f"{HERE}::test_prefix_caching",
    "prompt_cache_enable_swap": f"{HERE}::test_prompt_cache_enable_swap",
    "max_queue_time": f"{HERE}::test_max_queue_time",
    "model": f"{HERE}::test_model",
    "dtype": f"{HERE}::test_dtype",
    "skip_tokenizer_init": "tests/integration/test_limits.py::test_without_a_tokenizer_ids_go_in_and_come_out",
    "load_format": f"{HERE}::test_load_format",
    "max_model_len": f"{HERE}::test_max_model_len",
    "block_size": f"{HERE}::test_block_size",
    "max_num_seqs": f"{HERE}::test_max_num_seqs",
    "swap_space": f"{HERE}::test_swap_space",
    "num_gpu_blocks_override": f"{HERE}::test_num_gpu_blocks_override",
    "enable_chunked_prefill": f"{HERE}::test_enable_chunked_prefill",
    "scheduler_delay_factor": f"{HERE}::test_scheduler_delay_factor",
    "scheduling_policy": f"{HERE}::test_scheduling_policy",
    "device": f"{HERE}::test_device",
    "served_model_name": "tests/integration/test_api.py::test_models_are_listed",
    "seed": f"{HERE}::test_seed",
    "threads": f"{HERE}::test_threads",
    "enable_llumnix": f"{CLUSTER}::test_the_parameters_of_rescheduling_have_their_effects",
    "llumnix_config": f"{CLUSTER}::test_the_parameters_of_rescheduling_have_their_effects",
    "kv_transfer_config": f"{CLUSTER}::test_the_parameters_of_rescheduling_have_their_effects",
}


def working_rows() -> list[str]:
    with (ROOT / "tests/data/parameters.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return sorted({canonical(row["name"].lstrip("-")) for row in rows if row["works"] == "yes"})


@pytest.mark.parametrize("name", working_rows())
def test_the_effect_of_every_working_parameter_is_tested(name: str) -> None:
    file, test = EFFECTS[name].split("::")
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "swap_space": 0.01, "threads": 1}
    if not options.keys() & {"num_gpu_blocks_override", "gpu_memory_utilization", "max_gpu_memory_utilization"}:
        defaults["kv_cache_memory_bytes"] = 8 << 20
    return LLM(str(path), **{**defaults, **options})


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.engine.executor, ModelRunner)
    return llm.engine.executor


def plans_of(llm: LLM) -> list[StepPlan]:
    """The plans of all steps from now on."""
    plans: list[StepPlan] = []
    execute = llm.engine.executor.execute
    llm.engine.executor.execute = lambda plan: (plans.append(plan), execute(plan))[1]  # type: ignore[method-assign]
    return plans


def tokens_of(llm: LLM, prompt: list[int] = SHORT, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def finished(engine: Engine) -> list[str]:
    """Ids in the order in which they end."""
    order = []
    while engine.has_work:
        order += [event.request.id for event in engine.step() if event.finish_reason]
    return order


def test_model(tiny_llama: Path, tiny_qwen3: Path) -> None:
    llama, qwen3 = make(tiny_llama), make(tiny_qwen3)
    assert type(runner_of(llama).model) is not type(runner_of(qwen3).model)
    assert tokens_of(llama) != tokens_of(qwen3)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("half", torch.bfloat16),
        ("auto", torch.float32),
        ("float", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_dtype(
    dtype: str, expected: torch.dtype, tiny_llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("ferry"), "propagate", True)
    with caplog.at_level(logging.INFO, "ferry"):
        llm = make(tiny_llama, dtype=dtype)
    assert {weight.dtype for weight in runner_of(llm).model.parameters()} == {expected}
    assert runner_of(llm).kv.format.dtype == expected
    assert ("half means bfloat16 on CPU" in caplog.text) == (dtype == "half")
    assert len(tokens_of(llm)) == 12


def test_half_weights_keep_auto_at_bfloat16(tmp_path: Path) -> None:
    llm = make(make_llama(tmp_path, dtype=torch.float16), dtype="auto")
    assert runner_of(llm).kv.format.dtype == torch.bfloat16


def test_load_format(tiny_llama: Path) -> None:
    auto, files, dummy = (make(tiny_llama, load_format=name) for name in ("auto", "safetensors", "dummy"))
    assert tokens_of(auto) == tokens_of(files) != tokens_of(dummy)
    with pytest.raises(ValueError, match="gguf"):
        make(tiny_llama, load_format="gguf")


def test_device(tiny_llama: Path) -> None:
    for device in ("cpu", "auto"):
        assert runner_of(make(tiny_llama, device=device)).kv.slabs.device.type == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        make(tiny_llama, device="cuda")


def test_threads(tiny_llama: Path) -> None:
    for threads in (2, 1):
        make(tiny_llama, threads=threads)
        assert torch.get_num_threads() == threads


def test_seed(tiny_llama: Path) -> None:
    def sample(seed: int, request_id: str, own: int | None = None) -> list[int]:
        engine = make(tiny_llama, seed=seed).engine
        params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=own)
        engine.add_request(request_id, SHORT, params)
        return [event.token for _ in range(12) for event in engine.step() if event.token is not None]

    assert len(sample(1, "a")) == 12
    assert sample(1, "a") == sample(1, "a")
    assert sample(1, "a") != sample(2, "a")
    assert sample(1, "a") != sample(1, "b")
    assert sample(1, "a", own=9) == sample(2, "b", own=9)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "ragged_flash_max_batch_tokens"])
def test_max_num_batched_tokens(name: str, tiny_llama: Path) -> None:
    for budget in (16, 64):
        llm = make(tiny_llama, **{name: budget})
        plans = plans_of(llm)
        tokens_of(llm, LONG)
        assert max(plan.num_tokens for plan in plans) == budget


def test_max_num_seqs(tiny_llama: Path) -> None:
    for seats in (2, 5):
        llm = make(tiny_llama, max_num_seqs=seats)
        plans = plans_of(llm)
        llm.generate([[i, i + 1] for i in range(10, 17)], GREEDY)
        assert max(len(plan.work) for plan in plans) == seats


def test_enable_chunked_prefill(tiny_llama: Path) -> None:
    def prompts(llm: LLM) -> list[int]:
        plans = plans_of(llm)
        llm.generate([LONG, LONG[::-1]], GREEDY)
        return [work.count for plan in plans for work in plan.work if work.count > 1]

    options = {"max_num_batched_tokens": 128, "max_model_len": 128, "enable_prefix_caching": False}
    assert prompts(make(tiny_llama, enable_chunked_prefill=False, **options)) == [100, 100]
    assert prompts(make(tiny_llama, enable_chunked_prefill=True, **options)) == [100, 28, 72]


def test_scheduling_policy(tiny_llama: Path) -> None:
    def order(policy: str) -> list[str]:
        engine = make(tiny_llama, scheduling_policy=policy, max_num_seqs=1).engine
        for name, priority in (("late", 5), ("normal", 0), ("urgent", -3)):
            engine.add_request(name, SHORT, GREEDY, priority=priority)
        return finished(engine)

    assert order("fcfs") == ["late", "normal", "urgent"]
    assert order("priority") == ["urgent", "normal", "late"]


def test_scheduler_delay_factor(tiny_llama: Path) -> None:
    def starts(factor: float) -> list[int]:
        """The step in which each of two prompts starts, one second a step."""
        llm = make(tiny_llama, scheduler_delay_factor=factor)
        seconds = iter(range(1000))
        llm.engine.clock = llm.engine.scheduler.clock = lambda: float(next(seconds))
        plans = plans_of(llm)
        llm.engine.add_request("a", SHORT, GREEDY)
        llm.engine.step()
        llm.engine.add_request("b", LONG, GREEDY)
        finished(llm.engine)
        return [index for index, plan in enumerate(plans) for _ in plan.starts]

    assert starts(0.0) == [0, 1]
    prompt, second = starts(4.0)
    assert prompt == 0 and 1 < second < 12


def test_preempt_strategy(tiny_llama: Path) -> None:
    def copies(**strategy: str) -> tuple[int, int]:
        llm = make(tiny_llama, num_gpu_blocks_override=10, max_model_len=128, **strategy)
        plans = plans_of(llm)
        llm.generate([LONG[:60], LONG[20:80]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        assert llm.engine.stats().preemptions > 0
        return sum(len(plan.swap_out) for plan in plans), sum(len(plan.swap_in) for plan in plans)

    assert copies(preempt_strategy="RECOMPUTE") == copies(preemption_mode="recompute") == (0, 0)
    assert min(copies(preempt_strategy="SWAP")) > 0
    assert min(copies(preempt_strategy="AUTO")) > 0  # nothing has been measured yet: swapping is the first guess


@pytest.mark.parametrize("option", [{"disable_prompt_cache": True}, {"enable_prefix_caching": False}], ids=str)
def test_prefix_caching(option: dict[str, Any], tiny_llama: Path) -> None:
    def cached(llm: LLM) -> list[int]:
        return [llm.generate(LONG, GREEDY)[0].num_cached_tokens for _ in range(2)]

    assert cached(make(tiny_llama)) == [0, 96]
    assert cached(make(tiny_llama, **option)) == [0, 0]


def test_prompt_cache_enable_swap(tiny_llama: Path) -> None:
    def cached(llm: LLM) -> int:
        for prompt in (LONG, [200] * 100, [201] * 100):  # 10 blocks hold one of them
            llm.generate(prompt, GREEDY)
        return llm.generate(LONG, GREEDY)[0].num_cached_tokens

    small = {"num_gpu_blocks_override": 10, "max_model_len": 128}
    assert cached(make(tiny_llama, **small)) == 0
    assert cached(make(tiny_llama, prompt_cache_enable_swap=True, **small)) == 96


def test_max_queue_time(tiny_llama: Path) -> None:
    def ended(limit: int) -> list[tuple[str, str | None]]:
        engine = build_engine(replace(make(tiny_llama, max_num_seqs=1).config, max_queue_time=limit))
        now = [100.0]
        engine.clock = engine.scheduler.clock = lambda: now[0]
        for name in ("runs", "waits"):
            engine.add_request(name, SHORT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        engine.step()
        now[0] += 10.0
        events = [event for _ in range(60) for event in engine.step()]
        return [(event.request.id, event.error) for event in events if event.error or event.finish_reason]

    assert ended(9) == [("waits", "queue_timeout"), ("runs", None)]
    assert ended(11) == [("runs", None), ("waits", None)]


def test_max_model_len(tiny_llama: Path) -> None:
    llm = make(tiny_llama, max_model_len=40)
    assert len(tokens_of(llm, [5] * 30, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))) == 10
    with pytest.raises(ValueError, match="40 tokens"):
        tokens_of(llm, [5] * 40)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_block_size(size: int, tiny_llama: Path) -> None:
    llm = make(tiny_llama, block_size=size)
    assert runner_of(llm).kv.format.block_size == llm.engine.scheduler.pool.block_size == size
    prompt = [7] * 300
    tokens_of(llm, prompt)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 299 // size * size


def test_num_gpu_blocks_override(tiny_llama: Path) -> None:
    llm = make(tiny_llama, num_gpu_blocks_override=7)
    assert llm.engine.stats().total_blocks == runner_of(llm).kv.slabs.shape[0] == 7
    with pytest.raises(ValueError, match="at most|must be in"):
        tokens_of(llm, [5] * 7 * 16)


def test_swap_space(tiny_llama: Path) -> None:
    for gib in (0.0, 0.01, 0.02):
        runner = runner_of(make(tiny_llama, swap_space=gib))
        assert runner.kv.host.shape[0] == int(gib * (1 << 30)) // runner.kv.format.block_bytes


@pytest.mark.parametrize("name", ["max_gpu_memory_utilization", "gpu_memory_utilization"])
def test_max_gpu_memory_utilization(name: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, small = 16 << 20, {"max_num_batched_tokens": 64, "max_num_seqs": 64, "swap_space": 0.0}
    monkeypatch.setattr("engine.memory.memory_limit_bytes", lambda: limit)
    low, high = (make(tiny_llama, **{name: share}, **small).engine.stats().total_blocks for share in (0.25, 0.5))
    block = runner_of(make(tiny_llama)).kv.format.block_bytes
    assert low > 0 and abs((high - low) - 0.25 * limit / block) <= 1


def test_log_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ferry = logging.getLogger("ferry")
    for attribute in ("handlers", "level", "propagate"):
        monkeypatch.setattr(ferry, attribute, [] if attribute == "handlers" else getattr(ferry, attribute))
    engine = logging.getLogger("ferry.engine")
    for level, shown in (("DEBUG", "d i w e"), ("INFO", "i w e"), ("WARNING", "w e"), ("ERROR", "e")):
        configure_logging(level)
        for write, text in ((engine.debug, "d"), (engine.info, "i"), (engine.warning, "w"), (engine.error, "e")):
            write(text)
        assert [line[-1] for line in capsys.readouterr().err.splitlines()] == shown.split()
