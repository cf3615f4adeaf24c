"""The parameters of rescheduling: strict, one line an error, and what of them reaches the manager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig, resolve
from llumnix.settings import DEFAULTS
from llumnix.transfer import BATCH_BYTES, KVTransfer
from serving.app import build
from serving.cli import main
from serving.config import AppArgs, InvalidArguments
from serving.config_file import lint, load_yaml
from serving.rescheduling import parse_user_config, settings_of, user_config


def config(**options: Any) -> EngineConfig:
    return resolve({"model": "m", **options})


def test_moves_are_off_until_they_are_switched_on() -> None:
    assert not settings_of(config()).enable_moves
    assert settings_of(config(enable_llumnix=True)) == DEFAULTS
    off = settings_of(config(enable_llumnix=True, llumnix_config={"enable_moves": False}))
    assert not off.enable_moves


def test_settings_come_from_a_file_or_from_the_configuration_itself(tmp_path: Path) -> None:
    file = tmp_path / "llumnix.yaml"
    file.write_text("# balance\nmax_moves: 7\ndispatch_policy: lmetric\n")
    inline = {"max_moves": 7, "dispatch_policy": "lmetric"}
    for given in (str(file), inline):
        made = user_config(config(enable_llumnix=True, llumnix_config=given))
        assert made == {"llumnix": inline, "kv_transfer": {}}
    file.write_text("# nothing yet\n")
    assert settings_of(config(enable_llumnix=True, llumnix_config=file)) == DEFAULTS


def test_what_the_manager_is_told_means_what_was_asked_for() -> None:
    asked = config(llumnix_config={"max_moves": 7}, kv_transfer_config='{"transfer_mode": "SYNC", "batch_size": 3}')
    settings, transfer = parse_user_config(json.loads(json.dumps(user_config(asked))))
    assert settings == settings_of(asked) and not settings.enable_moves and settings.max_moves == 7
    assert transfer == KVTransfer(transfer_mode="sync", batch_size=3)
    assert parse_user_config({}) == (DEFAULTS, KVTransfer())


def test_the_size_of_a_batch() -> None:
    assert KVTransfer().batch_bytes(1 << 20) == BATCH_BYTES == 4 << 20
    assert KVTransfer().batch_bytes(9 << 20) == 9 << 20
    assert KVTransfer(batch_size=3).batch_bytes(100) == 300
    assert [KVTransfer(batch_size=size).last_blocks(2) for size in (0, 1, 2, 3, 9)] == [2, 0, 1, 2, 2]


WRONG = [
    ({"llumnix_config": {"max_move": 3}}, "llumnix_config has no setting 'max_move', the nearest is max_moves"),
    ({"llumnix_config": {"max_moves": 0}}, "--llumnix_config.max_moves is 0, must be at least 1 and at most 65536"),
    ({"llumnix_config": {"max_moves": None}}, "--llumnix_config.max_moves is None, must be an integer"),
    ({"llumnix_config": {"pd_ratio": "1:3"}}, "pd_ratio is '1:3', must be none while requests do not move"),
    ({"llumnix_config": [1]}, "--llumnix_config is [1], must be the path of a file, or a mapping"),
    ({"llumnix_config": "gone.yaml"}, "--llumnix_config gone.yaml: No such file or directory"),
    (
        {"kv_transfer_config": '{"mode": "sync"}'},
        "has no setting 'mode', the nearest is transfer_mode",
    ),
    ({"kv_transfer_config": {"transfer_mode": "both"}}, "is 'both', must be one of async, sync"),
    (
        {"kv_transfer_config": {"compression": "zip"}},
        "compression is 'zip', must be one of none, zlib",
    ),
    ({"kv_transfer_config": {"batch_size": -1}}, "--kv_transfer_config.batch_size is -1, must be at least 0"),
    ({"kv_transfer_config": "[1]"}, "--kv_transfer_config is [1], must be a JSON object"),
    ({"kv_transfer_config": 3}, "kv_transfer_config holds int, must be a mapping"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_values_are_one_line_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArguments) as wrong:
        AppArgs.model_validate({"model": "m", **options})
    assert message in str(wrong.value) and "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_move: 3", "llumnix_config has no setting 'max_move', the nearest is max_moves"),
        ("max_moves: 1\nmax_moves: 2", "line 2: the key 'max_moves' is given twice"),
        ("- a", "holds list, must be a mapping"),
        ("a: [", "is not YAML"),
        ("\xff", "is not a text file"),
    ],
)
def test_a_wrong_settings_file_is_one_line_and_exit_2(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llumnix.yaml"
    file.write_bytes(text.encode("latin-1"))
    assert main.main(["serve", "--model", "m", "--enable-llumnix", "--llumnix-config", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and message in error and error.count("\n") == 1


def test_the_application_gives_the_manager_its_settings() -> None:
    args = AppArgs.model_validate({"model": "m", "enable_llumnix": True, "llumnix_config": {"max_moves": 7}})
    ingress = build(args)
    manager = ingress._bound_deployment.init_args[1]._bound_deployment
    assert manager.name == "Manager" and manager.user_config == {"llumnix": {"max_moves": 7}, "kv_transfer": {}}


FILE = """
applications:
- import_path: serving.app:build
  args: {model: m}
  deployments:
  - name: Manager
    user_config: {%s}
"""


def test_a_users_own_user_config_is_checked_as_well() -> None:
    lint(load_yaml(FILE % "llumnix: {max_moves: 3}, kv_transfer: {compression: zlib}"))
    lint(load_yaml(FILE % ""))
    for text, message in (
        ("llumnix: {max_move: 3}", "no setting 'max_move'"),
        ("kv_transfer: {compression: zip}", "is 'zip'"),
        ("max_moves: 3", "the Manager's user_config has no key 'max_moves', must be llumnix or kv_transfer"),
    ):
        with pytest.raises(ConfigError, match=message):
            lint(load_yaml(FILE % text))
