"""The paper's policy experiments in the simulator: tables, CSV, JSON and plots.

    python -m benchmarks.llumnix_policies [--out build/llumnix] [--seeds 5] [--requests 10000] [--azure FILE]

All of it takes about half an hour of two cores. `run` is the same for other callers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from engine.options.option import ConfigError
from llumnix.simulator import comparison, paper, plot
from llumnix.simulator.run import Run, simulate_all
from llumnix.simulator.table import Row, aligned, rows, text, write

AZURE = Path(__file__).parents[2] / "shared" / "data" / "azure_llm_2023_conv.csv"


def run(out: Path, seeds: int = 5, requests: int = 10_000, azure: Path = AZURE, jobs: int = 0) -> Path:
    """Run everything; write tables and plots below `out` and a report.md of them, whose path is returned."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, jobs, _can_plot())
    report.serving(seeds, requests)
    report.over_time(requests)
    report.informed(min(seeds, 3), requests)
    report.priorities(seeds, requests)
    report.autoscaling(seeds, requests)
    report.trade_off(min(seeds, 3), requests)
    if azure.is_file():
        report.azure(str(azure), min(seeds, 3), requests)
    else:
        report.say(f"The Azure trace is left out: {azure.name} is not there.")
    report.say(f"{seeds} seeds, {requests} requests a run, {time.monotonic() - started:.0f} s.")
    return report.write()


class Report:
    """Gathers sections of text; every table also goes to its own CSV and JSON files."""

    def __init__(self, out: Path, jobs: int, plots: bool):
        self.out = out
        self.jobs = jobs
        self.plots = plots
        self.parts: list[str] = []

    def say(self, words: str) -> None:
        print(words, flush=True)
        self.parts.append(words)

    def section(self, title: str, *tables: str) -> None:
        self.say(f"## {title}")
        for made in tables:
            self.say(f"```\n{made}\n```")

    def table(self, name: str, runs: list[Run], classes: bool = False) -> list[Row]:
        made = rows(simulate_all(runs, self.jobs), classes)
        write(made, self.out / name)
        return made

    def serving(self, seeds: int, requests: int) -> None:
        made = self.table("serving", paper.serving(seeds, requests))
        self.section("Is the baseline the paper's? Mean latency of INFaaS++", _small(comparison.calibration(made)))
        self.section(
            "P99 of the first token: INFaaS++ / Llumnix, the largest over the rates", _small(comparison.ratios(made))
        )
        self.section("All traces and rates", text(made))
        if self.plots:
            plot.by_rate(made, self.out / "serving.png")

    def over_time(self, requests: int) -> None:
        runs = [Run("M-M", paper.tuned(name, "M-M"), 7.6, 1, requests=requests) for name in ("infaas", "llumnix_paper")]
        runs += [
            Run("L-L", paper.tuned(name, "L-L"), 2.0, 1, 2.0, requests, replicas=8, autoscale=(1, 16))
            for name in ("infaas", "llumnix_paper")
        ]
        done = simulate_all(runs, self.jobs)
        if self.plots:
            plot.over_time(done[:2], self.out / "fragmentation.png")
            plot.over_time(done[2:], self.out / "replicas.png")

    def informed(self, seeds: int, requests: int) -> None:
        made = self.table("informed", paper.informed(seeds, requests))
        self.section("Beyond the paper: both policies on loads of the moment", text(made))

    def priorities(self, seeds: int, requests: int) -> None:
        made = self.table("priorities", paper.priorities(seeds, requests), classes=True)
        self.section("Priorities: every tenth request of the high class", _small(comparison.priority_effect(made)))
        if self.plots:
            plot.by_rate(made, self.out / "priorities.png", along="cv")

    def autoscaling(self, seeds: int, requests: int) -> None:
        made = self.table("autoscaling", paper.autoscaling(seeds, requests))
        self.section("Autoscaling: 1 to 16 replicas", _small(comparison.replica_savings(made)))

    def trade_off(self, seeds: int, requests: int) -> None:
        made = self.table("trade_off", paper.trade_off(seeds, requests))
        self.section("Replicas at equal latency", _small(comparison.saved_at_equal_latency(made)))
        if self.plots:
            plot.trade([{**row, "policy": row["policy"].split()[0]} for row in made], self.out / "trade_off.png")

    def azure(self, path: str, seeds: int, requests: int) -> None:
        made = self.table("azure", paper.azure(path, seeds, requests))
        self.section("Azure's conversation trace", text(made))
        if self.plots:
            plot.by_rate(made, self.out / "azure.png")

    def write(self) -> Path:
        path = self.out / "report.md"
        path.write_text("\n\n".join(self.parts) + "\n")
        return path


def _small(made: list[Row]) -> str:
    return aligned(comparison.lines(made))


def _can_plot() -> bool:
    try:
        plot.need()
    except ConfigError as error:
        print(f"no plots: {error}", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/llumnix"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--azure", type=Path, default=AZURE)
    parser.add_argument("--jobs", type=int, default=0)
    options = parser.parse_args()
    print(run(options.out, options.seeds, options.requests, options.azure, options.jobs))


if __name__ == "__main__":
    main()
