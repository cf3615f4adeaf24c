"""What rescheduling costs while no move is needed: throughput with moves on over throughput with moves off.

    python -m benchmarks.rescheduling [--streams 16] [--pairs 10] [--seconds 8] [--json FILE]

Two engine replicas of one thread each with the demo model, evenly loaded by streams over HTTP that outlast the run. The
settings in force change every few seconds, in the order on off, off on, ...; each pair gives one ratio. Afterwards the
same service idles, and the CPU time of its two engines is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.machine import describe
from benchmarks.moves import MAX_MODEL_LEN, Cluster, Stream, cluster, interval

PROMPT_TOKENS = 64
SETTLE_S = 1.0  # after a change of settings: all processes have them
IDLE_S = 30.0


async def throughput(streams: list[Stream], seconds: float) -> float:
    """Tokens a second of all streams together."""
    before, started = sum(len(stream.at) for stream in streams), time.perf_counter()
    await asyncio.sleep(seconds)
    return (sum(len(stream.at) for stream in streams) - before) / (time.perf_counter() - started)


async def run(ferry: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    source = random.Random(0)
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with httpx.AsyncClient(base_url=ferry.url, timeout=600) as client:
        prompts = [[source.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(options.streams)]
        streams = [Stream(client, prompt, MAX_MODEL_LEN - PROMPT_TOKENS - 1) for prompt in prompts]
        await asyncio.gather(*(stream.tokens(8) for stream in streams))
        for pair in range(options.pairs):
            for on in (True, False) if pair % 2 == 0 else (False, True):
                await ferry.manager.reconfigure.remote({"llumnix": {"enable_moves": on}, "kv_transfer": {}})
                await asyncio.sleep(SETTLE_S)
                rates[on].append(await throughput(streams, options.seconds))
        moves = len((await ferry.snapshot())["moves"])
        await asyncio.gather(*(stream.close() for stream in streams))
    ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
    middle, low, high = interval([1 - ratio for ratio in ratios])
    print(f"on  {' '.join(f'{rate:.0f}' for rate in rates[True])} tok/s")
    print(f"off {' '.join(f'{rate:.0f}' for rate in rates[False])} tok/s")
    print(
        f"rescheduling costs {100 * middle:+.1f} % (95 % interval {100 * low:+.1f} to {100 * high:+.1f}); {moves} moves"
    )
    idle = await idle_cores(ferry)
    print(f"two idle engines: {sum(idle):.4f} of a core ({', '.join(f'{one:.4f}' for one in idle)})")
    return {"machine": describe(), "on": rates[True], "off": rates[False], "moves": moves, "idle_cores": idle}


async def idle_cores(ferry: Cluster) -> list[float]:
    """Of each engine's process."""
    await asyncio.sleep(3)
    processes = [p for p in psutil.Process().children(recursive=True) if "ray::EngineActor" in " ".join(p.cmdline())]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    await asyncio.sleep(IDLE_S)
    return [(sum(p.cpu_times()[:2]) - start) / IDLE_S for p, start in zip(processes, before, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe())
    with cluster() as ferry:
        report = asyncio.run(run(ferry, options))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
