"""The CPU quota and the memory limit of this process's control groups, versions 1 and 2.

A group is bounded by its ancestors as well, so the least of all counts. A container without a namespace of its own
sees the path its host knows it by, which is not below its mount: then the mount's top is the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time; None without a quota."""
    quotas = []
    for group in _groups("cpu", mount, membership):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        numbers = [int(word) for word in words if word.isdecimal()]  # without a quota there is "max", or -1
        if len(numbers) == 2 and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def memory_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes; None without a limit. Version 1 has a number beyond all memory instead of none."""
    limits = []
    for group in _groups("memory", mount, membership):
        words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        limits += [int(word) for word in words if word.isdecimal()]
    return min(limits, default=None)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """Folders of the groups this process is in for a controller, with all their ancestors."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}  # names of a hierarchy -> the group in it; "" is version 2
    for line in lines:
        _, names, path = line.split(":", 2)
        paths[names] = path
    for names, path in paths.items():
        if names == "":
            tops = [mount, mount / "unified"]
        elif controller in names.split(","):
            tops = [mount / names, mount / controller]  # the latter is often a link to the former
        else:
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for top in tops:
            for depth in range(len(steps) + 1):
                yield top.joinpath(*steps[:depth])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
