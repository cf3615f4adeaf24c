"""The table of parameters, and what resolve() makes of names and values."""

from __future__ import annotations

import csv
import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError, EngineConfig, dtype_name, resolve, working_options
from engine.options import UNBUILT
from engine.options.features import COMMANDS, REQUEST_FIELDS
from engine.options.option import UNSET, Option
from engine.options.resolution import all_options, lookup, spellings

ROWS = list(
    csv.DictReader(
        (Path(__file__).parent / "data/parameters.tsv").read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE
    )
)
FLAGS = [row for row in ROWS if row["name"].startswith("--")]


def error_of(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The manuals' rows


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row['manual']}-{row['name']}")
def test_every_row_is_declared_and_works_or_is_refused(row: dict[str, str]) -> None:
    option, _ = lookup(row["name"])
    assert option.works == (row["works"] == "yes")
    for alias in row["aliases"].split():
        if alias.startswith("--"):
            assert lookup(alias)[0] is option
        else:
            assert alias in option.short


@pytest.mark.parametrize("row", [r for r in ROWS if not r["name"].startswith("--")], ids=lambda row: row["name"])
def test_commands_and_request_fields_are_declared(row: dict[str, str]) -> None:
    assert row["name"] in (COMMANDS if row["type"] == "command" else REQUEST_FIELDS)


@pytest.mark.parametrize("row", [r for r in FLAGS if r["group"] == "model"], ids=lambda row: row["name"])
def test_every_model_parameter_exists_for_the_draft_model(row: dict[str, str]) -> None:
    option, negated = lookup("draft." + row["name"].lstrip("-"))
    assert option.name.startswith("draft.")
    assert not negated


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row['manual']}-{row['name']}")
def test_a_plain_default_of_the_manual_is_ours(row: dict[str, str]) -> None:
    """Defaults written as a literal; BladeLLM's may be the preset's."""
    option, negated = lookup(row["name"])
    try:
        value = option.coerce(row["default"])
    except ConfigError:
        return  # described in words: "from model"
    value = not value if negated else value
    if option.default is None or row["type"] in ("json", "list", "str", "path", "url") or " " in row["default"]:
        return
    allowed = [option.default]
    if option.blade is not UNSET:
        allowed.append(option.blade)
    if option.name in ("host", "port"):
        assert row["manual"] == "blade"
    assert value in allowed


@pytest.mark.parametrize("option", UNBUILT, ids=lambda option: option.name)
def test_what_is_not_built_is_refused_when_set_and_accepted_at_its_default(option: Option) -> None:
    if option.default is not None:
        resolve({"model": "m", option.name: option.default})
    message = error_of(model="m", **{option.name: other_value(option)})
    assert message.startswith(f"--{option.name}: ")
    assert option.feature in message
    assert "not built yet" in message


def other_value(option: Option) -> object:
    if option.choices:
        return next(c for c in option.choices if c not in (option.default, *option.refused, *option.synonyms))
    number = option.default if isinstance(option.default, int | float) else option.low or 0
    by_kind = {
        "bool": not option.default,
        "int": number + 1,
        "float": number + 0.5,
        "str": "something",
        "list": ["1", "2"],
        "json": {"a": 1},
    }
    return by_kind[option.kind]


def test_every_option_is_declared_fully() -> None:
    for option in all_options():
        assert option.group, option.name
        assert option.help, option.name
        assert option.default is None or option.default == () or option.coerce(option.default) == option.default
        assert set(option.refused) <= set(option.choices), option.name
    assert len(spellings()) > 170


# Names


@pytest.mark.parametrize("name", ["max_model_len", "max-model-len", "--max_model_len", "--max-model-len"])
def test_all_spellings_of_a_name(name: str) -> None:
    assert resolve({"model": "m", name: 100}).max_model_len == 100


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("gpu_memory_utilization", 0.5, "max_gpu_memory_utilization", 0.5),
        ("ragged_flash_max_batch_tokens", 512, "max_num_batched_tokens", 512),
        ("preemption_mode", "swap", "preempt_strategy", "SWAP"),
        ("disable_prompt_cache", True, "enable_prefix_caching", False),
        ("disable_prompt_cache", "false", "enable_prefix_caching", True),
        ("no_enable_prefix_caching", True, "enable_prefix_caching", False),
        ("no_enable_chunked_prefill", True, "enable_chunked_prefill", False),
    ],
)
def test_aliases_and_negations(name: str, value: object, field: str, expected: object) -> None:
    assert getattr(resolve({"model": "m", name: value}), field) == expected


