"""Quotas and limits are found wherever in the tree of control groups they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cgroup import cpu_quota, memory_limit

V2 = "0::/kubepods/pod1/box\n"
V1 = "9:memory:/docker/box\n5:cpuset:/\n4:cpu,cpuacct:/docker/box\n0::/\n"
LIMITLESS_V1 = str(2**63 - 4096)


def made(root: Path, files: dict[str, str], membership: str | None) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "mount" / name).write_text(text + "\n")
    if membership is not None:
        (root / "self").write_text(membership)
    return root / "mount", root / "self"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "150000 100000"}, "0::/\n", 1.5),  # in a container with a namespace of its own
        ({"cpu.max": "150000 100000"}, None, 1.5),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": "nonsense"}, "0::/\n", None),
        ({"cpu.max": "100000 0"}, "0::/\n", None),
        ({}, V2, None),
        ({"kubepods/pod1/box/cpu.max": "150000 100000"}, V2, 1.5),
        ({"kubepods/pod1/cpu.max": "50000 100000", "kubepods/pod1/box/cpu.max": "max 100000"}, V2, 0.5),
        ({"kubepods/cpu.max": "400000 100000", "kubepods/pod1/box/cpu.max": "300000 50000"}, V2, 4.0),
        ({"kubepods/cpu.max": "600000 100000", "kubepods/pod1/box/cpu.max": "200000 50000"}, V2, 4.0),
        ({"kubepods/pod2/cpu.max": "50000 100000", "box/cpu.max": "50000 100000"}, V2, None),  # others' groups
        ({"cpu.max": "150000 100000"}, "0::/../../box\n", 1.5),  # outside of the namespace's top
        ({"cpu.max": "150000 100000"}, V2, 1.5),  # the host's path: the mount is the container's group
        ({"unified/kubepods/pod1/box/cpu.max": "150000 100000"}, V2, 1.5),
        (v1("cpu", 400_000), "4:cpu:/\n0::/\n", 4.0),
        (v1("cpu", 400_000), None, 4.0),
        (v1("cpu", -1), V1, None),
        (v1("cpu,cpuacct", 400_000) | v1("cpu,cpuacct/docker/box", 25_000, 50_000), V1, 0.5),
        (v1("cpu", -1) | v1("cpu/docker", 100_000) | v1("cpu/docker/box", 300_000), V1, 1.0),
        (v1("cpu/box", 100_000) | v1("cpu/docker/other", 100_000), V1, None),
    ],
)
def test_the_least_cpu_quota_of_the_group_and_its_ancestors(
    files: dict[str, str], membership: str | None, quota: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(*made(tmp_path, files, membership)) == quota


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({"memory.max": "12345"}, "0::/\n", 12345),
        ({"memory.max": "max"}, "0::/\n", None),
        ({}, None, None),
        (
            {"kubepods/memory.max": "300", "kubepods/pod1/memory.max": "200", "kubepods/pod1/box/memory.max": "max"},
            V2,
            200,
        ),
        ({"memory.max": "100", "kubepods/pod1/box/memory.max": "200"}, V2, 100),
        ({"kubepods/other/memory.max": "100"}, V2, None),
        ({"memory/memory.limit_in_bytes": "54321"}, None, 54321),
        ({"memory/memory.limit_in_bytes": LIMITLESS_V1, "memory/docker/box/memory.limit_in_bytes": "777"}, V1, 777),
        ({"memory/docker/memory.limit_in_bytes": "55", "memory/docker/box/memory.limit_in_bytes": "777"}, V1, 55),
        ({"memory/memory.limit_in_bytes": LIMITLESS_V1}, V1, 2**63 - 4096),
    ],
)
def test_the_least_memory_limit_of_the_group_and_its_ancestors(
    files: dict[str, str], membership: str | None, limit: int | None, tmp_path: Path
) -> None:
    assert memory_limit(*made(tmp_path, files, membership)) == limit
