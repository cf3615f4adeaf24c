"""The figure of benchmarks.moves: downtime by context length, one line a mechanism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llumnix.simulator.plot import pyplot


def downtime_figure(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """`results`: mechanism -> rows with "length" (tokens), "client_ms" (of each move) and "step_ms". Writes a PNG
    with the median downtime, bars to the 90th percentile and the decode step. Raises ConfigError without matplotlib."""
    import numpy as np

    plots = pyplot()
    figure, axis = plots.subplots(figsize=(6.4, 4.0))
    for mechanism, rows in results.items():
        lengths = [row["length"] for row in rows]
        median, p90 = (np.array([np.quantile(row["client_ms"], q) for row in rows]) for q in (0.5, 0.9))
        axis.errorbar(lengths, median, [np.zeros_like(median), p90 - median], marker="o", capsize=3, label=mechanism)
    steps = sorted((row["length"], row["step_ms"]) for rows in results.values() for row in rows)
    axis.plot(*zip(*steps, strict=True), "k.", markersize=4, label="decode step")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("downtime (ms): median, bar to P90")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)
