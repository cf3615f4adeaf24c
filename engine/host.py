"""What this host lets an engine use: cores and memory."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Cores of this process: its affinity mask, cut to the cgroup's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, math.floor(quota)) if quota else cores)


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs of the cgroup quota (v2, then v1); None without a quota."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return micros / period_us if micros > 0 else None
    except (OSError, ValueError):
        return None


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may use: physical memory, cut to the cgroup's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(physical, int((root / name).read_text()))
        except (OSError, ValueError):
            continue
    return physical
