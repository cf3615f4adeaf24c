"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from engine.host import memory_limit_bytes, usable_cores


def describe() -> str:
    """One line: processor, cores, memory, versions."""
    names = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    model = names[0].split(":", 1)[1].strip() if names else platform.machine()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    memory = memory_limit_bytes() / (1 << 30)
    return f"{model}, {usable_cores()} usable cores, {memory:.0f} GiB, Python {platform.python_version()}, load {load}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
