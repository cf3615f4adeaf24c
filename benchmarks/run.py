"""All benchmarks in a row: `make bench`."""

from __future__ import annotations

import subprocess
import sys


def main() -> None:
    for command in (["benchmarks.engine"], ["benchmarks.profile"], ["benchmarks.http", "--cold"]):
        print(f"== python -m {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    main()
