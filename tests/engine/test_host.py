from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import host


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
    monkeypatch.setattr(host, "physical_cores", lambda: list(range(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(host, "_cgroup_quota", lambda: quota)
    assert host.default_threads(engines, reserved) == threads


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cgroup_quotas_of_both_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host._cgroup_quota(tmp_path) == quota


def test_a_cgroup_limits_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576")
    assert host.memory_limit_bytes(tmp_path) == 1 << 20
    (tmp_path / "memory.max").write_text("max")
    assert host.memory_limit_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
