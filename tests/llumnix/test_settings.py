"""The keys of llumnix_config: strict, one line an error, defaults of the paper."""

from __future__ import annotations

from typing import Any

import pytest

from engine.options.option import ConfigError
from llumnix.settings import DEFAULTS, LlumnixSettings, options, parse_ratio
from llumnix.transfer import KVTransfer


def message(values: Any) -> str:
    with pytest.raises(ConfigError) as failed:
        LlumnixSettings.from_dict(values)
    assert "\n" not in str(failed.value)
    return str(failed.value)


def test_thresholds_equal_the_papers_at_its_capacity() -> None:
    capacity = 851 * 16
    assert DEFAULTS.out_steps(capacity) == pytest.approx(3 * 16)
    assert DEFAULTS.scale_low_share * capacity == pytest.approx(160)
    assert DEFAULTS.scale_high_share * capacity == pytest.approx(960)
    assert DEFAULTS.high_target_share * capacity == pytest.approx(1600)
    assert DEFAULTS.in_steps(capacity) > DEFAULTS.out_steps(capacity)


def test_thresholds_grow_with_the_engine() -> None:
    assert DEFAULTS.out_steps(2 * 13616) == 2 * DEFAULTS.out_steps(13616)


def test_values_of_a_file_are_taken() -> None:
    made = LlumnixSettings.from_dict({"dispatch_policy": "lmetric", "max_moves": 7, "verify_moves": 1})
    assert (made.dispatch_policy, made.max_moves, made.verify_moves) == ("lmetric", 7, 1.0)
    assert LlumnixSettings.from_dict({}) == DEFAULTS


@pytest.mark.parametrize("key, near", [("migrate_out_shares", "migrate_out_share"), ("max_move", "max_moves"), (3, "")])
def test_an_unknown_key_names_the_nearest(key: Any, near: str) -> None:
    text = message({key: 1})
    assert repr(key) in text and near in text


@pytest.mark.parametrize(
    "values, parts",
    [
        ({"max_moves": 0}, ("max_moves is 0", "at least 1")),
        ({"max_moves": 1.5}, ("max_moves is 1.5", "an integer")),
        ({"max_moves": True}, ("max_moves is True", "an integer")),
        ({"verify_moves": 1.01}, ("verify_moves is 1.01", "at most 1")),
        ({"migrate_out_share": "much"}, ("migrate_out_share is 'much'", "a number")),
        ({"migrate_out_share": float("nan")}, ("migrate_out_share is nan", "a number")),
        ({"enable_moves": "perhaps"}, ("enable_moves is 'perhaps'", "true or false")),
        ({"dispatch_policy": "random"}, ("dispatch_policy is 'random'", "llumnix", "sticky_prefix")),
        ({"request_policy": "XR"}, ("request_policy is 'XR'", "FCWSR")),
        ({"pd_ratio": "1:0"}, ("pd_ratio is '1:0'", "1:3")),
        ({"migrate_out_share": 0.5}, ("migrate_in_share is", "migrate_out_share (0.5)")),
        ({"pd_ratio": "1:3", "enable_moves": False}, ("pd_ratio is '1:3'", "must be none", "enable_moves")),
        ({"scale_high_share": 0.001}, ("scale_high_share is 0.001", "scale_low_share")),
    ],
)
def test_a_wrong_value_is_one_line_with_the_value_and_what_would_be_right(
    values: dict[str, Any], parts: tuple[str, ...]
) -> None:
    text = message(values)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("values", [None, [], "a: 1", 3])
def test_a_file_that_is_no_mapping_is_refused(values: Any) -> None:
    assert "must be a mapping" in message(values)


def test_values_of_a_newer_version_give_way_to_the_default_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    newer = {"dispatch_policy": "clairvoyant", "request_policy": 7, "max_moves": 9, "unheard_of": 1}
    for _ in range(3):
        assert LlumnixSettings.of_message(newer) == LlumnixSettings(max_moves=9)
    assert [record.getMessage().count("clairvoyant") for record in caplog.records] == [1, 0]
    together = {"max_moves": 9, "migrate_in_share": 0.0}
    assert LlumnixSettings.of_message(together) == DEFAULTS
    transfer = {"transport": "pigeon", "compression": "zlib", "batch_size": 4}
    assert KVTransfer.of_message(transfer) == KVTransfer(compression="zlib", batch_size=4)


def test_what_one_process_says_of_its_settings_another_understands() -> None:
    made = LlumnixSettings(dispatch_policy="lmetric", pd_ratio="2:3", verify_moves=0.5)
    assert LlumnixSettings.of_message(made.to_message()) == made


def test_construction_checks_too() -> None:
    with pytest.raises(ConfigError):
        LlumnixSettings(max_stages=0)


def test_every_setting_is_declared_with_a_help_and_its_default() -> None:
    for name, option in options().items():
        assert option.help and option.name == name
        assert option.coerce(option.default) == getattr(DEFAULTS, name)


@pytest.mark.parametrize("text, ratio", [("none", None), ("1:1", (1, 1)), ("2:13", (2, 13))])
def test_ratios(text: str, ratio: Any) -> None:
    assert parse_ratio(text) == ratio


@pytest.mark.parametrize("text", ["", "1", "1:2:3", "-1:2", "a:b", "1:", "1.5:2"])
def test_wrong_ratios(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_ratio(text)
