"""The benchmarks in a row, about half an hour on two cores: `make bench`.

    python -m benchmarks.run [--only engine http ...] [--out build/bench]

What each prints also goes to a file of its name below --out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {  # name -> module and arguments
    "engine": ["benchmarks.engine"],
    "profile": ["benchmarks.profile"],
    "factors": ["benchmarks.factors", "--repeats", "2"],
    "http": ["benchmarks.http", "--cold"],
    "moves": ["benchmarks.moves", "--lengths", "256", "2048", "--moves", "6", "--neighbours", "0"],
    "manager": ["benchmarks.manager", "--serve"],
}
LEFT_OUT = """left out:
  python -m benchmarks.peer            against vllm, which needs an environment of its own; a quarter of an hour
  python -m benchmarks.moves           contexts to 8,192, twenty moves each, and what neighbours feel; an hour
  python -m benchmarks.factors         three turns and more, for differences of a few percent
  make bench-llumnix                   the policies in the simulator; half an hour"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=LEFT_OUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"results go to {options.out.resolve()}; what is left out: python -m benchmarks.run --help", flush=True)
    failed = [name for name in options.only if run(COMMANDS[name], options.out / f"{name}.txt")]
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, see {options.out}")


def run(command: list[str], file: Path) -> int:
    """Run a module, printing and keeping what it prints; its exit status."""
    title = f"== python -m {' '.join(command)}\n"
    started = time.perf_counter()
    with open(file, "w") as kept:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in (title, *process.stdout):
            print(line, end="", flush=True)
            kept.write(line)
        status = process.wait()
        ended = f"== {time.perf_counter() - started:.0f} s\n" if not status else f"== failed with status {status}\n"
        print(ended, end="", flush=True)
        kept.write(ended)
    return status


if __name__ == "__main__":
    main()
