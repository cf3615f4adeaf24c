"""Offline generation against transformers: the same greedy tokens, however the work is cut and batched."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.build import weights_id
from engine.config import SERVICE_GROUPS, ConfigError, working_options
from engine.event import NOT_FINITE
from tests.models import make_llama, make_qwen3

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "llama, wide heads, 7:1": (
        make_llama,
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 56},
    ),
    "llama, tied": (make_llama, {"tie_word_embeddings": True}),
    "qwen3": (make_qwen3, {}),
    "qwen3, narrow heads, tied": (make_qwen3, {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3, 7:1": (make_qwen3, {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 32}),
}


def mixed_prompts(count: int, longest: int = 150) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(4, 250) for _ in range(source.randrange(1, longest))] for _ in range(count)]


def reference(path: Path, prompts: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
    """transformers' greedy tokens in float32, each prompt alone; `options` are those of its generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def make(path: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "swap_space": 0.01, "threads": 1}
    return LLM(str(path), **{**defaults, **options})


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    maker, overrides = SHAPES[shape]
    path = maker(tmp_path, **overrides)
    prompts = mixed_prompts(32)
    llm = make(path, max_num_batched_tokens=64, max_num_seqs=32)
    assert tokens_of(llm, prompts) == reference(path, prompts, 24)


@pytest.mark.parametrize("shape", ["llama", "llama, tied", "qwen3"])
def test_penalized_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    """Neighbours in the batch have a penalty, another, or none."""
    maker, overrides = SHAPES[shape]
    path = maker(tmp_path, **overrides)
    prompts = mixed_prompts(24)
    penalties = [(1.0, 1.3, 0.8)[i % 3] for i in range(len(prompts))]
    llm = make(path, max_num_batched_tokens=64, max_num_seqs=24)
    got = tokens_of(llm, prompts, [replace(GREEDY, repetition_penalty=penalty) for penalty in penalties])
    for penalty in set(penalties):
        members = [i for i, other in enumerate(penalties) if other == penalty]
        those = [prompts[i] for i in members]
        assert [got[i] for i in members] == reference(path, those, 24, repetition_penalty=penalty)
        assert (penalty == 1.0) == ([got[i] for i in members] == tokens_of(llm, those))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_the_output_change_how_often_tokens_come(name: str, tiny_llama: Path) -> None:
    llm = make(tiny_llama)
    prompts = mixed_prompts(12)

    def distinct(penalty: float) -> int:
        params = replace(GREEDY, max_tokens=60, **{name: penalty})
        return sum(len(set(tokens)) for tokens in tokens_of(llm, prompts, params))

    assert distinct(-2.0) < distinct(0.0) < distinct(2.0)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    return tokens_of(make(tiny_llama, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=512), PROMPTS)


COMMON = [7] * 40
PROMPTS = [COMMON + prompt for prompt in mixed_prompts(12, 60)] + mixed_prompts(4)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    {"enable_prefix_caching": False},
    {"block_size": 8},
    {"block_size": 64},
    {"num_gpu_blocks_override": 24, "kv_cache_memory_bytes": None, "preempt_strategy": "RECOMPUTE"},
    {"num_gpu_blocks_override": 24, "kv_cache_memory_bytes": None, "preempt_strategy": "SWAP"},
    {"num_gpu_blocks_override": 24, "kv_cache_memory_bytes": None, "preempt_strategy": "AUTO"},
    {"num_gpu_blocks_override": 24, "kv_cache_memory_bytes": None, "prompt_cache_enable_swap": True},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    {"scheduling_policy": "priority", "max_num_seqs": 3},
    {"scheduler_delay_factor": 0.5},
    {"threads": 2},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_tokens_do_not_depend_on_how_they_are_scheduled(
    options: dict[str, Any], tiny_llama: Path, expected: list[list[int]]
) -> None:
    llm = make(tiny_llama, **options)
    assert tokens_of(llm, PROMPTS) == expected
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.available == llm.engine.scheduler.pool.total
    stats = llm.engine.stats()
    if "num_gpu_blocks_override" in options:
        assert stats.preemptions > 0
    if options.get("preempt_strategy") == "SWAP":
        assert llm.engine.scheduler.pool.host.slots


