"""PNG plots of runs. matplotlib is an extra: it is imported where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.options.option import ConfigError
from llumnix.simulator.run import Done
from llumnix.simulator.table import Row


def need() -> None:
    """Raise ConfigError, naming the extra, if matplotlib is not there."""
    pyplot()


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'ferry-serve[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


PANELS = (
    ("prefill_p99_s", "first token, P99 (s)"),
    ("prefill_mean_s", "first token, mean (s)"),
    ("request_mean_s", "request, mean (s)"),
    ("decode_p99_s", "token, P99 (s)"),
    ("preemption_loss_s", "preemption loss (s)"),
)


def by_rate(table: Sequence[Row], path: Path, along: str = "rate") -> None:
    """Latencies along the rate (or "cv"): a row of panels for each trace, a line for each policy."""
    plots = pyplot()
    traces = list(dict.fromkeys(row["trace"] for row in table))
    size = (3.2 * len(PANELS), 2.4 * len(traces))
    figure, axes = plots.subplots(len(traces), len(PANELS), figsize=size, squeeze=False)
    for trace, line in zip(traces, axes):
        here = [row for row in table if row["trace"] == trace]
        for axis, (column, title) in zip(line, PANELS):
            for name in dict.fromkeys((row["policy"], row["class"]) for row in here):
                points = sorted((r[along], r[column]) for r in here if (r["policy"], r["class"]) == name)
                label = name[0] if name[1] == "all" else f"{name[0]}, {name[1]}"
                axis.plot(*zip(*points), marker="o", markersize=3, label=label)
            axis.set_title(f"{trace}: {title}", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("requests/s" if along == "rate" else along, fontsize=7)
    axes[0][0].legend(fontsize=6)
    _save(plots, figure, path)


def over_time(done: Sequence[Done], path: Path) -> None:
    """Fragmentation, preemptions, queue and replicas over time, a line for each run."""
    plots = pyplot()
    panels = (
        ("fragmented_share", "fragmented share"),
        ("preemptions", "preemptions so far"),
        ("waiting", "queued requests"),
        ("replicas", "replicas"),
    )
    figure, axes = plots.subplots(1, len(panels), figsize=(3.6 * len(panels), 2.8))
    for axis, (column, title) in zip(axes, panels):
        for one in done:
            samples = one.result.samples
            label = f"{one.run.label} {one.run.policy.name}"
            axis.plot([s.time for s in samples], [getattr(s, column) for s in samples], linewidth=0.8, label=label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("seconds", fontsize=7)
        axis.tick_params(labelsize=7)
    axes[0].legend(fontsize=6)
    _save(plots, figure, path)


def trade(table: Sequence[Row], path: Path) -> None:
    """Replicas against the P99 of the first token: a line for each policy."""
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(4.5, 3.2))
    for name in dict.fromkeys(row["policy"] for row in table):
        points = sorted((row["replicas"], row["prefill_p99_s"]) for row in table if row["policy"] == name)
        axis.plot(*zip(*points), marker="o", markersize=3, label=name)
    axis.set_xlabel("replicas, mean over time")
    axis.set_ylabel("first token, P99 (s)")
    axis.legend(fontsize=7)
    _save(plots, figure, path)


def _save(plots: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.close(figure)
