"""The manager with a thousand engines: CPU of taking reports in, of a round of pairing, of a view, of a dispatch.

    python -m benchmarks.manager [--engines 1024] [--rounds 20]

Reports are pickled and unpickled as they are on their way through Ray; what Ray itself takes for a call is measured on
a real Serve handle with `--serve`, which starts a local cluster. Figures are of the CPU clock of the thread, so that
others on the machine matter little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import describe
from llumnix.load import READY, LoadReport, Movable
from llumnix.manager import ClusterView
from llumnix.policies.dispatch import Ask, choose
from llumnix.policies.fleet import Fleet
from llumnix.rescheduler import Rescheduler

BLOCKS = 851


def report(engine: str, sequence: int, source: random.Random) -> dict[str, Any]:
    """A loaded engine: some starve, some idle, so that rounds have pairs to make."""
    free = source.randrange(0, BLOCKS)
    running = source.randrange(1, 64)
    movable = tuple(
        Movable(
            f"chatcmpl-{source.getrandbits(96):024x}-0",
            0,
            source.randrange(32, 4096),
            source.randrange(2, 64),
            False,
            i,
        )
        for i in range(8)
    )
    made = LoadReport(
        engine, 1.0, sequence, state=READY, compat_key="k", max_model_len=8192, total_blocks=BLOCKS, free_blocks=free,
        running=running, waiting=int(free < 50), head_blocks=60 * (free < 50), waiting_blocks=60 * (free < 50),
        movable=movable, step_seconds=0.03, prefill_tokens_per_s=4000.0,
    )  # fmt: skip
    return made.to_message()


def cpu_ms(call: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds of CPU of one call."""
    taken = []
    for _ in range(repeat):
        started = time.thread_time()
        call()
        taken.append(1e3 * (time.thread_time() - started))
    return statistics.median(taken)


def measure(engines: int, rounds: int) -> float:
    """Prints a table; returns the seconds between two reports of an engine."""
    source = random.Random(0)
    view, rescheduler, fleet = ClusterView("m"), Rescheduler(), Fleet()
    for i in range(engines):
        view.on_report({**report(f"e{i}", 1, source), "actor": f"e{i}"}, 0.0)
    packed = [pickle.dumps(report(f"e{i}", 2 + k, source)) for k in range(3) for i in range(engines)]
    each = iter(packed)
    taking = cpu_ms(lambda: view.on_report(pickle.loads(next(each)), 0.0), len(packed))
    for member in view.members.values():
        fleet.put(member.report)

    def one_round() -> None:
        rescheduler.open.clear()
        rescheduler.round(view.reports(0.0), 0.0)

    round_ms = cpu_ms(one_round, rounds)
    names = list(view.members)
    view_ms = cpu_ms(lambda: pickle.dumps(view.view(0.0, None, names)), rounds)
    dispatch_ms = cpu_ms(lambda: choose(fleet, Ask(300)), 200)
    interval = view.interval_s
    print(f"{engines:,} engines, a report of each every {interval:.2f} s: {engines / interval:,.0f} reports a second")
    print(f"one report, unpickled and taken in          {taking:9.3f} ms of CPU")
    print(f"one round of pairing ({len(rescheduler.open)} pairs)           {round_ms:9.3f} ms")
    print(f"a view of everything, pickled               {view_ms:9.3f} ms")
    print(f"one dispatch                                {dispatch_ms:9.4f} ms")
    own = engines / interval * taking / 1e3 + round_ms / 1e3 / rescheduler.settings.pairing_interval_s
    print(f"reports and rounds, without Ray             {own:9.3f} of a core")
    return interval


def through_serve(engines: int, interval: float, seconds: float = 10.0) -> None:
    """The manager's process behind a real Serve handle, at the rate that so many engines report with."""
    import psutil
    import ray
    from ray import serve

    from serving.manager import Manager

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    folder = tempfile.mkdtemp(prefix="fg-", dir="/tmp")
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    try:
        handle = serve.run(Manager.bind(), name="bench", route_prefix=None)  # type: ignore[attr-defined]
        source = random.Random(0)

        async def load() -> float:
            async def send(i: int, sequence: int) -> None:
                await handle.report.remote({**report(f"e{i}", sequence, source), "actor": "nobody"})

            await asyncio.gather(*(send(i, 1) for i in range(engines)))
            process = next(p for p in psutil.process_iter(["cmdline"]) if "bench:Manager" in " ".join(p.cmdline()))
            before, started, count = sum(process.cpu_times()[:2]), time.perf_counter(), 0
            tasks = []
            while (now := time.perf_counter() - started) < seconds:
                while count < now * engines / interval:
                    tasks.append(asyncio.create_task(send(count % engines, 2 + count // engines)))
                    count += 1
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            return (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - started)

        used = asyncio.run(load())
        print(f"the manager's process behind Serve          {used:9.3f} of a core, rounds and pairs included")
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    print(describe())
    interval = measure(options.engines, options.rounds)
    if options.serve:
        through_serve(options.engines, interval)


if __name__ == "__main__":
    main()
