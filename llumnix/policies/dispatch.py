"""Where a new request goes: the engine with the highest freeness, what this ingress has just sent counted at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llumnix.load import READY, LoadReport, dispatch_freeness


@dataclass(frozen=True)
class Booked:
    """What an ingress sent to an engine that no report of that engine shows yet."""

    requests: int = 0
    blocks: int = 0


def choose_engine(
    reports: Mapping[str, LoadReport],
    booked: Mapping[str, Booked],
    num_tokens: int,
    exclude: Collection[str] = (),
    step_timeout_s: float = 60.0,
) -> str | None:
    """The ready engine with the highest F for a request of num_tokens, also when all F are negative: requests queue at
    engines, never in the middle. Ties go to the engine with fewer requests, then by name.

    None if no engine is ready that could ever hold the request.
    """
    best: tuple[float, int, str] | None = None
    for name, report in reports.items():
        if report.state != READY or name in exclude or report.stalled_s > step_timeout_s:
            continue
        if 0 < report.max_model_len <= num_tokens:
            continue
        mine = booked.get(name, Booked())
        need = -(-num_tokens // report.block_size)
        free = dispatch_freeness(report, mine.blocks + need, mine.requests + 1)
        candidate = (-free, report.running + report.waiting + mine.requests, name)
        if best is None or candidate < best:
            best = candidate
    return best[2] if best is not None else None
