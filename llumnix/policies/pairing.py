"""Which engines exchange requests in a round.

Engines whose freeness is below one threshold give, engines that stay above a second, higher one take; the least free
gives to the freest. A pair is made only if after the move the destination is still above its threshold and the two are
closer than before. So an engine that took is no source because of it, and repeated rounds come to rest.

What the report shows says why: a prompt that does not fit, headroom of the high class, or plain imbalance. A draining
engine gives everything to whoever has room; a prefill engine gives what it has prefilled to those that decode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llumnix.load import DECODE, DRAINING, PREFILL, READY, LoadReport, freeness, headroom_blocks, steps_left
from llumnix.policies.choice import BALANCE, DRAIN, HANDOVER, PRIORITY, ROOM
from llumnix.policies.roles import serving
from llumnix.settings import DEFAULTS, LlumnixSettings

TRIES = 8  # destinations looked at for one source
WATERMARK = 0.01  # share of its blocks that an engine keeps free when it takes from one that drains


class Pair(NamedTuple):
    source: str
    destination: str
    cause: str
    max_blocks: int  # the largest request that may move
    waiting: bool = False  # only queued requests may: the destination has a queue itself


@dataclass(slots=True, eq=False)
class _End:
    """One engine as a source or a destination."""

    report: LoadReport
    free: float  # F, decode steps
    left: int  # blocks behind F: free ones without virtual usage
    slots: int  # moves it may still take part in
    seats: int  # requests that may still join its batch

    def after(self, blocks: int, requests: int) -> float:
        """F once `blocks` and `requests` more are here (negative: fewer)."""
        report = self.report
        return steps_left(self.left - blocks, report.running + requests, report.block_size, report.capacity)


def pair(
    reports: Iterable[LoadReport], settings: LlumnixSettings = DEFAULTS, busy: Mapping[str, int] | None = None
) -> list[Pair]:
    """Pairs for this round, most urgent first. `busy`: moves under way by engine, at either end.

    An engine appears in one pair a round; one that drains, and those that take from it, in as many as they may have.
    """
    busy = busy or {}
    budget = settings.max_moves - sum(busy.values()) // 2
    groups: dict[str, list[LoadReport]] = defaultdict(list)
    for report in reports:
        if report.stalled_s <= settings.transfer_timeout_s:
            groups[report.compat_key].append(report)
    pairs = [made for group in groups.values() for made in _pair_group(group, settings, busy)]
    pairs.sort(key=lambda made: _URGENCY[made.cause])  # stable: the least free source of each cause stays first
    return pairs[: max(0, budget)]


_URGENCY = {DRAIN: 0, HANDOVER: 1, ROOM: 2, PRIORITY: 3, BALANCE: 4}


def _pair_group(reports: list[LoadReport], settings: LlumnixSettings, busy: Mapping[str, int]) -> Iterator[Pair]:
    """Pairs among engines that can exchange KV."""
    roles = {report.role for report in reports if report.state == READY}
    decoders = serving(DECODE, roles)
    sources: list[tuple[_End, str]] = []
    destinations: list[_End] = []
    takers: list[_End] = []  # of what drains: these may take as many at a time as one that drains gives
    queues: list[_End] = []  # would be takers but for their queue, or for want of a seat
    for report in reports:
        slots = settings.max_moves_per_engine - busy.get(report.engine, 0)
        drain_slots = settings.max_moves_draining - busy.get(report.engine, 0)
        cause = _cause(report, settings, decoders)
        if cause is not None and (drain_slots if cause == DRAIN else slots) > 0:
            sources.append((_end(report, settings, drain_slots), cause))
        if report.state != READY:
            continue
        if slots > 0 and report.waiting == 0 and report.seats > 0:
            destinations.append(_end(report, settings, slots))
        if drain_slots > 0:
            full = report.waiting or not report.seats  # what runs cannot go there, what waits queues there
            (queues if full else takers).append(_end(report, settings, drain_slots))
    sources.sort(key=lambda source: (source[1] != DRAIN, source[0].free, source[0].report.engine))
    for ends in (destinations, takers):
        ends.sort(key=lambda end: (-end.free, end.report.engine))
    queues.sort(key=lambda end: (end.report.waiting_blocks, end.report.engine))
    taken: set[str] = set()  # have a pair as destination
    for source, cause in sources:
        if source.report.engine in taken:
            continue
        if cause == DRAIN:
            made = _drain_pairs(source, takers, queues, settings, decoders)
            taken.update(pair.destination for pair in made)
            destinations = [end for end in destinations if end.report.engine not in taken]
            yield from made
            continue
        found = _match(source, cause, destinations, settings, decoders)
        if found is not None:
            end, most = found
            destinations.remove(end)
            taken.add(end.report.engine)
            yield Pair(source.report.engine, end.report.engine, cause, most)


def _drain_pairs(
    source: _End, takers: list[_End], queues: list[_End], settings: LlumnixSettings, decoders: frozenset[str]
) -> list[Pair]:
    """As many pairs as the source may have moves, the destinations by turns; those with a queue are the last resort."""
    made: list[Pair] = []
    for _ in range(min(source.slots, len(source.report.movable))):
        found = _match(source, DRAIN, takers, settings, decoders)
        if found is not None:
            ends, end, most = takers, *found
        elif queues and any(movable.waiting for movable in source.report.movable):
            ends, end = queues, queues[0]
            most = end.report.total_blocks
        else:
            break
        ends.remove(end)
        end.slots -= 1
        end.seats -= 1
        if end.slots > 0 and (end.seats > 0 or ends is queues):
            ends.append(end)
        made.append(Pair(source.report.engine, end.report.engine, DRAIN, most, waiting=ends is queues))
    return made


def _cause(report: LoadReport, settings: LlumnixSettings, decoders: frozenset[str]) -> str | None:
    """Why this engine should give requests away; None if it should not, or has none to give."""
    if not report.movable:
        return None
    if report.state == DRAINING:
        return DRAIN
    if report.state != READY or not settings.enable_moves:
        return None
    if report.role == PREFILL and report.role not in decoders and any(not m.waiting for m in report.movable):
        return HANDOVER
    low = settings.out_steps(report.capacity)
    if freeness(report, settings) >= low:
        return None
    if report.head_blocks > report.free_blocks:
        return ROOM
    return BALANCE if freeness(report, settings, headroom=False) < low else PRIORITY


def _end(report: LoadReport, settings: LlumnixSettings, slots: int) -> _End:
    left = report.free_blocks - report.head_blocks - headroom_blocks(report, settings)
    return _End(report, freeness(report, settings), left, slots, report.seats)


def _match(
    source: _End, cause: str, destinations: list[_End], settings: LlumnixSettings, decoders: frozenset[str]
) -> tuple[_End, int] | None:
    """The freest destination that may take one of the source's requests, and how large that may be."""
    tried = 0
    for end in destinations:
        if end.report is source.report or not _takes(end.report.role, source.report.role, cause, decoders):
            continue
        most = _most_blocks(source, end, cause, settings)
        if any(movable.blocks <= most for movable in source.report.movable):
            return end, most
        tried += 1
        if tried == TRIES:
            break
    return None


def _takes(role: str, source_role: str, cause: str, decoders: frozenset[str]) -> bool:
    if cause == HANDOVER:
        return role in decoders
    if cause == DRAIN:
        return True  # a later round hands over what landed in the wrong place
    return role == source_role or "mixed" in (role, source_role)


def _most_blocks(source: _End, end: _End, cause: str, settings: LlumnixSettings) -> int:
    """The largest request that may move from source to end; 0 or less: none."""
    report = end.report
    if cause == DRAIN:
        return report.free_blocks - max(1, int(WATERMARK * report.total_blocks))
    stay = settings.in_steps(report.capacity) / report.block_size  # blocks for each request
    most = end.left - int(-(-stay * (report.running + 1) // 1))
    if cause == HANDOVER:
        return most
    gap = end.free - source.free
    if most < 1 or gap <= 0:
        return 0

    def closer(blocks: int) -> bool:
        return end.after(blocks, 1) - source.after(-blocks, -1) > -gap

    if closer(most):
        return most
    low, high = 0, most  # closer(low) may fail as well: then nothing moves
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if closer(middle) else (low, middle)
    return low
