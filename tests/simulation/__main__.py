"""More seeds than the suite has, or one of them with its trace.

python -m tests.simulation --seeds 20000
python -m tests.simulation --replay 17
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from multiprocessing import get_context

from tqdm import tqdm

from tests.simulation.run import Outcome, run

PROCESSES = 2
KEPT = 20  # failures shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--replay", type=int, help="run this seed alone and print what happened")
    arguments = parser.parse_args()
    return replay(arguments.replay) if arguments.replay is not None else run_all(arguments)


def replay(seed: int) -> int:
    outcome = run(seed, trace=True)
    print("\n".join(outcome.trace))
    print(f"seed {seed}: faults {dict(outcome.hits)}, requests {dict(outcome.ends)}, moves {dict(outcome.moves)}")
    print("\n".join(outcome.violations) or "nothing was violated")
    return int(bool(outcome.violations))


def run_all(arguments: argparse.Namespace) -> int:
    totals = Counter[str](), Counter[str](), Counter[str]()
    failed: list[Outcome] = []
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with get_context("spawn").Pool(arguments.processes) as pool:
        outcomes = pool.imap_unordered(run, seeds, chunksize=8)
        for outcome in (bar := tqdm(outcomes, total=len(seeds), unit=" seeds")):
            for total, more in zip(totals, (outcome.hits, outcome.ends, outcome.moves), strict=True):
                total.update(more)
            if outcome.violations:
                failed.append(outcome)
                if len(failed) <= KEPT:
                    bar.write(str(outcome))
    hits, ends, moves = totals
    print(f"requests {dict(ends)}\nmoves {dict(moves)}")
    for point, count in sorted(hits.items()):
        print(f"  {count:8d} {point}")
    print(f"{len(failed)} of {len(seeds)} seeds failed: {sorted(outcome.seed for outcome in failed)[:KEPT]}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
