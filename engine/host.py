"""What this host lets an engine use: cores and memory."""

from __future__ import annotations

import fcntl
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from engine.cgroup import cpu_quota, memory_limit

LEAST_PROBED_BYTES = 128 << 20
SERVICE_CORES = 1  # left to proxy, ingress and manager where engines of a service have more than one core each

NICENESS = 5  # of an engine's threads beside the front end

_claims: list[TextIOWrapper] = []  # the locks of claimed cores


def usable_cores() -> int:
    """Cores of this process: its affinity mask, cut to the cgroups' CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, math.floor(quota)) if quota else cores)


def memory_limit_bytes() -> int:
    """Bytes this process may use: physical memory, cut to the cgroups' limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return physical if limit is None else min(physical, limit)


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


@dataclass(frozen=True)
class Share:
    """What one engine has of its host, as far as is known before it starts."""

    engines: int = 1  # that may be on the host, itself included
    cpus: float | None = None  # reserved for it; None: nothing was asked for

    @classmethod
    def of_node(cls, engines: int, cpus: float, node_cpus: float) -> Share:
        """Of a cluster's node: of all `engines` only as many can be here as have room for their `cpus`."""
        return cls(max(1, min(engines, int(node_cpus // cpus) if cpus > 0 else engines)), cpus)


def default_threads(share: Share, reserved: int = 0) -> int:
    """Threads of one engine: its part of the physical cores within the CPU quota, and no more than is reserved for it.

    `reserved` cores are left to other processes where there is more than one core an engine. A team of threads is as
    fast as its slowest member: one core shared with a front end would slow down all of them at every barrier.
    """
    cores = min(len(physical_cores()), usable_cores())
    threads = equal_part([cores], share.engines, reserved)
    return threads if share.cpus is None else max(1, min(threads, int(share.cpus)))


def equal_part(nodes: Sequence[float], engines: int, reserved: int = 0) -> int:
    """The most whole cores each of the engines can have, on nodes with so many cores; at least 1.

    Without the `reserved` ones of every node, unless then some engine would find no room.
    """
    for left in (reserved, 0):
        for part in range(int(max(nodes, default=0)), 0, -1):
            if sum(max(0, int(cores) - left) // part for cores in nodes) >= engines:
                return part
    return 1


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


def give_way() -> None:
    """Let this thread, and those it will start, wait for others that have something to do: front ends do little at a
    time, and clients wait for it. Without effect where threads have no priorities of their own."""
    if sys.platform == "linux":
        here = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, here, min(19, os.getpriority(os.PRIO_PROCESS, here) + NICENESS))


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
