"""The compiled kernels' cache: what is damaged is made again, what fails says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kernels import cpu
from kernels.cpu import compile as compiling
from kernels.cpu.native_ops import NativeOps

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in compiling.COMPILERS), reason="no C compiler is on the PATH"
)

LOAD = """
import logging
logging.basicConfig(format="%(message)s", level="INFO")
from kernels import cpu
print(cpu.ops().__class__.__name__)
"""


def loaded(cache: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process of its own loads the kernels, a damaged library would end it: what kind of kernels it has got."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": os.environ["PATH"] if path is None else path}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def is_native(done: subprocess.CompletedProcess[str]) -> bool:
    return done.stdout.strip() == "NativeOps"


def compiler(path: Path, script: str) -> None:
    """A compiler that says a version, and for anything else runs a script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo {path.name} 1; exit 0; fi\n{script}\n')
    path.chmod(0o755)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which one process has compiled the kernels."""
    cache = tmp_path_factory.mktemp("cache")
    assert is_native(loaded(cache))
    return cache


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


@pytest.mark.slow
def test_a_damaged_library_is_made_again(cache: Path) -> None:
    (library,) = (cache / "ferry").glob("*.so")
    whole = library.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    for content in (whole[:8192], b"", bytes(damaged)):
        library.write_bytes(content)
        assert is_native(loaded(cache))
        assert len(library.read_bytes()) == len(whole)
    before = library.stat().st_mtime_ns
    assert is_native(loaded(cache))
    assert library.stat().st_mtime_ns == before, "a whole one is used as it is"


@pytest.mark.slow
def test_what_an_interrupted_compiler_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "ferry" / "kernels-native-0123-4567.99.tmp"
    left.parent.mkdir(mode=0o700)
    left.write_bytes(b"half a library")
    assert is_native(loaded(tmp_path))
    assert not list(left.parent.glob("*.tmp"))


@pytest.mark.slow
def test_a_host_without_a_compiler_uses_what_one_left(cache: Path, tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    assert is_native(loaded(cache, nothing))
    (library,) = (cache / "ferry").glob("*.so")
    old, digest = cache / "ferry" / f"{library.stem[:-1]}_.so", library.with_suffix(".digest").read_bytes()
    old.write_bytes(library.read_bytes() + b"damaged")  # the newest, so taken first if it were whole
    old.with_suffix(".digest").write_bytes(digest)
    assert is_native(loaded(cache, nothing))
    other = library.stem.replace("native-", "native-0")  # of other source, flags or processor
    for suffix in (".so", ".digest"):
        library.with_suffix(suffix).rename(cache / "ferry" / f"{other}{suffix}")
    done = loaded(cache, nothing)
    assert not is_native(done) and "no C compiler" in done.stderr


@pytest.mark.slow
def test_the_next_compiler_is_tried(tmp_path: Path) -> None:
    good = next(path for name in compiling.COMPILERS if (path := shutil.which(name)))
    bin = tmp_path / "bin"
    compiler(bin / "cc", 'printf "\\377\\376 error: no such thing\\n" >&2; exit 1')  # in no known encoding
    compiler(bin / "gcc", "exit 3")
    done = loaded(tmp_path, str(bin))
    (line,) = (line for line in done.stderr.splitlines() if "torch's slower ones" in line)
    assert not is_native(done)
    assert f"{bin}/cc: it failed" in line and "no such thing" in line and f"{bin}/gcc: it failed" in line
    compiler(bin / "gcc", f'PATH={os.environ["PATH"]} exec {good} "$@"')
    assert is_native(loaded(tmp_path, str(bin)))


@pytest.mark.slow
def test_a_library_without_our_functions_is_not_used(tmp_path: Path) -> None:
    good = next(path for name in compiling.COMPILERS if (path := shutil.which(name)))
    empty = (
        f'while [ "$1" != -o ]; do shift; done; PATH={os.environ["PATH"]} exec {good} -shared -x c /dev/null -o "$2"'
    )
    compiler(tmp_path / "bin" / "cc", empty)
    done = loaded(tmp_path, str(tmp_path / "bin"))
    assert not is_native(done)
    assert "has no rms_norm_f32, silu_mul_f32" in done.stderr


def test_a_compiler_on_the_path_means_native_kernels() -> None:
    """An error of the compiler is an error here, whatever other tests that need native kernels make of it."""
    assert isinstance(cpu.ops(), NativeOps)


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


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = "from kernels.cpu.compile import load; load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "ferry").glob("*.so"))) == 1
    assert not list((tmp_path / "ferry").glob("*.tmp"))
