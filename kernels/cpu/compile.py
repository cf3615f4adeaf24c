"""Compiles kernels/cpu/native on first use and loads it: plain C ABI, the host's compiler, ctypes.

The library is cached by source, flags, compiler and processor features, so that a shared cache directory serves
unlike hosts, and made under a file lock, so that engines that start together compile once. torch is imported before
it is loaded: both then use one OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime must be the one that is loaded first)

logger = logging.getLogger("ferry.kernels")

SOURCE = Path(__file__).parent / "native"
COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 120.0
FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # No -ffast-math: sums keep their order. Compilers fuse nothing of their own accord, or two inlined copies of one
    # routine might round differently; what is fused is written as such (vectors.h).
    *("-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
)


class Unavailable(Exception):
    """No native kernels on this host; the message says why."""


@cache
def load(target: str = "native") -> ctypes.CDLL:
    """The library for an instruction set: "native", or a -march value such as "x86-64-v3" (AVX2).

    Raises Unavailable when there is no compiler or it fails.
    """
    try:
        library = cache_directory() / f"kernels-{target}-{build_id(target)}.so"
        if not _is_whole(library):
            _compile(_command(target), library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiled kernels cannot be used: {error}") from error


@cache
def build_id(target: str = "native") -> str:
    """Digest of all that decides the library's results: source, flags, compiler, the processor's features."""
    command = _command(target)
    digest = hashlib.blake2b(" ".join(command).encode(), digest_size=12)
    for file in sorted(SOURCE.glob("*.[ch]")):
        digest.update(file.read_bytes())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, timeout=10).stdout)
    digest.update(_processor_features().encode())
    return digest.hexdigest()


def flags(target: str, machine: str) -> list[str]:
    """The compiler's options for an instruction set on a kind of machine, as `platform.machine` names it."""
    if target != "native":
        return [*FLAGS, f"-march={target}"]
    if machine in ("x86_64", "AMD64"):
        return [*FLAGS, "-march=native", "-mprefer-vector-width=512"]
    if machine in ("aarch64", "arm64"):
        return [*FLAGS, "-mcpu=native"]
    return list(FLAGS)  # plain C: not every compiler knows its own processor


def cache_directory() -> Path:
    """Where compiled kernels live: below $XDG_CACHE_HOME or ~/.cache, else a folder of ours in the temporary one.

    Raises OSError when there is no folder that only this user can have written to.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for path in (Path(base) / "ferry", Path(tempfile.gettempdir()) / f"ferry-{os.getuid()}"):
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK):
                return path
    raise OSError(f"neither {base} nor {tempfile.gettempdir()} can hold them")


def _command(target: str) -> list[str]:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) is on the PATH")
    return [compiler, *flags(target, platform.machine())]


def _processor_features() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _is_whole(library: Path) -> bool:
    """The library is there as it was made: one that is cut or damaged would end the process, or compute nonsense."""
    try:
        return library.with_suffix(".digest").read_text() == _digest(library)
    except (OSError, UnicodeDecodeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _compile(command: list[str], library: Path) -> None:
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(library):  # somebody else did it meanwhile
            return
        made = library.with_suffix(f".{os.getpid()}.tmp")
        source = SOURCE / "kernels.c"
        try:
            run = [*command, "-o", str(made), str(source), "-lm"]
            done = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command[0]} did not finish within {COMPILE_LIMIT_S:g} s") from None
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise Unavailable(f"{command[0]} failed: {reason}")
        digest = _digest(made)
        made.rename(library)
        library.with_suffix(".digest").write_text(digest)
        logger.info("compiled the CPU kernels: %s", library)
