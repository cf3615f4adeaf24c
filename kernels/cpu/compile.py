"""Compiles kernels/cpu/native on first use and loads it: plain C ABI, the host's compiler, ctypes, about a second once.

The library is cached by source, flags, compiler and processor, so that a shared cache directory serves unlike hosts,
and made under a file lock, so that engines that start together compile once. torch is imported before it is loaded:
both then use one OpenMP runtime.
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
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime must be the one that is loaded first)

logger = logging.getLogger("ferry.kernels")

SOURCE = Path(__file__).parent / "native"
COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 120.0
FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Contraction to fused multiply-adds is the same for every copy of an expression; reordering is not allowed.
    *("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"),
)


class Unavailable(Exception):
    """No native kernels on this host; the message says why."""


@cache
def load(target: str = "native") -> ctypes.CDLL:
    """The library for an instruction set: "native", or a -march value such as "x86-64-v3" (AVX2).

    Raises Unavailable when there is no compiler or it fails.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) is on the PATH")
    command = [compiler, *FLAGS, *_target_flags(target)]
    library = cache_directory() / f"kernels-{_key(command, target)}.so"
    try:
        if not library.exists():
            _compile(command, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be used: {error}") from error


def cache_directory() -> Path:
    """Where compiled kernels live: below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "ferry"
    try:
        path.mkdir(parents=True, exist_ok=True)
        return path
    except OSError:  # a read-only home
        path = Path(tempfile.gettempdir()) / f"ferry-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path


def _target_flags(target: str) -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        wide = ["-mprefer-vector-width=512"] if target == "native" else []
        return [f"-march={target}", *wide]
    return ["-mcpu=native"] if target == "native" else [f"-march={target}"]


def source_key() -> str:
    """Changes with every change of the sources."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(SOURCE.glob("*.[ch]")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _key(command: list[str], target: str) -> str:
    digest = hashlib.blake2b(source_key().encode(), digest_size=12)
    digest.update(" ".join(command).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, timeout=10).stdout)
    digest.update(_processor().encode())
    return f"{target}-{digest.hexdigest()}"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _compile(command: list[str], library: Path) -> None:
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():  # somebody else did it meanwhile
            return
        made = library.with_suffix(f".{os.getpid()}.tmp")
        source = SOURCE / "kernels.c"
        try:
            run = [*command, "-o", str(made), str(source), "-lm"]
            done = subprocess.run(run, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command[0]} did not finish within {COMPILE_LIMIT_S:g} s") from None
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise Unavailable(f"{command[0]} failed: {reason}")
        made.rename(library)
        logger.info("compiled the CPU kernels: %s", library)
