from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine import host


def on_host(monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None) -> None:
    monkeypatch.setattr(host, "physical_cores", lambda: list(range(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)


@pytest.mark.parametrize(
    ("cores", "quota", "engines", "reserved", "threads"),
    [
        (16, None, 1, 0, 16),
        (16, None, 2, 1, 7),
        (16, 4.0, 2, 0, 2),
        (2, None, 2, 1, 1),  # one core an engine: nothing is left to reserve
        (2, None, 1, 1, 1),
        (1, None, 1, 1, 1),
        (2, 0.5, 1, 0, 1),
        (4, None, 8, 1, 1),
    ],
)
def test_threads_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, engines: int, reserved: int, threads: int
) -> None:
    on_host(monkeypatch, cores, quota)
    assert host.default_threads(host.Share(engines), reserved) == threads


@pytest.mark.parametrize(("cpus", "threads"), [(None, 15), (4.0, 4), (0.5, 1), (3.9, 3), (64.0, 15)])
def test_no_more_threads_than_cpus_reserved(monkeypatch: pytest.MonkeyPatch, cpus: float, threads: int) -> None:
    on_host(monkeypatch, 16, None)
    assert host.default_threads(host.Share(1, cpus), 1) == threads


@pytest.mark.parametrize(
    ("engines", "cpus", "node", "here"),
    [
        (8, 4, 16, 4),  # others must be on other nodes
        (8, 4, 7, 1),
        (2, 4, 64, 2),
        (8, 0.5, 2, 4),
        (3, 8, 4, 1),  # more than the node has: it runs nevertheless
        (3, 0, 4, 3),
    ],
)
def test_only_engines_that_fit_share_a_node(engines: int, cpus: float, node: float, here: int) -> None:
    assert host.Share.of_node(engines, cpus, node) == host.Share(here, cpus)


@pytest.mark.parametrize(
    ("nodes", "engines", "part"),
    [
        ([16], 2, 7),
        ([16, 16, 16, 16], 4, 15),
        ([16, 16, 16, 16], 8, 7),
        ([16, 4], 2, 7),
        ([16, 4], 4, 3),
        ([1, 1], 2, 1),
        ([2, 2], 3, 1),
        ([4], 9, 1),
        ([], 1, 1),
    ],
)
def test_engines_get_equal_parts_of_unequal_nodes(nodes: list[float], engines: int, part: int) -> None:
    assert host.equal_part(nodes, engines, 1) == part


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (2.9, 2), (64.0, 8)])
def test_usable_cores_are_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    on_host(monkeypatch, 8, quota)
    assert host.usable_cores() == cores


def test_memory_is_the_cgroups_limit_or_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, allowed in ((1 << 20, 1 << 20), (None, physical), (1 << 62, physical)):
        monkeypatch.setattr(host, "memory_limit", lambda limit=limit: limit)
        assert host.memory_limit_bytes() == allowed


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_thread_that_gives_way_does_so_with_those_it_starts_only() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []

    def starts_another() -> None:
        host.give_way()
        found.append(priority())
        inner = threading.Thread(target=lambda: found.append(priority()))
        inner.start()
        inner.join()

    before = priority()
    outer = threading.Thread(target=starts_another)
    outer.start()
    outer.join()
    assert found == [min(19, before + host.NICENESS)] * 2
    assert priority() == before


def test_cores_are_claimed_once_and_freed_by_death(tmp_path: Path) -> None:
    count = len(host.physical_cores())
    script = (
        "import sys, pathlib; from engine.host import claim_cores\n"
        f"print(len(claim_cores({count}, pathlib.Path(sys.argv[1]))), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == f"{count}\n"
    assert subprocess.run(command, input="", capture_output=True, text=True, timeout=30).stdout == "0\n"
    first.kill()
    first.wait(10)
    assert subprocess.run(command, input="", capture_output=True, text=True, timeout=30).stdout == f"{count}\n"


def test_the_probe_of_memory_is_larger_than_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two last-level caches, each shared by two cores; this process has three of them, and one that says nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 9})
    for core in range(4):
        for index, level, size, shared in ((0, 1, "48K", core), (3, 3, "32768K", core // 2)):
            folder = tmp_path / f"cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
    assert host.last_level_cache_bytes(tmp_path) == 64 << 20
    assert host.last_level_cache_bytes(tmp_path / "nothing") == 0
    probed: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, dtype: probed.append(8 * count) or ones(1, dtype=dtype))
    mib = 1 << 20
    for cache, limit, expected in ((0, 8 << 30, 128), (96 * mib, 8 << 30, 192), (96 * mib, 1 << 30, 64)):
        monkeypatch.setattr(host, "last_level_cache_bytes", lambda cache=cache: cache)
        monkeypatch.setattr(host, "memory_limit_bytes", lambda limit=limit: limit)
        host.memory_bandwidth()
        assert probed.pop() == expected * mib
