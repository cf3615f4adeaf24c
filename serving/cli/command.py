"""The frame of both server commands: parse, plan, check, then explain or start. Wrong input is one line, exit 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from engine.config import ConfigError
from engine.options.option import canonical
from serving.checks import check_environment, check_plan, explain
from serving.cli.arguments import Parser
from serving.plan import Plan


def run_command(parser: Parser, arguments: argparse.Namespace, make_plan: Callable[[argparse.Namespace], Plan]) -> int:
    try:
        plan = make_plan(arguments)
        check_environment()
        model = check_plan(plan, weights=not arguments.explain)
        if arguments.explain:
            print(explain(plan, model), end="")
            return 0
        from serving.cli.start import serve

        return serve(plan)
    except ConfigError as error:
        if _wants_traceback(arguments):
            raise
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _wants_traceback(arguments: argparse.Namespace) -> bool:
    return any(canonical(name) == "log_level" and str(value).upper() == "DEBUG" for name, value in arguments.given)
