"""Runs: one trace, one rate, one seed, one policy each, many at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

from llumnix.simulator.arrivals import arrivals
from llumnix.simulator.cluster import Cluster, ClusterConfig
from llumnix.simulator.device import load_device
from llumnix.simulator.lengths import TRACES, lengths
from llumnix.simulator.policies import Policy
from llumnix.simulator.result import Result, result_of
from llumnix.simulator.trace import Trace, make_trace, read_trace


@dataclass(frozen=True)
class Run:
    """One simulation. A trace is a family of lengths (TRACES) or the path of a file."""

    trace: str
    policy: Policy
    rate: float = 0.0  # requests a second; 0: as in the file
    seed: int = 0
    cv: float = 1.0  # of the gaps between generated arrivals
    requests: int = 10_000
    replicas: int = 16
    high_share: float = 0.0  # of the requests that are of the high class
    autoscale: tuple[int, int] | None = None
    device: str = "a10-llama-7b"

    @property
    def label(self) -> str:
        return self.trace if self.trace in TRACES else Path(self.trace).name.split(".")[0]


@dataclass(frozen=True)
class Done:
    run: Run
    result: Result


def trace_of(run: Run) -> Trace:
    """The requests of a run. The seed decides lengths, arrivals and classes; of a file, where the window begins."""
    rng = np.random.default_rng([run.seed, 0x5EED])
    capacity = load_device(run.device).capacity
    if run.trace in TRACES:
        prompt, output = lengths(run.trace, run.requests, rng)
        trace = make_trace(run.trace, arrivals(run.rate, run.requests, rng, run.cv), prompt, output)
    else:
        trace = _read(run.trace).fitting(capacity)
        first = int(rng.integers(0, max(1, len(trace) - run.requests + 1))) if run.seed else 0
        trace = trace.window(first, run.requests)
        trace = trace.at_rate(run.rate) if run.rate else trace
    if run.high_share:
        trace = trace.with_high(run.high_share, rng)
    return trace.fitting(capacity)


@cache
def _read(path: str) -> Trace:
    return read_trace(Path(path))


def simulate(run: Run) -> Result:
    how = run.policy
    config = ClusterConfig(
        device=load_device(run.device),
        settings=how.settings,
        replicas=run.replicas,
        moves=how.moves,
        classes=how.classes,
        autoscale=run.autoscale,
        report_s=how.report_s,
        booking=how.booking,
    )
    cluster = Cluster(config, trace_of(run))
    cluster.run()
    return result_of(cluster)


def simulate_all(runs: Sequence[Run], processes: int = 0, progress: bool = True) -> list[Done]:
    """Results in the order of `runs`; processes 0: one a core."""
    processes = min(processes or len(os.sched_getaffinity(0)), len(runs))
    bar = tqdm(total=len(runs), unit="run", disable=not progress)
    with bar:
        if processes <= 1:
            results = []
            for run in runs:
                results.append(simulate(run))
                bar.update()
        else:
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                results = []
                for result in pool.imap(simulate, runs):
                    results.append(result)
                    bar.update()
    return [Done(run, result) for run, result in zip(runs, results)]
