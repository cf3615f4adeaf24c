"""`blade_llm_server` and its companions: BladeLLM's command line with BladeLLM's defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.options.features import COMMANDS
from serving.cli.arguments import Parser, add_arguments
from serving.cli.command import run_command
from serving.plan import Plan, make_plan


def server(argv: Sequence[str] | None = None) -> int:
    command = parser()
    return run_command(command, command.parse(argv), plan)


def parser() -> Parser:
    command = Parser(prog="blade_llm_server", description="Serve a model with BladeLLM's flags and defaults.")
    command.add_argument("--explain", action="store_true", help="print the resolved configuration and end")
    add_arguments(command)
    return command


def plan(arguments: argparse.Namespace) -> Plan:
    return make_plan(None, arguments.given, preset="blade")


def split(argv: Sequence[str] | None = None) -> int:
    return _not_built("blade_llm_split")


def check(argv: Sequence[str] | None = None) -> int:
    return _not_built("blade_llm_check")


def _not_built(command: str) -> int:
    print(f"{command}: {COMMANDS[command]} is not built yet", file=sys.stderr)
    return 2
