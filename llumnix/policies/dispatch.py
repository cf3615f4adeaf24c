"""Where a new request goes. A policy is a cost per engine; the cheapest engine that can take the request gets it.

Requests queue at engines, never in the middle, so an engine is chosen also when all are overloaded. Ties go to the
engine with fewer requests, then by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from llumnix.policies.fleet import Fleet
from llumnix.settings import DEFAULTS, LlumnixSettings


@dataclass(frozen=True)
class Ask:
    """A request that looks for an engine."""

    tokens: int  # known so far: prompt, and output when it is resumed
    priority: int = 0  # below 0 is the high class
    prefix: Sequence[int] = ()  # truncated hashes of its full blocks, for the policies that look at caches
    exclude: Collection[str] = ()  # engines that must not be chosen


def choose(
    fleet: Fleet, ask: Ask, settings: LlumnixSettings = DEFAULTS, counter: int = 0, step_timeout_s: float = 60.0
) -> str | None:
    """An engine's name; None if no engine is ready that could ever hold the request.

    `counter` is the number of requests dispatched so far, for round_robin. Engines whose step has taken longer than
    step_timeout_s are passed over.
    """
    able = _able(fleet, ask, step_timeout_s)
    if not able.any():
        return None
    cost = np.where(able, POLICIES[settings.dispatch_policy](fleet, ask, settings, able, counter), np.inf)
    best = np.flatnonzero(cost == cost.min())
    if len(best) > 1:
        batch = fleet.batch[best]
        best = best[batch == batch.min()]
    if len(best) > 1:
        best = best[fleet.ranks[best].argsort()]
    return fleet.names[best[0]]


def _able(fleet: Fleet, ask: Ask, step_timeout_s: float) -> np.ndarray:
    """bool [engines]: ready, not hung, long enough, not excluded; decode replicas only where there is nobody else."""
    longest = fleet.column("max_model_len")
    able = fleet.ready & (fleet.column("stalled_s") <= step_timeout_s) & ((longest > ask.tokens) | (longest <= 0))
    for name in ask.exclude:
        row = fleet.rows.get(name)
        if row is not None:
            able[row] = False
    prefill = able & ~fleet.decodes_only
    return prefill if prefill.any() else able


def steps(fleet: Fleet, ask: Ask, reserve: np.ndarray | float = 0.0) -> np.ndarray:
    """F in decode steps of each engine once the request is there, behind all that waits or is booked."""
    size = fleet.column("block_size")
    left = (fleet.column("free_blocks") - fleet.owed_blocks - np.ceil(ask.tokens / size) - reserve) * size
    capacity = fleet.column("total_blocks") * size
    return np.where(left > 0, np.minimum(left / (fleet.batch + 1), capacity), left)


def _llumnix(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """The highest F. To the normal class, engines that serve the high class look as full as their headroom makes them;
    to the high class they look as they are, and are the emptiest for it."""
    if ask.priority < 0 or not settings.high_headroom:
        return -steps(fleet, ask)
    total = fleet.column("total_blocks")
    reserve = np.where(fleet.column("high_running") > 0, total - np.rint(settings.high_target_share * total), 0.0)
    return -steps(fleet, ask, reserve)


def _blind(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """The highest F, whatever the class."""
    return -steps(fleet, ask)


def _infaas(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """INFaaS++, the paper's baseline: free memory per request, with the queue counted; also below 0 per request."""
    free = fleet.column("free_blocks") - fleet.owed_blocks
    return -free / np.maximum(fleet.batch, 1)


def _round_robin(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """One after another in the order of names, among those that can take it."""
    place = np.full(len(fleet), np.inf)
    order = np.flatnonzero(able)
    place[order[fleet.ranks[order].argsort()]] = (np.arange(len(order)) - counter) % len(order)
    return place


def _least_requests(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    return fleet.batch


def _lmetric(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """Prefill tokens this engine would have to do x its batch size, both with the request."""
    new = np.maximum(ask.tokens - fleet.cached_blocks(ask.prefix) * fleet.column("block_size"), 1)
    return (fleet.owed_tokens + new) * (fleet.batch + 1)


def _sticky(fleet: Fleet, ask: Ask, settings: LlumnixSettings, able: np.ndarray, counter: int) -> np.ndarray:
    """The longest cached prefix among engines that are not saturated; without one, the highest F."""
    free = steps(fleet, ask)
    cached = fleet.cached_blocks(ask.prefix)
    capacity = fleet.column("total_blocks") * fleet.column("block_size")
    stay = (cached > 0) & (free > settings.migrate_in_share * capacity)
    return np.where(stay, -1e12 * cached, 0.0) - free


POLICIES: dict[str, Callable[[Fleet, Ask, LlumnixSettings, np.ndarray, int], np.ndarray]] = {
    "llumnix": _llumnix,
    "priority_blind": _blind,
    "infaas": _infaas,
    "round_robin": _round_robin,
    "least_requests": _least_requests,
    "lmetric": _lmetric,
    "sticky_prefix": _sticky,
}

CACHE_AWARE = frozenset({"lmetric", "sticky_prefix"})
"""Policies that look at the prefix summaries of the reports."""
