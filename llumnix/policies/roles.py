"""Prefill and decode replicas: how many of each, and who serves what when a role is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llumnix.load import DECODE, MIXED, PREFILL


def serving(phase: str, present: Collection[str]) -> frozenset[str]:
    """The roles that take requests in a phase (PREFILL or DECODE), given the roles of the engines that are ready.

    Engines of that role and mixed ones; where there are none, the others serve everything.
    """
    able = {phase, MIXED} & set(present)
    return frozenset(able or present)


def split(replicas: int, ratio: tuple[int, int] | None, prefill_now: int = 0) -> tuple[int, int]:
    """(prefill, decode) replicas, at least one each; (0, 0) without a ratio or with one replica.

    Of two numbers that are equally close to the ratio, the one closer to what there is now.
    """
    if ratio is None or replicas < 2:
        return 0, 0
    twice, whole = 2 * replicas * ratio[0], 2 * sum(ratio)  # the exact number is twice / whole
    lowest, highest = -(-(twice - sum(ratio)) // whole), (twice + sum(ratio)) // whole
    prefill = min(max(lowest, prefill_now), highest)
    prefill = min(max(1, prefill), replicas - 1)
    return prefill, replicas - prefill


def assign(
    roles: Mapping[str, str], ratio: tuple[int, int] | None, running: Mapping[str, int] | None = None
) -> dict[str, str]:
    """The role of every engine, so that the split holds and as few as possible change; `roles` oldest engine first.

    One that is alone keeps what it has, and serves everything: another will come. Where there is a choice, those with
    more `running` requests decode, because what a prefill engine runs has to move; of equals the older ones do.
    """
    if ratio is None:
        return dict.fromkeys(roles, MIXED)
    prefill, decode = split(len(roles), ratio, sum(role == PREFILL for role in roles.values()))
    if prefill == 0:
        return dict(roles)
    newest_first = [*roles][::-1]
    emptiest_first = sorted(newest_first, key=lambda name: (running or {}).get(name, 0))
    given = dict.fromkeys([name for name in emptiest_first if roles[name] == PREFILL][:prefill], PREFILL)
    given |= dict.fromkeys([name for name in reversed(emptiest_first) if roles[name] == DECODE][:decode], DECODE)
    missing = prefill - sum(role == PREFILL for role in given.values())
    for name in emptiest_first:
        if name not in given:
            given[name] = PREFILL if missing > 0 else DECODE
            missing -= 1
    return given
