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


def split(replicas: int, ratio: tuple[int, int] | None) -> tuple[int, int]:
    """(prefill, decode) replicas, at least one each; (0, 0) without a ratio or with one replica: it is mixed."""
    if ratio is None or replicas < 2:
        return 0, 0
    prefill = round(replicas * ratio[0] / sum(ratio))
    prefill = min(max(1, prefill), replicas - 1)
    return prefill, replicas - prefill


def assign(roles: Mapping[str, str], ratio: tuple[int, int] | None) -> dict[str, str]:
    """The role of every engine, so that the split holds and as few as possible change; ties by name."""
    prefill, decode = split(len(roles), ratio)
    if prefill == 0:
        return dict.fromkeys(roles, MIXED)
    names = sorted(roles)
    keep = {PREFILL: prefill, DECODE: decode}
    given: dict[str, str] = {}
    for name in names:
        role = roles[name]
        if keep.get(role, 0) > 0:
            keep[role] -= 1
            given[name] = role
    for name in names:
        if name not in given:
            role = PREFILL if keep[PREFILL] > 0 else DECODE
            keep[role] -= 1
            given[name] = role
    return given
