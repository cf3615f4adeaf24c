"""Random clusters under random requests, moves and faults; every fault point gets its share."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.simulation.faults import POINTS
from tests.simulation.run import Outcome, run

CHUNKS, CHUNK = 10, 30
LEAST = 20  # times that each fault point is hit by all seeds together


@cache
def outcomes(chunk: int) -> list[Outcome]:
    return [run(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_lost_doubled_or_left_behind(chunk: int) -> None:
    failed = [outcome for outcome in outcomes(chunk) if outcome.violations]
    assert not failed, "\n\n".join(str(outcome) for outcome in failed)
    assert all(sum(outcome.ends.values()) >= 6 for outcome in outcomes(chunk))


@pytest.mark.timeout(600)
def test_every_fault_point_is_hit() -> None:
    hits = {point: sum(o.hits[point] for chunk in range(CHUNKS) for o in outcomes(chunk)) for point in POINTS}
    seldom = {point: count for point, count in hits.items() if count < LEAST}
    assert not seldom, f"hit less than {LEAST} times: {seldom}"


@pytest.mark.timeout(600)
def test_requests_move_and_end_well() -> None:
    moved = sum(outcome.moves["moved"] for chunk in range(CHUNKS) for outcome in outcomes(chunk))
    ends = [end for chunk in range(CHUNKS) for outcome in outcomes(chunk) for end in outcome.ends.elements()]
    assert moved > 5 * CHUNKS * CHUNK
    assert sum(end in ("stop", "length") for end in ends) > 0.8 * len(ends)


def test_a_seed_replays_in_another_process() -> None:
    """Whatever the hash seed is: nothing depends on the order of sets."""
    trace = run(7, trace=True).trace
    command = [sys.executable, "-m", "tests.simulation", "--replay", "7"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parents[2])}
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert again.stdout.splitlines()[: len(trace)] == [line for entry in trace for line in entry.splitlines()]
