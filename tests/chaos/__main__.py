"""Random faults on a real local service under streaming load; every stream is compared with its undisturbed run.

python -m tests.chaos --minutes 10
python -m tests.chaos --minutes 1 --seed 17      the same victims and moments, as far as processes repeat themselves
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tests.chaos.faults import Faults
from tests.chaos.load import Load
from tests.chaos.run import Outcome, run
from tests.integration.service import Service, start_cluster, stop_cluster
from tests.models import make_llama

EVERY_S = 4.0
SHOWN = 20  # losses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="of victims and moments; a new one if it is not given")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between faults (default %(default)g)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(10**6)
    print(f"seed {seed}: the service starts and answers undisturbed")
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(folder, dtype=torch.bfloat16, max_position_embeddings=1024)
        service = Service(start_cluster())
        try:
            with tqdm(total=round(60 * arguments.minutes), unit=" s", bar_format=BAR) as bar:

                def progress(load: Load, faults: Faults) -> None:
                    faults_so_far = sum(faults.injected.values())
                    bar.set_postfix_str(
                        f"{load.finished} streams, {faults_so_far} faults, {len(load.lost)} lost", refresh=False
                    )
                    bar.update(1)

                outcome = run(service, model, seed, 60 * arguments.minutes, arguments.every, progress)
        finally:
            stop_cluster()
    Console().print(table(outcome))
    for line in outcome.lost[:SHOWN]:
        print(f"lost: {line}")
    return int(bool(outcome.lost))


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} s{postfix}"


def table(outcome: Outcome) -> Table:
    """What was done and what came of it."""
    made = Table(title=f"seed {outcome.seed}, {outcome.seconds:.0f} s", title_justify="left", box=None)
    made.add_column("")
    made.add_column("", justify="right")

    def rows(title: str, entries: list[tuple[str, str]]) -> None:
        made.add_row(title, "", style="bold")
        for name, value in entries or [("none", "")]:
            made.add_row(f"  {name}", value)

    rows("injected", [(name, str(count)) for name, count in sorted(outcome.injected.items())])
    rows("moves", [(f"{cause}: {result}", str(count)) for (cause, result), count in sorted(outcome.moves.items())])
    refused = [(f"refused before the first token: {why}", str(count)) for why, count in sorted(outcome.refused.items())]
    seen = {
        "streams finished": str(outcome.finished),
        "streams cancelled by their clients": str(outcome.cancelled),
        "tokens": str(outcome.tokens),
        "requests started again elsewhere": str(outcome.resumed),
        "moved or resumed requests computed again": str(outcome.verified),
        "worst gap in a stream": f"{outcome.worst_gap_s:.2f} s",
        "worst downtime of a move": f"{outcome.worst_downtime_ms:.0f} ms",
    }
    rows("seen", [*seen.items(), *refused])
    rows("lost", [("streams or requests", str(len(outcome.lost)) if outcome.lost else "nothing")])
    return made


if __name__ == "__main__":
    sys.exit(main())