def test_unknown_names_name_the_nearest() -> None:
    assert (
        error_of(model="m", max_modle_len=3) == "--max_modle_len is not a known parameter, did you mean max_model_len?"
    )
    assert error_of(model="m", zzzzzz=3) == "--zzzzzz is not a known parameter"


def test_the_same_field_twice() -> None:
    message = error_of(model="m", gpu_memory_utilization=0.5, max_gpu_memory_utilization=0.6)
    assert "gpu_memory_utilization is 0.5 and --max_gpu_memory_utilization is 0.6" in message
    message = error_of(model="m", disable_prompt_cache=True, enable_prefix_caching=True)
    assert "--disable_prompt_cache and --enable_prefix_caching contradict" in message
    assert resolve({"model": "m", "gpu-memory-utilization": 0.5, "max_gpu_memory_utilization": "0.5"})
    with pytest.raises(ConfigError, match="--port is given twice, as 1 and as 2"):
        resolve([("model", "m"), ("--port", 1), ("--port", 2)])


def test_nested_draft() -> None:
    assert "--draft.model: speculative decoding is not built yet" in error_of(model="m", draft={"model": "d"})
    assert "--draft.modle is not a known parameter" in error_of(model="m", draft={"modle": "d"})


def test_none_means_not_given() -> None:
    assert resolve({"model": "m", "max_model_len": None, "enable_lora": None, "port": None}) == resolve({"model": "m"})


def test_a_name_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="is not a parameter name"):
        resolve({1: 2})


# Values


def test_defaults() -> None:
    config = resolve({"model": "m"})
    assert config.served_model_name == ("m",)
    assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (16, 2048, 128)
    assert config.max_num_queued == 512
    assert config.max_model_len is None
    assert config.swap_space == 4
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_the_blade_preset_is_under_what_the_user_gives() -> None:
    config = resolve({"model": "m", "port": 9}, preset="blade")
    assert (config.host, config.port, config.dtype) == ("0.0.0.0", 9, "half")
    assert config.max_gpu_memory_utilization == 0.85
    resolve({"model": "m", "gamma": 0, "max_loras": 2}, preset="blade")
    with pytest.raises(ConfigError, match="speculative decoding is not built yet"):
        resolve({"model": "m", "gamma": 5}, preset="blade")
    with pytest.raises(ConfigError, match="preset"):
        resolve({"model": "m"}, preset="other")


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("block_size", 12, "--block_size is 12, must be one of 8, 16, 32, 64, 128"),
        ("port", "abc", "--port is 'abc', must be an integer"),
        ("num_cpus_per_replica", 0, "--num_cpus_per_replica is 0.0, must be greater than 0"),
        ("lease_s", 0.01, "--lease_s is 0.01, must be at least 0.1"),
        ("port", 0, "--port is 0, must be at least 1 and at most 65535"),
        ("port", 8000.5, "--port is 8000.5, must be an integer"),
        ("max_num_seqs", True, "--max_num_seqs is True, must be an integer"),
        ("gpu_memory_utilization", 0, "--gpu_memory_utilization is 0.0, must be greater than 0 and at most 1"),
        ("gpu_memory_utilization", "nan", "must be a number"),
        ("gpu_memory_utilization", float("inf"), "must be a number"),
        ("enable_prefix_caching", "maybe", "--enable_prefix_caching is 'maybe', must be true or false"),
        ("scheduling_policy", "lifo", "--scheduling_policy is 'lifo', must be one of fcfs, priority"),
        ("dtype", "int8", "--dtype is 'int8', must be one of auto, half"),
        ("model", "", "--model is '', must be a text"),
        ("served_model_name", {"a": 1}, "must be a list"),
        ("device", "cuda", "--device cuda: GPU support is not built yet; use cpu or auto"),
        ("device", "tpu", "--device tpu: TPU hardware is not supported"),
        ("load_format", "pt", "--load_format pt: pt checkpoints are not built yet"),
        ("load_format", "pickle", "--load_format is 'pickle', must be one of auto, safetensors, gguf, dummy"),
        ("quantization", "tpu_int8", "--quantization tpu_int8: TPU hardware is not supported"),
        ("hf_overrides", "{", "must be JSON"),
        ("seed", -1, "--seed is -1, must be at least 0"),
        ("port", 10**400, f"--port is 1{'0' * 56}..., must be an integer of 64 bits"),
        ("lease_s", 10**400, f"--lease_s is 1{'0' * 56}..., must be a number"),
        ("swap_space", [[1]], "--swap_space is [[1]], must be a number"),
    ],
)
def test_wrong_values(name: str, value: object, part: str) -> None:
    assert part in error_of(**{"model": "m", name: value})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 32}, "must be at least max_num_seqs (32)"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "must be at most max_num_batched_tokens (2048)"),
        ({"prompt_cache_enable_swap": True, "disable_prompt_cache": True}, "needs prefix caching"),
        ({"preempt_strategy": "SWAP", "swap_space": 0}, "--swap_space is 0"),
        ({"num_gpu_blocks_override": 8, "kv_cache_memory_bytes": 1 << 20}, "give one"),
        ({"min_replicas": 1}, "--min_replicas is 1, needs max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "--min_replicas is 3, must be at most max_replicas (2)"),
        ({"max_replicas": 4, "num_replicas": 2}, "--num_replicas is 2, which fixes the number of engines"),
    ],
)
def test_wrong_combinations(options: dict[str, object], part: str) -> None:
    assert part in error_of(model="m", **options)


