"""Commands, configuration files and plans, up to the point where something would start."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import socket
from pathlib import Path

import pytest
import yaml

import serving.cli.command as command
from engine.config import ConfigError, EngineConfig
from engine.options.resolution import spellings
from serving import checks
from serving.cli import blade, main
from serving.cli.arguments import Parser, add_arguments
from serving.cli.failure import cause_sentence
from serving.cli.start import address, ready_line
from serving.config import AppArgs, InvalidArguments, parameters_markdown
from serving.config_file import lint, load_yaml, read_config_file
from serving.plan import Plan, changed_fields, make_plan

ROOT = Path(__file__).parent.parent
FILE = """
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8123}
applications:
- name: llm
  route_prefix: /
  import_path: serving.app:build
  args: {model: m, max-num-seqs: 8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Commands stop after planning; the plans they made."""
    plans: list[Plan] = []
    monkeypatch.setattr(command, "check_plan", lambda plan, weights: plans.append(plan))
    monkeypatch.setattr(command, "explain", lambda plan, model: "explained\n")
    return plans


def given(line: str) -> list[tuple[str, object]]:
    parser = Parser(prog="x")
    add_arguments(parser)
    return parser.parse(line.split()).given


# Flags


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        ("--max_model_len 5", [("--max_model_len", "5")]),
        ("--max-model-len=5", [("--max-model-len", "5")]),
        ("-tp 2", [("tensor_parallel_size", "2")]),
        ("-pp 2 -ppmb 3", [("pipeline_parallel_size", "2"), ("pipeline_micro_batch", "3")]),
        ("-dp 2", [("attention_dp_size", "2")]),
        ("-spec-draft-tp 2", [("speculative_draft_tensor_parallel_size", "2")]),
        ("-O 3", [("compilation_config", "3")]),
        ("-O3", [("compilation_config", "3")]),
        ("-q awq", [("quantization", "awq")]),
        ("--nouse_sps", [("--nouse_sps", True)]),
        ("--no-enable-prefix-caching", [("--no-enable-prefix-caching", True)]),
        ("--disable_prompt_cache --port 1", [("--disable_prompt_cache", True), ("--port", "1")]),
        ("--use_sps false", [("--use_sps", "false")]),
        ("--enable-chunked-prefill", [("--enable-chunked-prefill", "true")]),
        ("--served-model-name a b", [("--served-model-name", ["a", "b"])]),
        ("--draft.tokenizer-dir t", [("--draft.tokenizer-dir", "t")]),
        ("--port 1 --port 2", [("--port", "1"), ("--port", "2")]),
        ("", []),
    ],
)
def test_flags(line: str, pairs: list[tuple[str, object]]) -> None:
    assert given(line) == pairs


def test_every_name_is_a_flag_in_both_spellings() -> None:
    parser = Parser(prog="x")
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for name in spellings():
        assert {f"--{name}", f"--{name.replace('_', '-')}"} <= flags


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-modle-len 3", "--max-modle-len is not a known parameter, did you mean max_model_len?"),
        ("--port", "argument --port: expected one argument"),
        ("stray", "unexpected argument 'stray'"),
        ("--max_model 3", "--max_model is not a known parameter"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        given(line)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_shows_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "--max-model-len" in text
    assert "--enable_lora" not in text


# Configuration files


@pytest.mark.parametrize("name", ["smollm2.yaml", "qwen.yaml"])
def test_our_files_pass(name: str) -> None:
    plan = make_plan(read_config_file(ROOT / "configs" / name), [])
    assert plan.http_options == {"host": "127.0.0.1", "port": 8000}
    assert plan.proxy_location == "HeadOnly"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("HeadOnly", "HeadOnyl"), "proxy_location"),
        (
            ("proxy_location", "proxy_locaton"),
            "'proxy_locaton' is not a known key at the top level, did you mean proxy_",
        ),
        (("port: 8123", "prot: 8123"), "'prot' is not a known key in http_options, did you mean port?"),
        (
            ("route_prefix", "route_prefx"),
            "'route_prefx' is not a known key in applications[0], did you mean route_pref",
        ),
        (("max-num-seqs", "max-num-sqs"), "--max_num_sqs is not a known parameter, did you mean max_num_seqs?"),
        (("max-num-seqs: 8", "port: 8"), "applications[0].args.port: the HTTP address belongs to http_options.port"),
        (("max-num-seqs: 8", "enable_lora: true"), "--enable_lora: LoRA is not built yet"),
        (("max-num-seqs: 8", "max_num_seqs: 8, max_num_seqs: 9"), "the key 'max_num_seqs' is given twice"),
        (("max-num-seqs: 8", "max_num_seqs: 8, max-num-seqs: 9"), "--max_num_seqs is given twice, as 8 and as 9"),
        (("args: {model: m, max-num-seqs: 8}", "args: m"), "args is 'm', must be a mapping"),
        (("{host: 127.0.0.1, port: 8123}", "3"), "http_options is 3, must be a mapping"),
        (("name: llm", "name: other"), "applications[0].name is 'other', must be 'llm'"),
        (("import_path: serving.app:build", "import_path: a:b"), "import_path is 'a:b', must be 'serving.app:build'"),
        (("proxy_location: HeadOnly", "grpc_options: {port: 1}"), "grpc_options: a local start does not apply it"),
        (("proxy_location: HeadOnly", "grpc_options: {prt: 1}"), "'prt' is not a known key in grpc_options"),
        (("route_prefix: /", "deployments: [{name: a, nmae: b}]"), "'nmae' is not a known key in applications[0].depl"),
        (("port: 8123", "port: x"), "http_options.port: "),
        (("applications:", "applications: [3]\nx:"), "'x' is not a known key"),
        ((FILE, "[1]"), "must be a mapping"),
        ((FILE, "a: ["), "is not YAML"),
        ((FILE, "applications: []"), "applications is [], must be a list"),
    ],
)
def test_wrong_files(file: Path, change: tuple[str, str], message: str) -> None:
    text = FILE.replace(*change)
    assert text != FILE
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="/nowhere.yaml: No such file"):
        read_config_file("/nowhere.yaml")


def test_a_file_for_a_cluster_passes_the_lint() -> None:
    document = load_yaml(FILE)
    document["applications"][0]["deployments"] = [{"name": "Ingress", "num_replicas": 2}]
    lint(document)


# Plans


def test_flags_win_over_the_file_and_the_sources_are_known(file: Path) -> None:
    plan = make_plan(read_config_file(file), [("--port", "9"), ("--max_num_batched_tokens", "64")])
    assert (plan.config.port, plan.config.max_num_seqs, plan.config.max_num_batched_tokens) == (9, 8, 64)
    assert plan.http_options["port"] == 9
    rows = {name: (value, source) for name, value, source in changed_fields(plan)}
    assert rows["port"] == (9, "command line")
    assert rows["max_num_seqs"] == (8, str(file))
    assert "block_size" not in rows


def test_the_preset_is_a_source() -> None:
    plan = make_plan(None, [("--model", "m")], preset="blade")
    rows = {name: source for name, _, source in changed_fields(plan)}
    assert rows["port"] == "preset blade"
    assert plan.http_options == {"host": "0.0.0.0", "port": 8081}


# Commands


def test_ferry_explain_and_serve_explain(file: Path, no_model: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", str(file), "--port", "7"]) == 0
    assert main.main(["serve", str(file), "--explain"]) == 0
    assert capsys.readouterr().out == "explained\n" * 2
    assert [plan.config.port for plan in no_model] == [7, 8123]


def test_blade_llm_server(no_model: list[Plan]) -> None:
    assert blade.server(["--model", "m", "--nouse_sps", "--explain"]) == 0
    assert no_model[0].config.port == 8081


@pytest.mark.parametrize("line", ["--model m -tp 2", "", "--model m --port 1 --port 2", "--model m --log_level LOUD"])
def test_wrong_commands_are_one_line_and_exit_2(
    line: str, no_model: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert blade.server(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("blade_llm_server: error: --")
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(no_model: list[Plan]) -> None:
    with pytest.raises(ConfigError):
        blade.server(["--model", "m", "-tp", "2", "--log-level", "DEBUG"])


@pytest.mark.parametrize("function", [blade.split, blade.check])
def test_commands_that_wait_for_a_feature(function: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert function([]) == 2  # type: ignore[operator]
    assert "is not built yet" in capsys.readouterr().err


# Checks before a start


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 cannot be used: Address already in use"):
            checks.check_port("127.0.0.1", port)
    checks.check_port("127.0.0.1", port)


def test_a_foreign_distribution_named_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_environment()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.2")
    with pytest.raises(ConfigError, match="pip uninstall -y kernels"):
        checks.check_environment()


def model_directory(path: Path, **changes: object) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_explaining_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_directory(tmp_path)
    assert main.main(["explain", "--model", str(model), "--num_gpu_blocks_override", "64"]) == 0
    text = capsys.readouterr().out
    assert "num_gpu_blocks_override      64                       command line" in text
    assert "dtype                        bfloat16" in text
    assert "max_model_len                512" in text
    assert f"{64 * 16 * 2 * 2 * 2 * 16 * 2} bytes, 64 blocks" in text


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ("--max_model_len 513", {}, "--max_model_len is 513, must be at most 512, the model's longest"),
        ("--no-enable-chunked-prefill --max_num_batched_tokens 256", {}, "must be at least max_model_len (512)"),
        ("", {"architectures": ["StrangeForCausalLM"]}, "StrangeForCausalLM"),
    ],
)
def test_a_model_that_does_not_fit(
    tmp_path: Path, flags: str, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_directory(tmp_path, **changes)
    assert main.main(["explain", "--model", str(model), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_without_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "--model", str(tmp_path / "gone")]) == 2
    (model_directory(tmp_path) / "tokenizer.json").unlink()
    assert main.main(["explain", "--model", str(tmp_path)]) == 2
    assert main.main(["explain", "--model", str(tmp_path), "--skip-tokenizer-init"]) == 0
    (tmp_path / "config.json").write_text("{")
    assert main.main(["explain", "--model", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "no tokenizer in" in lines[1]
    assert all(line.startswith("ferry: error: ") for line in lines)


# What Serve and people see


def test_app_args() -> None:
    args = AppArgs.model_validate({"model": "m", "max-num-seqs": 4})
    assert args.config == EngineConfig(model="m", max_num_seqs=4)
    assert AppArgs.from_config(args.config) == args
    with pytest.raises(InvalidArguments, match="did you mean max_num_seqs"):
        AppArgs.model_validate({"model": "m", "max_num_sqs": 4})
    with pytest.raises(InvalidArguments, match="must be a mapping"):
        AppArgs.model_validate(3)


def test_the_documentation_is_current() -> None:
    assert (ROOT / "docs/parameters.md").read_text() == parameters_markdown(), "run `make docs`"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_the_address_for_clients(host: str, expected: str) -> None:
    plan = Plan(EngineConfig(model="m", host=host, port=1))
    assert address(plan) == expected
    assert ready_line(plan).startswith(f"Ferry is ready: curl {expected}/v1/chat/completions ")
    assert "\n" not in ready_line(plan)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("Error:\n\x1b[36mray::X\x1b[39m\n  File 'a'\nValueError: bad weights: x\n", "bad weights: x"),
        ("Traceback\nKeyError: 1\n\nengine.options.option.ConfigError: too long", "too long"),
        ("ray.exceptions.RayTaskError(ValueError): ray::f()\nValueError: inner", "inner"),
        ("It failed. See controller logs for details. Error:", "It failed."),
        ("", "the service did not start; see Ray's logs"),
    ],
)
def test_the_cause_of_a_failed_start(message: str, sentence: str) -> None:
    assert cause_sentence(message) == sentence


def test_the_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("configs/qwen.yaml", "configs/smollm2.yaml", "docs/parameters.md", "docs/architecture.md"):
        assert name in text
        assert (ROOT / name).exists()
    assert yaml.safe_load((ROOT / "configs/smollm2.yaml").read_text())["applications"][0]["args"]["num_replicas"] == 2


def test_serve_sees_the_type_of_the_builder_argument() -> None:
    """Serve reads the annotation itself; as a string it would pass a plain dict unchecked."""
    from serving.app import build

    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is AppArgs
