"""Bounds on time are for a machine of the kind below that has nothing else to do; this says how far from it we are.

On a shared machine the same work takes two or three times as long for minutes, by the thread's own CPU clock too. So a
bound is held against the smallest of several measurements, because noise only adds, and grows by as much as a fixed
piece of Python takes longer now than it does there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

NOMINAL_S = 0.75e-3  # of `_work`: one core of an AMD EPYC of 2.6 GHz, Python 3.11


def slowdown() -> float:
    """How many times longer work takes at this moment, by the wall clock; at least 1."""
    return max(1.0, statistics.median(_work() for _ in range(21)) / NOMINAL_S)


def cheapest(measure: Callable[[], float], bound_s: float, attempts: int = 8) -> float:
    """The smallest of several measurements, as on an undisturbed machine; ends early at one within the bound."""
    best = float("inf")
    for _ in range(attempts):
        before = slowdown()
        seconds = measure()
        best = min(best, seconds / min(before, slowdown()))
        if best < bound_s:
            break
    return best


def _work() -> float:
    started = time.perf_counter()
    table: dict[int, tuple[int, str]] = {}
    for i in range(5000):
        table[i * 7919 % 4001] = (i, str(i))
    return time.perf_counter() - started
