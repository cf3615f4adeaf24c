"""Compiles kernels/cpu/native on first use and loads it: plain C ABI, the host's compiler, ctypes.

The library is cached by source, flags, processor features and compiler, so that a shared cache directory serves
unlike hosts, and made under a file lock, so that engines that start together compile once. A host without a compiler
uses what one left for its source, flags and features. torch is imported before
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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Library:
    """A loaded library, and what its results depend on: a digest of source, flags, processor features and compiler."""

    handle: ctypes.CDLL
    build_id: str


@cache
def load(target: str = "native") -> Library:
    """The library for an instruction set: "native", or a -march value such as "x86-64-v3" (AVX2).

    Each compiler on the PATH is tried until one works, then what an earlier one of this host left in the cache. Raises
    Unavailable with the reasons when there is nothing.
    """
    reasons = []
    try:
        directory, name = cache_directory(), f"kernels-{target}-{source_id(target)}"
    except OSError as error:
        raise Unavailable(f"there is no place for compiled kernels: {error}") from error
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        try:
            library = directory / f"{name}-{compiler_id(compiler)}.so"
            if not _is_whole(library):
                _compile([compiler, *flags(target, platform.machine())], library)
            return _open(library, target)
        except (OSError, subprocess.SubprocessError, Unavailable) as error:
            reasons.append(f"{compiler}: {error}")
    made = [library for library in directory.glob(f"{name}-*.so") if _is_whole(library)]
    if made:
        try:
            return _open(max(made, key=lambda library: library.stat().st_mtime), target)
        except OSError as error:
            reasons.append(f"{directory}: {error}")
    raise Unavailable("; ".join(reasons) or f"no C compiler ({', '.join(COMPILERS)}) is on the PATH")


def source_id(target: str) -> str:
    """Digest of what decides a library's results beside the compiler: source, flags, the processor's features."""
    digest = hashlib.blake2b(" ".join(flags(target, platform.machine())).encode(), digest_size=8)
    for file in sorted(SOURCE.glob("*.[ch]")):
        digest.update(file.read_bytes())
    digest.update(_processor_features().encode())
    return digest.hexdigest()


def compiler_id(compiler: str) -> str:
    """Digest of a compiler's name and version. Raises OSError or SubprocessError when it does not say."""
    done = subprocess.run([compiler, "--version"], capture_output=True, timeout=10, check=True)
    return hashlib.blake2b(compiler.encode() + done.stdout, digest_size=8).hexdigest()


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


def _open(library: Path, target: str) -> Library:
    return Library(ctypes.CDLL(str(library)), library.stem.removeprefix(f"kernels-{target}-"))


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
    """Make a library. One process of all that share the directory compiles at a time."""
    with open(library.parent / "compile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(library):  # somebody else did it meanwhile
            return
        for left in library.parent.glob("kernels-*.tmp"):  # by processes that were killed: nobody else compiles now
            left.unlink(missing_ok=True)
        made = library.with_suffix(f".{os.getpid()}.tmp")
        try:
            run = [*command, "-o", str(made), str(SOURCE / "kernels.c"), "-lm"]
            done = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"it did not finish within {COMPILE_LIMIT_S:g} s") from None
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise Unavailable(f"it failed: {reason}")
        digest = _digest(made)
        made.rename(library)
        library.with_suffix(".digest").write_text(digest)
        logger.info("compiled the CPU kernels: %s", library)
