"""What a setting or a missing compiler costs the bare engine, as whole processes in turn.

    python -m benchmarks.factors [--only batch_invariant compiler] [--repeats 3] [--json FILE]

- batch_invariant: that a request's bits do not depend on its batch (the default), against an engine without that.
- compiler: the native kernels, against torch's, which take over where there is neither a C compiler
  nor a library that one has made before.

Ratios are of the default over the engine without it: 0.98 is a cost of 2 %, 3 means three times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare import Sample, alternate, measured, report, rows, show
from benchmarks.engine import add_options
from benchmarks.machine import describe

DEFAULT = "default"
NATIVE, TORCH = "native", "torch's"
FACTORS = {  # name -> settings of the engine without it, its environment, its kernels
    "batch_invariant": (["batch_invariant=false"], {}, NATIVE),
    "compiler": ([], {"PATH": os.devnull, "XDG_CACHE_HOME": "build/no-kernels"}, TORCH),
}
RUNS = 2  # of each case in a process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FACTORS, default=list(FACTORS))
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, help="file for all figures")
    add_options(parser)
    options = parser.parse_args()
    command = [sys.executable, "-m", "benchmarks.engine", "--json", "--repeats", str(RUNS), "--model", options.model]
    command += ["--quick"] * options.quick
    given = [f"{name}={value}" for name, value in options.set]

    def side(settings: list[str], env: dict[str, str], kernels: str) -> Callable[[], Sample]:
        chosen = [*given, *settings]

        def measure() -> Sample:
            sample = measured([*command, *(["--set", *chosen] if chosen else [])], os.environ | env)
            if sample.facts["kernels"] != kernels:
                sys.exit(f"error: an engine ran on {sample.facts['kernels']} kernels, must be {kernels}")
            return sample

        return measure

    sides = {DEFAULT: side([], {}, NATIVE)} | {f"without {name}": side(*FACTORS[name]) for name in options.only}
    samples = alternate(sides, options.repeats)
    machine = describe()
    print(machine)
    show(rows(samples), f"{options.repeats} processes of each side in turn, {RUNS} runs a case in each")
    print(" ".join(sys.orig_argv))
    if options.json:
        options.json.write_text(json.dumps(report(samples, machine), indent=1))


if __name__ == "__main__":
    main()