def test_preemption_by_swap_brings_blocks_back_from_the_host(tiny_llama: Path, expected: list[list[int]]) -> None:
    llm = make(tiny_llama, num_gpu_blocks_override=24, kv_cache_memory_bytes=None, preempt_strategy="SWAP")
    copied: list[int] = []
    swap_in = llm.engine.executor.kv.swap_in  # type: ignore[attr-defined]
    llm.engine.executor.kv.swap_in = lambda copies: (copied.append(len(copies)), swap_in(copies))  # type: ignore
    assert tokens_of(llm, PROMPTS) == expected
    assert sum(copied) > 0


def test_a_repeated_prompt_is_found_in_the_cache(tiny_llama: Path) -> None:
    llm = make(tiny_llama)
    prompt = mixed_prompts(1)[0] + COMMON * 2
    first = llm.generate(prompt, GREEDY)[0]
    second = llm.generate(prompt, GREEDY)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_seeded_tokens_do_not_depend_on_batch_mates(tiny_llama: Path) -> None:
    params = [SamplingParams(temperature=1.2, top_k=50, top_p=0.9, seed=i, max_tokens=20) for i in range(len(PROMPTS))]
    together = tokens_of(make(tiny_llama), PROMPTS, params)
    alone = make(tiny_llama, max_num_seqs=1, max_num_batched_tokens=100)
    assert [tokens_of(alone, [p], [s])[0] for p, s in zip(PROMPTS, params, strict=True)] == together
    assert len({tuple(tokens) for tokens in together}) == len(together)


def test_results_are_what_users_know(tiny_llama: Path) -> None:
    llm = make(tiny_llama)
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
    by_text, by_ids, by_dict = (
        llm.generate(prompt, params)[0]
        for prompt in ("hello ferry", llm.tokenizer.encode("hello ferry"), {"prompt_token_ids": [5, 6, 7]})  # type: ignore
    )
    assert by_text.prompt == "hello ferry" and by_ids.prompt is None
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_dict.prompt_token_ids == [5, 6, 7]
    completion = by_text.outputs[0]
    assert completion.finish_reason == "length" and len(completion.token_ids) == 6
    assert completion.text == llm.tokenizer.decode(completion.token_ids)  # type: ignore[union-attr]
    assert completion.logprobs is not None and len(completion.logprobs) == 6
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token].rank == 1 and len(entries) == 2


def test_stop_tokens_and_eos_end_a_sequence(tiny_llama: Path) -> None:
    llm = make(tiny_llama)
    free = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    stop = free.token_ids[4]
    cut = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_token_ids_in_and_out_without_a_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_llama.iterdir():
        if "token" not in file.name:
            (bare / file.name).symlink_to(file)
    llm = make(bare, skip_tokenizer_init=True)
    output = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    assert len(output.token_ids) == 24 and output.text == ""
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)


