"""What this host lets an engine use: cores and memory."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from io import TextIOWrapper
from pathlib import Path

LEAST_PROBED_BYTES = 128 << 20
SERVICE_CORES = 1  # left to proxy, ingress and manager where engines of a service have more than one core each

_claims: list[TextIOWrapper] = []  # the locks of claimed cores


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


def physical_cores() -> list[int]:
    """One logical CPU of every physical core this process may run on: a second hyperthread adds no bandwidth."""
    seen: set[str] = set()
    cores = []
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            cores.append(cpu)
    return cores


def default_threads(engines: int, reserved: int = 0) -> int:
    """Threads of one of several engines on this host: physical cores within the CPU quota, shared equally.

    `reserved` cores are left to other processes where there is more than one core an engine. A team of threads is as
    fast as its slowest member: one core shared with a front end would slow down all of them at every barrier.
    """
    cores = min(len(physical_cores()), usable_cores())
    return max(1, (cores - reserved) // engines if cores > engines else cores // engines)


def claim_cores(count: int, folder: Path | None = None) -> list[int]:
    """Cores no other engine of this host has claimed, held until this process ends; [] when there are not enough.

    A claim is a file lock per core, so it needs no coordinator and a killed engine's cores are free at once.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"ferry-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    claimed: list[tuple[int, TextIOWrapper]] = []
    for core in physical_cores():
        if len(claimed) == count:
            break
        lock = open(folder / str(core), "w")  # noqa: SIM115  (held for the life of the process)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        claimed.append((core, lock))
    if len(claimed) < count:
        for _, lock in claimed:
            lock.close()
        return []
    _claims.extend(lock for _, lock in claimed)
    return [core for core, _ in claimed]


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The largest caches of all cores of this process together; 0 where the host does not say."""
    caches: dict[tuple[int, str], int] = {}  # by level and the cores that share one
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        for folder in (root / f"cpu{core}/cache").glob("index*"):
            try:
                size = (folder / "size").read_text().strip()  # as in 32768K
                key = int((folder / "level").read_text()), (folder / "shared_cpu_list").read_text()
                caches[key] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def memory_bandwidth(size: int | None = None) -> float:
    """Bytes a second this thread's team reads from memory: a buffer that the caches cannot hold, best of 2.

    Without a size it takes twice the caches', as far as that is no burden: at most 1/16 of the memory there is.
    """
    import torch

    if size is None:
        size = min(max(LEAST_PROBED_BYTES, 2 * last_level_cache_bytes()), memory_limit_bytes() // 16)
    words = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        words.sum()
        best = min(best, time.perf_counter() - started)
    return size / best
