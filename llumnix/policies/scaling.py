"""How many replicas: the average freeness is kept inside a band.

It is the freeness of the normal class: what is kept free for the high class is not demand. Engines that owe tokens
count as 0, so that one long queue does not outweigh the rest. Above or below the band for long enough, one replica is
taken or added, and the clock starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llumnix.load import READY, LoadReport, freeness
from llumnix.settings import DEFAULTS, LlumnixSettings


@dataclass(frozen=True)
class ScalingState:
    """Since when the average is outside the band; on the caller's clock."""

    below_since: float | None = None
    above_since: float | None = None


def average_share(reports: Iterable[LoadReport], settings: LlumnixSettings = DEFAULTS) -> float | None:
    """Mean freeness of the ready engines as a share of their capacity, in [0, 1]; None without a ready engine."""
    shares = [
        max(0.0, freeness(report, settings, headroom=False)) / report.capacity
        for report in reports
        if report.state == READY and report.capacity > 0
    ]
    return sum(shares) / len(shares) if shares else None


def deciding_average(
    shares: Iterable[float], starting: int, waiting: bool, settings: LlumnixSettings = DEFAULTS
) -> float | None:
    """The average that decides, or None where it is to change nothing.

    Replicas that start count as empty, for that is what they will be; so another one is added only if even they are
    not enough, and none is taken away meanwhile. Nor is one taken away while requests wait at another: the average
    hides that.
    """
    known = list(shares)
    if not known:
        return None
    average = (sum(known) + starting) / (len(known) + starting)
    if (starting and average >= settings.scale_low_share) or (waiting and average > settings.scale_high_share):
        return None
    return average


def desired_replicas(
    average: float | None,
    replicas: int,
    state: ScalingState,
    now: float,
    settings: LlumnixSettings = DEFAULTS,
    low: int = 1,
    high: int = 1 << 30,
) -> tuple[int, ScalingState]:
    """Replicas wanted and the next state; to be asked every scale_interval_s. `replicas` counts starting ones too.

    `average` is that of average_share; None (nobody is ready) changes nothing.
    """
    below = above = None
    wanted = replicas
    if average is not None and average < settings.scale_low_share:
        below = now if state.below_since is None else state.below_since
        if now - below >= settings.scale_up_after_s:
            wanted, below = replicas + 1, now
    elif average is not None and average > settings.scale_high_share:
        above = now if state.above_since is None else state.above_since
        if now - above >= settings.scale_down_after_s:
            wanted, above = replicas - 1, now
    return min(max(wanted, low), high), ScalingState(below, above)


def victim(reports: Iterable[LoadReport]) -> str | None:
    """The ready engine with the fewest running requests, then the fewest waiting, then by name."""
    ready = [report for report in reports if report.state == READY]
    best = min(ready, key=lambda report: (report.running, report.waiting, report.engine), default=None)
    return best.engine if best is not None else None