def test_dummy_weights_need_no_weight_files(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    llm = make(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    assert len(llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_model_len": 4096}, "max_model_len is 4096"),
        ({"kv_cache_memory_bytes": 1000}, "no KV block"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 40_000}, "KV cache holds"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "enable_chunked_prefill"),
        ({"max_model_lenn": 5}, "max_model_len"),
    ],
)
def test_start_up_errors_are_one_line(options: dict[str, Any], sentence: str, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        make(tiny_llama, **options)
    assert "\n" not in str(error.value)


SERVICE_NAMES = [
    name for option in working_options().values() if option.group in SERVICE_GROUPS for name in option.names
]


@pytest.mark.parametrize("name", SERVICE_NAMES)
def test_parameters_of_services_are_refused_with_their_place(name: str, tiny_llama: Path) -> None:
    spelling = name.replace("_", "-")
    option = next(option for option in working_options().values() if name in option.names)
    with pytest.raises(ConfigError) as error:
        make(tiny_llama, **{spelling: option.default if option.default is not None else 1})
    assert str(error.value) == f"--{name} is a parameter of services and does nothing here: give it to ferry serve"


def test_what_a_service_alone_has_is_among_them(tiny_llama: Path) -> None:
    assert {"num_replicas", "port", "served_model_name", "max_queue_time", "lease_s", "enable_llumnix"} <= {
        *SERVICE_NAMES
    }
    assert make(tiny_llama, port=None).config.port == 8000  # None: not given, as everywhere


@pytest.mark.parametrize("params", ["", {}, 0, [SamplingParams()], [None, None], {"temperature": 0.0}])
def test_params_are_sampling_params_or_one_for_each_prompt(params: Any, tiny_llama: Path) -> None:
    llm = make(tiny_llama, max_model_len=64)
    with pytest.raises(ValueError, match="SamplingParams"):
        llm.generate([[1, 2], [3]], params)
    assert not llm.engine.scheduler.requests


def test_prompts_that_cannot_run_are_refused_before_anything_runs(tiny_llama: Path) -> None:
    llm = make(tiny_llama, max_model_len=64)
    refused = (([], "0 tokens"), ([5] * 64, "64 tokens"), ([5, 10**6], "vocabulary"), ([5, 1.5], "integer"))
    for prompt, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            llm.generate([[1, 2], prompt], GREEDY)
        assert not llm.engine.scheduler.requests


@pytest.mark.slow
def test_the_demo_model_speaks_like_transformers() -> None:
    """SmolLM2 from its GGUF, dequantised to float32: 64 greedy tokens on 20 prompts."""
    from transformers import AutoModelForCausalLM

    from engine.source import resolve_model

    path = resolve_model("demo:smollm2")
    llm = LLM("demo:smollm2", dtype="float32", kv_cache_memory_bytes=256 << 20, swap_space=0, threads=1)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(text) for text in DEMO_PROMPTS]
    ours = tokens_of(llm, prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for module in model.modules():  # transformers takes another epsilon than the file's
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    for prompt, tokens in zip(prompts, ours, strict=True):
        # One forward pass over prompt and output: token i is greedy iff it is the argmax at the position before it.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


DEMO_PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):",
    "Water boils at",
    "The quick brown fox",
    "In 1969, humans first",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "To bake bread you need",
    "Photosynthesis is the process by which",
    "Roses are red,",
    "The opposite of hot is",
    "SELECT name FROM users WHERE",
    "My favourite book is",
    "The largest planet in the solar system",
    "A haiku about rain:",
    "Translate to French: good morning",
    "The square root of 144 is",
    "Shakespeare wrote many plays, including",
]


EVERY_WAY = [
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def check_that_only_the_first_ends(llm: LLM) -> None:
    events = {event.request.id: event for event in llm.engine.step()}
    assert (events["first"].error, events["first"].token) == (NOT_FINITE, None)
    assert events["second"].error is None and events["second"].token is not None
    llm.engine.scheduler.check()
    assert "first" not in llm.engine.scheduler.requests and "second" in llm.engine.scheduler.requests


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", EVERY_WAY)
def test_one_logit_that_is_no_number_ends_its_request_alone(
    tiny_llama: Path, params: SamplingParams, bad: float
) -> None:
    llm = make(tiny_llama)
    compute = llm.engine.executor.model.compute_logits  # type: ignore[attr-defined]

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[0, 17] = bad
        return logits

    llm.engine.executor.model.compute_logits = broken  # type: ignore[attr-defined]
    for name in ("first", "second"):
        llm.engine.add_request(name, [5, 6, 7], params)
    check_that_only_the_first_ends(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("params", EVERY_WAY)
def test_one_damaged_value_in_the_cache_ends_its_request_alone(
    tiny_llama: Path, params: SamplingParams, part: int, dtype: str
) -> None:
    llm = make(tiny_llama, dtype=dtype)
    for name, prompt in (("first", [5, 6, 7]), ("second", [8, 9, 10])):
        llm.engine.add_request(name, prompt, params)
    llm.engine.step()
    block = llm.engine.scheduler.requests["first"].blocks[0]
    llm.engine.executor.kv.layer(0)[part][block, 1, 0, 0] = math.nan  # type: ignore[attr-defined]
    check_that_only_the_first_ends(llm)


def test_the_tokenizers_end_of_sequence_counts_too(tiny_llama: Path, tmp_path: Path) -> None:
    """Chat fine-tunes often change the end of sequence in tokenizer_config.json alone."""
    path = tmp_path / "tuned"
    shutil.copytree(tiny_llama, path)
    for name in ("config.json", "generation_config.json"):
        if (path / name).exists():
            data = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps({**data, "eos_token_id": 0}))
    assert set(make(path).engine.scheduler.config.eos_token_ids) == {0, 3}
    assert make(path, skip_tokenizer_init=True).engine.scheduler.config.eos_token_ids == (0,)


def test_checkpoints_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    first, second = make_llama(tmp_path / "a" / "m", seed=1), make_llama(tmp_path / "b" / "m", seed=2)
    assert weights_id(first) == weights_id(first) != weights_id(second)
    assert make(first).engine.compat_key != make(second).engine.compat_key
