"""Command-line flags made from the table of parameters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.options.option import Option
from engine.options.resolution import all_options, nearest, spellings


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse, and name the nearest known flag when one is unknown."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=", 1)[0]
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}")
            hint = nearest(word.lstrip("-").replace("-", "_"), spellings())
            self.error(f"{word} is not a known parameter{hint}")
        if not hasattr(namespace, "given"):
            namespace.given = []
        return namespace


class _Record(argparse.Action):
    """Appends (spelling, value) to `namespace.given`, so that a parameter given twice is seen."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if not hasattr(namespace, "given"):
            namespace.given = []
        name = option_string if option_string and option_string.startswith("--") else self.dest
        if self.nargs == 0:
            values = True
        elif isinstance(values, list) and len(values) == 1:
            values = values[0]
        namespace.given.append((name, values))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every known parameter, in both spellings; those not built yet are parsed but left out of --help."""
    groups: dict[str, Any] = {}
    for option in all_options():
        if option.works and option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        target = groups[option.group] if option.works else parser
        _add(target, option)


def _add(target: Any, option: Option) -> None:
    help_text = _help(option) if option.works else argparse.SUPPRESS
    common: dict[str, Any] = {"action": _Record, "dest": option.name, "default": argparse.SUPPRESS}
    names = [*option.short, *(spelling for name in option.names for spelling in _both(name))]
    if option.kind == "bool" and option.flag:
        target.add_argument(*names, nargs=0, help=help_text, **common)
    elif option.kind == "bool":
        target.add_argument(*names, nargs="?", const="true", metavar="BOOL", help=help_text, **common)
    else:
        nargs = {"nargs": "+"} if option.kind == "list" else {}
        target.add_argument(*names, metavar=option.kind.upper(), help=help_text, **nargs, **common)
    for negation in option.negations:
        opposite = f"opposite of --{option.name}" if option.works else argparse.SUPPRESS
        target.add_argument(*_both(negation), nargs=0, help=opposite, **{**common, "dest": negation})


def _both(name: str) -> list[str]:
    dashed = name.replace("_", "-")
    return [f"--{name}"] if dashed == name else [f"--{name}", f"--{dashed}"]


def _help(option: Option) -> str:
    allowed = ", ".join(str(choice) for choice in option.choices if choice not in option.refused)
    default = option.default_text or str(option.default)
    details = "; ".join(part for part in (allowed, option.range_text, f"default {default}") if part)
    return f"{option.help} ({details})".replace("%", "%%")
