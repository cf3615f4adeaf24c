"""Load reports for tests."""

from __future__ import annotations

from typing import Any

from llumnix.load import READY, LoadReport, Movable


def report(engine: str = "e", **rest: Any) -> LoadReport:
    """A ready engine of the paper's size, idle unless the arguments say otherwise."""
    values = {"state": READY, "block_size": 16, "total_blocks": 851, "free_blocks": 851, **rest}
    return LoadReport(engine, 1.0, 1, **values)


def movable(id: str = "r", **rest: Any) -> Movable:
    blocks = rest.pop("blocks", 10)
    values = {"priority": 0, "tokens": blocks * 16, "blocks": blocks, "waiting": False, "started_order": 0, **rest}
    return Movable(id, **values)
