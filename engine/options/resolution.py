"""From names and values as given to the fields of EngineConfig: aliases, spellings, conflicts, refusals."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from engine.config import working_options
from engine.options import UNBUILT
from engine.options.option import UNSET, ConfigError, Option, canonical

PRESETS = ("", "blade")
Given = Mapping[str, Any] | Iterable[tuple[str, Any]]


@cache
def all_options() -> tuple[Option, ...]:
    """Every known parameter: those that work, then those that wait."""
    return (*working_options().values(), *UNBUILT)


@cache
def spellings() -> dict[str, tuple[Option, bool]]:
    """Name -> (parameter, whether the name means its opposite)."""
    table: dict[str, tuple[Option, bool]] = {}
    for option in all_options():
        names = [*((name, False) for name in option.names), *((name, True) for name in option.negations)]
        for name, negated in names:
            if name in table:
                raise RuntimeError(f"parameter name {name} is declared twice")
            table[name] = (option, negated)
    return table


def lookup(name: str) -> tuple[Option, bool]:
    """The parameter a name means. Raises ConfigError that names the nearest known one."""
    known = spellings()
    key = canonical(name)
    if key not in known:
        raise ConfigError(f"--{key} is not a known parameter{nearest(key, known)}")
    return known[key]


def nearest(word: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" for the closest known word, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {found[0]}?" if found else ""


def normalize(options: Given, *, preset: str = "") -> dict[str, Any]:
    """Values of working fields by their own name, coerced. None means "not given".

    A field given twice with different values, an unknown name, and a parameter that is not built yet and set to
    anything but its default are a ConfigError.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in _pairs(options):
        if value is None:
            continue
        option, negated = lookup(name)
        key = canonical(name)
        value = option.coerce(value, key)
        value = not value if negated else value
        if option.name in values and values[option.name] != value:
            raise ConfigError(_conflict(option, origin[option.name], values[option.name], key, value, negated))
        _refuse_unbuilt(option, key, value, preset)
        values[option.name] = value
        origin[option.name] = key
    return {name: value for name, value in values.items() if lookup(name)[0].works}


def preset_values(preset: str) -> dict[str, Any]:
    """Defaults of working fields that the preset changes."""
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}, must be one of {', '.join(repr(p) for p in PRESETS)}")
    if not preset:
        return {}
    return {name: option.blade for name, option in working_options().items() if option.blade is not UNSET}


def _pairs(options: Given) -> Iterable[tuple[str, Any]]:
    items = options.items() if isinstance(options, Mapping) else options
    for name, value in items:
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is not a parameter name, must be a text")
        if canonical(name) == "draft" and isinstance(value, Mapping):
            yield from ((f"draft.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield name, value


def _refuse_unbuilt(option: Option, name: str, value: Any, preset: str) -> None:
    if option.works:
        return
    default = option.blade if preset == "blade" and option.blade is not UNSET else option.default
    if value != default:
        raise ConfigError(f"--{name}: {option.feature} is not built yet, leave the parameter out (given: {value!r})")


def _conflict(option: Option, first: str, value: Any, second: str, other: Any, negated: bool) -> str:
    if first == second:
        return f"--{first} is given twice, as {value!r} and as {other!r}"
    if option.negations:
        return f"--{first} and --{second} contradict each other: both set {option.name}"
    return f"--{first} is {value!r} and --{second} is {other!r}: they are the same parameter, give one"
