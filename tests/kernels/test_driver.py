"""The native kernels without Python: cross-compiled and emulated, and under the compiler's sanitizers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.compile import FLAGS, SOURCE, flags
from tests.kernels.cases import TARGETS, compiled

DRIVER = Path(__file__).parent / "driver.c"
STRICT = ("-Wall", "-Wextra", "-Werror")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"


def build(compiler: str, library_flags: list[str], folder: Path, extra: tuple[str, ...] = ()) -> Path:
    """The driver, linked with the kernels as flags make them. Fails on any warning."""
    library = [*library_flags, *STRICT, *extra, "-o", str(folder / "libkernels.so"), str(SOURCE / "kernels.c"), "-lm"]
    driver = ["-O2", "-std=gnu11", *STRICT, *extra, f"-I{SOURCE}", "-o", str(folder / "driver"), str(DRIVER)]
    link = [f"-L{folder}", "-lkernels", "-fopenmp", "-lm", f"-Wl,-rpath,{folder}"]
    for arguments in (library, [*driver, *link]):
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    return folder / "driver"


def run(command: list[str], **environment: str) -> str:
    """Run the driver: all of its checks, and at least one, have to pass. Returns the digest of what was computed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.startswith("0 of ") and not done.stdout.startswith("0 of 0")
    return done.stdout.split("bits ")[1].strip()


def tool(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"{' or '.join(names)} is not installed")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", ["armv8-a", "armv8.6-a+sve"])
def test_aarch64(tmp_path: Path, target: str) -> None:
    compiler, emulator = tool("aarch64-linux-gnu-gcc"), tool("qemu-aarch64", "qemu-aarch64-static")
    driver = build(compiler, flags(target, "aarch64"), tmp_path)
    run([emulator, "-cpu", "max", "-L", ARM_LIBRARIES, str(driver)])


def loosely(strict_flags: list[str]) -> list[str]:
    """Less optimised, and free to fuse what the source multiplies and adds without saying how to round it."""
    other = {"-O3": "-O2", "-ffp-contract=off": "-ffp-contract=fast"}
    return [other.get(flag, flag) for flag in strict_flags]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_memory_and_arithmetic_are_well_defined(tmp_path: Path, target: str) -> None:
    """No read or write past an end, no misaligned or overflowing arithmetic, no bit that is the compiler's choice."""
    compiled(target)  # skips what this machine cannot run
    compiler = tool("gcc")
    if not Path(subprocess.check_output([compiler, "-print-file-name=libasan.so"], text=True).strip()).is_absolute():
        pytest.skip("gcc has no address sanitizer here")
    usual = flags(target, platform.machine())
    bits = run([str(build(compiler, usual, tmp_path))])
    assert run([str(build(compiler, loosely(usual), tmp_path, SANITIZE))]) == bits
    assert "-ffp-contract=off" in usual


def test_each_machine_gets_its_own_flags() -> None:
    assert "-march=native" in flags("native", "x86_64")
    assert "-mcpu=native" in flags("native", "aarch64") and "-march=native" not in flags("native", "aarch64")
    assert flags("native", "riscv64") == list(FLAGS)
    assert flags("armv8-a", "aarch64")[-1] == "-march=armv8-a"
    assert "-ffast-math" not in flags("native", "x86_64")
