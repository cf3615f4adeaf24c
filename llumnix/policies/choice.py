"""Which request an engine gives away."""

from __future__ import annotations

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
    """Whether a request may move for this cause.

    The high class moves only when it must, and so does a request that moved a moment ago.
    """
    if cause == DRAIN:
        return True
    if cause == HANDOVER:
        return not candidate.waiting
    if candidate.priority < 0 or now - candidate.last_moved < settings.move_cooldown_s:
        return False
    policy = settings.request_policy
    return policy.startswith("FCW") if candidate.waiting else policy != "FCW"


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
