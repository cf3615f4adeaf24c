"""What became of the requests of an engine that went away, as one line."""

from __future__ import annotations

from typing import Any


def receipt_line(receipt: dict[str, Any]) -> str:
    """`receipt`: of EngineNode.drain, with what the manager knows of the gaps if it does."""
    worst = receipt.get("worst_gap_ms")
    gap = "unknown" if worst is None else f"{worst:.1f} ms"
    return (
        f"engine {receipt['engine']} drained in {receipt['seconds']:.2f} s: {receipt['moved']} requests moved "
        f"(worst gap {gap}), {receipt['resumed']} ended early to go on elsewhere, {receipt['finished']} finished here"
    )
