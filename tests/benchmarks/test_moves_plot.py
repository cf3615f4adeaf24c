"""The downtime figure is a PNG with all mechanisms."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.moves_plot import downtime_figure


def test_the_figure_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"length": length, "client_ms": [20.0, 30.0, 90.0], "step_ms": 18.0} for length in (256, 2048)]
    path = tmp_path / "downtime.png"
    downtime_figure({"live": rows, "recompute": rows[:1]}, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
