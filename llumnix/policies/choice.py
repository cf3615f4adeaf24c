"""Which request an engine gives away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llumnix.load import Movable
from llumnix.settings import LlumnixSettings

# Why requests move
BALANCE = "balance"
ROOM = "room"  # the head of the queue does not fit
PRIORITY = "priority"  # the high class wants headroom
DRAIN = "drain"  # the engine goes away
HANDOVER = "handover"  # prefilled here, decoded elsewhere
OPERATOR = "operator"  # somebody asked for it

# Why a request is passed over when one is to move
PREFILL = "prefill"  # its prompt is not computed yet
HIGH_CLASS = "high_class"
COOLDOWN = "cooldown"  # it has just moved
POLICY = "policy"  # request_policy, or the cause, is for queued or for running ones only
TOO_LARGE = "too_large"  # for what the destination has to spare


def choose(
    candidates: Iterable[Movable], max_blocks: int, settings: LlumnixSettings, now: float, cause: str = BALANCE
) -> Movable | None:
    """The request to move, of at most max_blocks; None if there is none.

    Lower priority goes first, then what settings.request_policy says; queued requests go in the order of the queue.
    A draining engine gives everything away, queued requests first because they cost nothing.
    """
    able = [c for c in candidates if c.blocks <= max_blocks and allowed(c, settings, now, cause)]
    return min(able, key=lambda c: _order(c, settings), default=None)


def allowed(candidate: Movable, settings: LlumnixSettings, now: float, cause: str = BALANCE) -> bool:
    """Whether a request may move for this cause."""
    return why_not(candidate, settings, now, cause) is None


def why_not(candidate: Movable, settings: LlumnixSettings, now: float, cause: str = BALANCE) -> str | None:
    """Why a request may not move for this cause; None if it may.

    The high class moves only when it must, and so does a request that moved a moment ago.
    """
    if cause == DRAIN:
        return None
    if cause == HANDOVER:
        return POLICY if candidate.waiting else None
    if candidate.priority < 0:
        return HIGH_CLASS
    if now - candidate.last_moved < settings.move_cooldown_s:
        return COOLDOWN
    policy = settings.request_policy
    able = policy.startswith("FCW") if candidate.waiting else policy != "FCW"
    return None if able else POLICY


def passed_over(
    candidates: Iterable[Movable], max_blocks: int, settings: LlumnixSettings, now: float, cause: str = BALANCE
) -> Counter[str]:
    """How many requests `choose` does not consider, by reason."""
    reasons = Counter[str]()
    for candidate in candidates:
        reason = why_not(candidate, settings, now, cause)
        if reason is None and candidate.blocks > max_blocks:
            reason = TOO_LARGE
        if reason is not None:
            reasons[reason] += 1
    return reasons


def listed(
    candidates: Iterable[Movable], settings: LlumnixSettings, now: float, cause: str = BALANCE
) -> tuple[Movable, ...]:
    """What a load report lists: the cheapest requests that may move, queued ones and small ones first.

    An engine that hands over lists running ones first, so that none is hidden by a long queue.
    """
    causes = (HANDOVER, BALANCE) if cause == HANDOVER else (cause,)
    able = [c for c in candidates if any(allowed(c, settings, now, one) for one in causes)]
    able.sort(key=lambda c: (c.waiting == (cause == HANDOVER), c.blocks, c.started_order))
    return tuple(able[: settings.movable_reported])


def _order(candidate: Movable, settings: LlumnixSettings) -> tuple[int, ...]:
    if candidate.waiting:
        return (-candidate.priority, 0, candidate.started_order)
    match settings.request_policy:
        case "LR":
            size = -candidate.tokens
        case "LCR":
            size = -candidate.started_order
        case _:
            size = candidate.tokens
    return (-candidate.priority, 1, size, candidate.started_order)
