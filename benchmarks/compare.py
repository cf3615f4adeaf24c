"""Sides of a comparison, measured in turn: A, B, A, B, ... each time as a process of its own.

A machine's speed drifts over minutes, more than what is compared often differs by. So a ratio is taken between
processes of the same turn, and the median of these ratios counts, not the ratio of figures of different hours.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

LIMIT_S = 1800.0  # of one process
READY = '{"ready_at"'  # how the line begins that a measured process prints
START = "start, s (less is better)"
WIDTH = 110


@dataclass(frozen=True)
class Sample:
    """What one process measured."""

    start_s: float  # from its launch until it could take requests
    rates: dict[str, list[float]]  # tok/s by case, its runs in order
    facts: dict[str, str]  # versions and the like

    def measures(self) -> dict[str, float]:
        """One figure a row of the table."""
        return {START: self.start_s} | {name: statistics.median(runs) for name, runs in self.rates.items()}


@dataclass(frozen=True)
class Row:
    """One measure: the median of each side, and the first side over each other one, turn by turn."""

    name: str
    medians: dict[str, float]
    ratios: dict[str, list[float]]


def alternate(sides: Mapping[str, Callable[[], Sample]], turns: int) -> dict[str, list[Sample]]:
    """Every side once, in their order, and that `turns` times."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for turn in range(turns):
        for name, measure in sides.items():
            print(f"turn {turn + 1} of {turns}: {name}", file=sys.stderr, flush=True)
            samples[name].append(measure())
    return samples


def measured(command: Sequence[str], env: Mapping[str, str]) -> Sample:
    """Run a process whose output has a line {"ready_at": its time.monotonic(), "rates": ..., "facts": ...}.

    That clock is the machine's, the same in all processes. Ends this process with one line if there is no such line.
    """
    launched = time.monotonic()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"error: {command[0]} did not finish within {LIMIT_S:g} s")
    line = next((line for line in done.stdout.splitlines() if line.startswith(READY)), None)
    if done.returncode or line is None:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        sys.exit(f"error: {' '.join(command)} ended with status {done.returncode}: {said[-1] if said else 'no output'}")
    found = json.loads(line)
    return Sample(found["ready_at"] - launched, found["rates"], found["facts"])


def rows(samples: Mapping[str, list[Sample]]) -> list[Row]:
    """A row a measure, in the order of the first sample. All sides have the same cases and as many samples."""
    figures = {side: [sample.measures() for sample in of] for side, of in samples.items()}
    first, *others = figures
    return [
        Row(
            name,
            {side: statistics.median(turn[name] for turn in turns) for side, turns in figures.items()},
            {side: [a[name] / b[name] for a, b in zip(figures[first], figures[side], strict=True)] for side in others},
        )
        for name in figures[first][0]
    ]


def tables(made: Sequence[Row], title: str) -> list[Table]:
    """One for each other side: medians, and the median ratio with the least and the largest of the turns."""
    first, *others = made[0].medians
    result = []
    for side in others:
        drawn = Table(title=title)
        drawn.add_column("tok/s, median")
        for column in (first, side, f"{first} / {side}"):
            drawn.add_column(column, justify="right")
        for row in made:
            ratios = row.ratios[side]
            spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
            medians = (f"{row.medians[name]:,.1f}" for name in (first, side))
            drawn.add_row(row.name, *medians, f"{statistics.median(ratios):.3f}{spread}")
        result.append(drawn)
    return result


def show(made: Sequence[Row], title: str) -> None:
    console = Console()
    console.width = max(WIDTH, console.width)  # a file or pipe is 80 columns to rich
    for drawn in tables(made, title):
        console.print(drawn)


def report(samples: Mapping[str, list[Sample]], machine: str) -> dict[str, Any]:
    """Everything, for a JSON file."""
    return {
        "machine": machine,
        "command": " ".join(sys.orig_argv),
        "samples": {side: [asdict(sample) for sample in of] for side, of in samples.items()},
        "rows": [asdict(row) for row in rows(samples)],
    }
