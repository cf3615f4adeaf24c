"""The compiled kernels' cache: what is damaged is made again, what fails says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kernels.cpu import compile as compiling

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in compiling.COMPILERS), reason="no C compiler is on the PATH"
)

LOAD = """
import torch
from kernels.cpu.compile import load
load()
"""


def loaded(cache: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process of its own loads the kernels: a damaged library would end it."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": path or os.environ["PATH"]}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    assert loaded(tmp_path).returncode == 0
    (library,) = (tmp_path / "ferry").glob("*.so")
    whole = library.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    for content in (whole[:8192], b"", bytes(damaged)):
        library.write_bytes(content)
        done = loaded(tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(library.read_bytes()) == len(whole)
    made = library.stat().st_mtime_ns
    assert loaded(tmp_path).returncode == 0
    assert library.stat().st_mtime_ns == made, "a whole one is used as it is"


@pytest.mark.slow
def test_a_compiler_that_fails_in_no_known_encoding_is_a_sentence(tmp_path: Path) -> None:
    cc = tmp_path / "bin" / "cc"
    cc.parent.mkdir()
    cc.write_text('#!/bin/sh\nprintf "\\377\\376 error\\n" >&2\nexit 1\n')
    cc.chmod(0o755)
    done = loaded(tmp_path, f"{cc.parent}{os.pathsep}{os.environ['PATH']}")
    assert "Unavailable" in done.stderr and "UnicodeDecodeError" not in done.stderr


def test_without_a_compiler_torch_takes_over_with_one_line(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import logging, torch
        logging.basicConfig(format="%(message)s")
        from kernels import cpu, dispatch
        x = torch.randn(4, 32)
        for _ in range(3):
            dispatch.rms_norm(x, torch.ones(32), 1e-5)
        assert cpu.numerics(torch.bfloat16) == "torch"
        assert not dispatch.transposed_keys(x.device, torch.bfloat16)
    """)
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "kernels" in line]
    assert len(lines) == 1 and "no C compiler" in lines[0]


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = "from kernels.cpu.compile import load; load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "ferry").glob("*.so"))) == 1
    assert not list((tmp_path / "ferry").glob("*.tmp"))
