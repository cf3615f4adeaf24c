"""Tables of runs: one row a trace, rate and policy, the median over seeds; as text, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llumnix.simulator.run import Done

Row = dict[str, Any]

COLUMNS = {  # of the text: column -> (heading, format)
    "trace": ("trace", "{}"),
    "rate": ("req/s", "{:g}"),
    "cv": ("CV", "{:g}"),
    "class": ("class", "{}"),
    "policy": ("policy", "{}"),
    "prefill_mean_s": ("first token s", "{:.2f}"),
    "prefill_p99_s": ("P99", "{:.2f}"),
    "request_mean_s": ("request s", "{:.1f}"),
    "request_p99_s": ("P99", "{:.0f}"),
    "decode_mean_s": ("token ms", "{:.0f}"),
    "decode_p99_s": ("P99", "{:.0f}"),
    "preemption_loss_s": ("preempted s", "{:.2f}"),
    "moves_per_request": ("moves", "{:.2f}"),
    "silence_p50_s": ("silence ms", "{:.0f}"),
    "fragmented_share": ("fragmented", "{:.1%}"),
    "used_share": ("used", "{:.0%}"),
    "replicas": ("replicas", "{:.1f}"),
}
MILLISECONDS = ("decode_mean_s", "decode_p99_s", "silence_p50_s")


def rows(done: Iterable[Done], classes: bool = False) -> list[Row]:
    """One row a group of equal runs that differ in their seed, in their order; numbers are medians over seeds.

    With `classes` there is one row for the high class and one for the others.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for one in done:
        for high in (True, False) if classes else (None,):
            key = (one.run.label, one.run.rate, one.run.cv, _class_name(high), one.run.policy.name)
            groups[key].append(one.result.row(high))
    names = ("trace", "rate", "cv", "class", "policy")
    return [
        {
            **dict(zip(names, key)),
            **{n: float(np.median([v[n] for v in values])) for n in values[0]},
            "seeds": len(values),
        }
        for key, values in groups.items()
    ]


def _class_name(high: bool | None) -> str:
    return "all" if high is None else ("high" if high else "normal")


def find(table: Iterable[Row], **wanted: Any) -> Row:
    """The only row with these values."""
    found = [row for row in table if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {wanted}")
    return found[0]


def text(table: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """A table for people; columns that say the same in every row are left out."""
    shown = [name for name in (columns or COLUMNS) if columns or len(table) == 1 or _varies(table, name)]
    heading = [COLUMNS[name][0] if name in COLUMNS else name for name in shown]
    cells = [[_cell(name, row[name]) for name in shown] for row in table]
    return aligned([heading, *cells])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side; words to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = [all(line[i][:1].isdigit() or line[i][:1] in "-+" for line in lines[1:]) for i in range(len(lines[0]))]

    def pad(i: int) -> Callable[[str, int], str]:
        return str.rjust if numeric[i] else str.ljust

    return "\n".join("  ".join(pad(i)(cell, widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines)


def _varies(table: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in table}) > 1 or name in ("trace", "policy")


def _cell(name: str, value: Any) -> str:
    form = COLUMNS[name][1] if name in COLUMNS else ("{:.3g}" if isinstance(value, float) else "{}")
    return form.format(value * 1000 if name in MILLISECONDS else value)


def write(table: Sequence[Row], path: Path) -> None:
    """The table as path.csv and path.json, every column, full precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    path.with_suffix(".json").write_text(json.dumps(list(table), indent=1) + "\n")
