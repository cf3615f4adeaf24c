"""`ferry`: serve a model, explain what a configuration means, or watch a service."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from serving.cli import top
from serving.cli.arguments import Parser, add_arguments
from serving.cli.command import run_command
from serving.config_file import read_config_file
from serving.plan import Plan, make_plan


def main(argv: Sequence[str] | None = None) -> int:
    commands = parser()
    arguments = commands.parse(argv)
    if arguments.command == "top":
        return top.run(arguments)
    return run_command(commands, arguments, plan)


def parser() -> Parser:
    ferry = Parser(prog="ferry", description="Serve large language models on Ray Serve.")
    commands = ferry.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("serve", "start a service on this machine"),
        ("explain", "print the resolved configuration without reading weights"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("file", nargs="?", metavar="FILE", help="Serve configuration file, before any flag")
        if name == "serve":
            command.add_argument("--explain", action="store_true", help="print the resolved configuration and end")
        else:
            command.set_defaults(explain=True)
        add_arguments(command)
    text = "watch replicas and moving requests of a running service"
    top.add_arguments(commands.add_parser("top", help=text, description=text))
    return ferry


def plan(arguments: argparse.Namespace) -> Plan:
    file = read_config_file(arguments.file) if arguments.file else None
    return make_plan(file, arguments.given)
