"""From the parameters of rescheduling to what the manager is told.

`enable_llumnix`, `llumnix_config` and `kv_transfer_config` become the manager's user_config, which may also be changed
while everything runs (docs/llumnix.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.config import ConfigError, EngineConfig
from llumnix.settings import DEFAULTS, LlumnixSettings
from llumnix.transfer import NIXL, KVTransfer
from serving.nixl_transport import MISSING
from serving.strict_yaml import load_mapping

KEYS = ("llumnix", "kv_transfer")


def settings_of(config: EngineConfig) -> LlumnixSettings:
    """The settings that the parameters ask for. Raises ConfigError, one line, for a file that cannot be used."""
    given = config.llumnix_config
    if given is None:
        settings = DEFAULTS
    elif isinstance(given, str):
        settings = _read(given)
    else:
        settings = LlumnixSettings.from_dict(given)
    return settings if config.enable_llumnix else replace(settings, enable_moves=False)


def kv_transfer_of(config: EngineConfig) -> KVTransfer:
    """How KV travels. Raises ConfigError, also where the package that it needs is not installed."""
    return _available(KVTransfer.from_dict(config.kv_transfer_config or {}))


def _available(transfer: KVTransfer) -> KVTransfer:
    if transfer.transport == NIXL and find_spec("nixl") is None:
        raise ConfigError(f"--kv_transfer_config.transport is nixl: {MISSING}")
    return transfer


def user_config(config: EngineConfig) -> dict[str, Any]:
    """The Manager's user_config: what differs from the defaults. Raises ConfigError."""
    return {
        "llumnix": _different(settings_of(config), DEFAULTS),
        "kv_transfer": _different(kv_transfer_of(config), KVTransfer()),
    }


def parse_user_config(given: Any) -> tuple[LlumnixSettings, KVTransfer]:
    """What a user_config of the Manager means. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"the Manager's user_config is {given!r}, must be a mapping with the keys {' and '.join(KEYS)}"
        )
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"the Manager's user_config has no key {key!r}, must be {' or '.join(KEYS)}")
    llumnix, kv_transfer = ({} if given.get(key) is None else given[key] for key in KEYS)
    return LlumnixSettings.from_dict(llumnix), _available(KVTransfer.from_dict(kv_transfer))


def _read(path: str) -> LlumnixSettings:
    try:
        return LlumnixSettings.from_dict(load_mapping(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--llumnix_config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--llumnix_config {path}: is not a text file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _different(values: Any, defaults: Any) -> dict[str, Any]:
    usual = asdict(defaults)
    return {name: value for name, value in asdict(values).items() if value != usual[name]}