def test_the_model_is_required() -> None:
    assert error_of() == "--model is missing, must be a directory, a .gguf file, a hub name or demo:smollm2"


def test_auto_and_computed_defaults() -> None:
    config = resolve({"model": "m", "max_num_batched_tokens": 64, "block_size": "auto", "max_model_len": "auto"})
    assert (config.max_num_seqs, config.max_num_queued) == (64, 256)
    assert (config.block_size, config.max_model_len) == (16, None)
    assert resolve({"model": "m", "max_num_queued": 0}).max_num_queued == 0
    assert resolve({"model": "m", "max_replicas": 3}).min_replicas == 1
    assert [resolve({"model": "m", **n}).most_replicas for n in ({}, {"num_replicas": 2}, {"max_replicas": 3})] == [
        1,
        2,
        3,
    ]


def test_paths_and_lists() -> None:
    config = resolve({"model": Path("/a/b"), "served_model_name": "x, y"})
    assert (config.model, config.served_model_name) == ("/a/b", ("x", "y"))
    assert resolve({"model": "m", "served_model_name": ["x"]}).served_model_name == ("x",)


def test_construction_checks_too_and_survives_a_round_trip() -> None:
    with pytest.raises(ConfigError):
        EngineConfig(model="m", block_size=7)
    config = EngineConfig(model="m", max_num_seqs=4)
    assert EngineConfig(**config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, port=1).port == 1


def test_fields_and_options_are_the_same_set() -> None:
    assert list(working_options()) == [field.name for field in dataclasses.fields(EngineConfig)]


@given(st.text(max_size=30), st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=9), st.booleans()))
def test_whatever_is_given_the_answer_is_a_config_or_one_line(name: str, value: object) -> None:
    try:
        resolve({"model": "m", name: value})
    except ConfigError as error:
        assert "\n" not in str(error)


@given(st.sampled_from(sorted(spellings())), st.one_of(st.integers(), st.floats(), st.text(max_size=9), st.booleans()))
def test_any_value_for_a_known_name(name: str, value: object) -> None:
    try:
        resolve([("model", "m"), (name, value)])
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("dtype", "checkpoint", "expected"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "unknown", "bfloat16"),
        ("half", "float32", "bfloat16"),
        ("float16", "bfloat16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float", "bfloat16", "float32"),
    ],
)
def test_dtype_on_cpu(dtype: str, checkpoint: str, expected: str) -> None:
    assert dtype_name(dtype, checkpoint) == expected


def test_half_on_a_gpu_is_float16() -> None:
    assert dtype_name("half", "bfloat16", "cuda") == "float16"
    assert dtype_name("auto", "float16", "cuda") == "float16"
