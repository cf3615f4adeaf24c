"""The plan of a start: configuration merged from preset, file and command line, with the source of each value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.config import ConfigError, EngineConfig, working_options
from engine.options.resolution import normalize, preset_values
from serving.config_file import ConfigFile
from serving.rescheduling import user_config


@dataclass(frozen=True)
class Plan:
    """Everything a local start needs to know."""

    config: EngineConfig
    sources: dict[str, str] = field(default_factory=dict)  # field -> where its value comes from, defaults left out
    http_options: dict[str, Any] = field(default_factory=dict)
    logging_config: dict[str, Any] | None = None
    proxy_location: str = "HeadOnly"


def make_plan(file: ConfigFile | None, flags: Iterable[tuple[str, Any]], preset: str = "") -> Plan:
    """Flags win over the file, the file over the preset. Raises ConfigError with one line."""
    layers = [(f"preset {preset}", preset_values(preset))]
    if file is not None:
        layers.append((file.path, _file_values(file, preset)))
    layers.append(("command line", normalize(flags, preset=preset)))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    config = EngineConfig(**{"model": None, **values})
    user_config(config)  # the files it names
    http = {**(file.http_options if file else {}), "host": config.host, "port": config.port}
    if file is None:
        return Plan(config, sources, http)
    return Plan(config, sources, http, file.logging_config, file.proxy_location)


def _file_values(file: ConfigFile, preset: str) -> dict[str, Any]:
    address = {key: file.http_options[key] for key in ("host", "port") if file.http_options.get(key) is not None}
    try:
        return {**normalize(file.args, preset=preset), **normalize(address)}
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None


def changed_fields(plan: Plan) -> list[tuple[str, Any, str]]:
    """(field, value, source) of every field that was given or differs from its default."""
    rows = []
    for name, declared in working_options().items():
        value = getattr(plan.config, name)
        source = plan.sources.get(name)
        if source is None and declared.default not in (None, ()) and value != declared.default:
            source = "computed"
        if source is not None:
            rows.append((name, value, source))
    return rows
