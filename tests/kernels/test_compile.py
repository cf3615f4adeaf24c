"""The compiled kernels' cache: what is damaged is made again, what fails says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
