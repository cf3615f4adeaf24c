"""`python -m llumnix.simulator`: one trace at some rates under some policies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from engine.options.option import ConfigError
from llumnix.settings import LlumnixSettings
from llumnix.simulator import plot, table
from llumnix.simulator.device import load_device
from llumnix.simulator.lengths import TRACES
from llumnix.simulator.policies import POLICIES, policy
from llumnix.simulator.run import Run, simulate_all, trace_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; with --out writes table.csv, table.json and, with --plots, PNG files. 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        runs = _runs(options)
        if options.plots:
            plot.need()
        trace_of(runs[0])
        done = simulate_all(runs, options.jobs, progress=not options.quiet)
        made = table.rows(done, classes=options.high_share > 0)
        print(table.text(made))
        if options.out:
            table.write(made, options.out / "table")
        if options.plots:
            out = options.out or Path(".")
            plot.by_rate(made, out / "by_rate.png")
            plot.over_time(
                [one for one in done if (one.run.seed, one.run.rate) == (0, runs[-1].rate)], out / "time.png"
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llumnix.simulator", description=__doc__)
    parser.add_argument("--trace", default="M-M", help=f"{', '.join(TRACES)}, or a CSV or JSON-lines file")
    parser.add_argument("--rates", default="", help="requests a second, comma-separated; of a file: default as it is")
    parser.add_argument("--policies", default="llumnix,infaas", help=f"comma-separated, of {', '.join(POLICIES)}")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--autoscale", default="", help="least:most replicas, such as 1:16")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind; the table shows medians")
    parser.add_argument("--cv", type=float, default=1.0, help="variation of the gaps between arrivals; 1: Poisson")
    parser.add_argument("--high-share", type=float, default=0.0, help="share of requests of the high class")
    parser.add_argument("--device", default="a10-llama-7b", help="constants of a device, by name or file")
    parser.add_argument("--llumnix-config", type=Path, help="YAML file with rescheduling settings")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--out", type=Path, help="directory for table.csv and table.json")
    parser.add_argument("--plots", action="store_true", help="PNG files too (extra: plots)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _runs(options: argparse.Namespace) -> list[Run]:
    settings = None
    if options.llumnix_config:
        try:
            settings = LlumnixSettings.from_dict(yaml.safe_load(options.llumnix_config.read_text()) or {})
        except OSError as error:
            raise ConfigError(f"--llumnix-config {options.llumnix_config}: {error.strerror}") from None
    load_device(options.device)
    for name, value, least in (("replicas", options.replicas, 1), ("requests", options.requests, 1)):
        if value < least:
            raise ConfigError(f"--{name} is {value}, must be at least {least}")
    if options.seeds < 1 or options.cv <= 0 or not 0 <= options.high_share <= 1:
        raise ConfigError("--seeds must be at least 1, --cv greater than 0, --high-share between 0 and 1")
    return [
        Run(
            trace=options.trace,
            policy=policy(name.strip(), settings),
            rate=rate,
            seed=seed,
            cv=options.cv,
            requests=options.requests,
            replicas=options.replicas,
            high_share=options.high_share,
            autoscale=_range(options.autoscale),
            device=options.device,
        )
        for rate in _rates(options.rates, options.trace)
        for name in options.policies.split(",")
        for seed in range(options.seeds)
    ]


def _rates(text: str, trace: str) -> list[float]:
    if not text:
        if trace in TRACES:
            raise ConfigError(f"--rates is needed for {trace}: requests a second, such as 7.4,7.8")
        return [0.0]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates is {text!r}, must be numbers such as 7.4,7.8") from None
    if min(rates) <= 0:
        raise ConfigError(f"--rates is {text!r}, must be greater than 0")
    return rates


def _range(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise ConfigError(f"--autoscale is {text!r}, must be the least and the most replicas, such as 1:16")
    return int(parts[0]), int(parts[1])


if __name__ == "__main__":
    sys.exit(main())
