"""One parameter of the system: its names, type, default, range and whether it works yet.

A parameter has one `Option` and one default. Manuals that call it by other names are `aliases`; flags that mean its
opposite are `negations`; single-dash spellings are `short`. All names use underscores; dashes are equal to them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.values import is_integer, is_number, shown

Kind = Literal["int", "float", "bool", "str", "list", "json", "file"]  # file: a path, or what it holds as a mapping

UNSET: Any = object()
TRUE = {"true", "1", "yes", "on"}
FALSE = {"false", "0", "no", "off"}


class ConfigError(ValueError):
    """A parameter or a configuration file is wrong; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Option:
    """Declaration of one parameter."""

    name: str
    kind: Kind
    default: Any
    help: str
    group: str = ""
    aliases: tuple[str, ...] = ()
    negations: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    flag: bool = False  # takes no value on a command line
    auto: bool = False  # the word "auto" means the default
    default_text: str = ""  # how the documentation shows a default that is computed
    blade: Any = UNSET  # BladeLLM's default, where it differs
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other words for a choice
    refused: Mapping[str, str] = field(default_factory=dict)  # known values that cannot be had, and why
    feature: str = ""  # the feature this waits for; empty: it works

    @property
    def works(self) -> bool:
        return not self.feature

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that sets this parameter, negations excluded."""
        return (self.name, *self.aliases)

    def coerce(self, value: Any, name: str = "") -> Any:
        """The value in its type, or ConfigError naming the parameter, the value and what would be right."""
        name = name or self.name
        if isinstance(value, str) and self.auto and value.strip().lower() == "auto":
            return self.default
        match self.kind:
            case "int":
                value = _number(name, value, int)
            case "float":
                value = _number(name, value, float)
            case "bool":
                value = _boolean(name, value)
            case "str":
                value = _text(name, value)
            case "list":
                value = _items(name, value)
            case "json":
                value = _json(name, value)
            case "file":
                value = _file(name, value)
        if self.choices:
            value = self._choose(name, value)
        self._check_range(name, value)
        return value

    def _choose(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            word = self.synonyms.get(value.lower(), value).lower()
            value = next((choice for choice in self.choices if str(choice).lower() == word), value)
        if value in self.refused:
            raise ConfigError(f"--{name} {value}: {self.refused[value]}")
        if value not in self.choices:
            known = [str(choice) for choice in self.choices if choice not in self.refused]
            raise ConfigError(f"--{name} is {shown(value)}, must be one of {', '.join(known)}")
        return value

    def _check_range(self, name: str, value: Any) -> None:
        if self.above is not None and value <= self.above:
            raise ConfigError(f"--{name} is {shown(value)}, must be {self.range_text}")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise ConfigError(f"--{name} is {shown(value)}, must be {self.range_text}")

    @property
    def range_text(self) -> str:
        low = f"greater than {_plain(self.above)}" if self.above is not None else ""
        if self.low is not None:
            low = f"at least {_plain(self.low)}"
        high = f"at most {_plain(self.high)}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)


def canonical(name: str) -> str:
    """`--max-model-len` and `max_model_len` are the same name."""
    return name.lstrip("-").replace("-", "_")


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _number(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    article = "an integer" if kind is int else "a number"
    if isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            raise ConfigError(f"--{name} is {shown(value)}, must be {article}") from None
    if kind is int and is_integer(value) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"--{name} is {shown(value)}, must be an integer of 64 bits")
    if not is_number(value) or (kind is int and not is_integer(value)):
        raise ConfigError(f"--{name} is {shown(value)}, must be {article}")
    return kind(value)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ConfigError(f"--{name} is {shown(value)}, must be true or false")


def _text(name: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ConfigError(f"--{name} is {shown(value)}, must be a text")
    return str(value)


def _file(name: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str | os.PathLike) or value == "":
        raise ConfigError(f"--{name} is {shown(value)}, must be the path of a file, or a mapping")
    return os.fspath(value)


def _items(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")]
    if not isinstance(value, list | tuple) or any(isinstance(item, dict) for item in value):
        raise ConfigError(f"--{name} is {shown(value)}, must be a list")
    return tuple(str(item) for item in value if str(item))


def _json(name: str, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"--{name} is {shown(value)}, must be JSON") from None
    if isinstance(value, bool) or not isinstance(value, dict | int):
        raise ConfigError(f"--{name} is {shown(value)}, must be a JSON object")
    return value
