"""Whole runs: books after every event, every request ends, moves of every kind, scaling, priorities."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llumnix.load import DRAINING, READY
from llumnix.settings import PAPER_BLOCKS, LlumnixSettings
from llumnix.simulator import move
from llumnix.simulator.cluster import Cluster, ClusterConfig
from llumnix.simulator.device import Device, load_device
from llumnix.simulator.move import Move
from llumnix.simulator.policies import POLICIES, policy
from llumnix.simulator.request import NEVER
from llumnix.simulator.result import result_of
from llumnix.simulator.run import Run, simulate, trace_of
from llumnix.simulator.trace import Trace, make_trace

A10 = load_device("a10-llama-7b")
SMALL = replace(A10, total_blocks=100)
EAGER = LlumnixSettings(
    dispatch_policy="round_robin", migrate_out_share=0.1, migrate_in_share=0.11, move_cooldown_s=0.0
)


class Checked(Cluster):
    """Checks every engine's books at each of its boundaries, and that moves leave nothing behind."""

    def _fire(self, what: Any) -> None:
        super()._fire(what)
        what[0].check()


def some_trace(seed: int, count: int = 400, rate: float = 4.0, high: float = 0.0) -> Trace:
    rng = np.random.default_rng(seed)
    made = make_trace(
        "some",
        np.cumsum(rng.exponential(1 / rate, count)),
        rng.choice([10, 60, 300, 900], count, p=[0.4, 0.3, 0.2, 0.1]),
        rng.choice([5, 60, 200, 600], count, p=[0.3, 0.3, 0.3, 0.1]),
    )
    return made.with_high(high, rng)


def run(trace: Trace, **rest: Any) -> Cluster:
    config = ClusterConfig(**{"device": SMALL, "settings": LlumnixSettings(), "replicas": 4, **rest})
    cluster = Checked(config, trace)
    cluster.run()
    for request in cluster.requests:
        assert request.arrival <= request.first <= request.end
        assert request.length == request.prompt + request.output
    return cluster


def settle(cluster: Cluster) -> None:
    """Let what is under way end: every engine is empty then, with all its blocks."""
    for _ in range(100_000):
        if all(e.empty and e.next == NEVER for e in cluster.engines.values()) and not +cluster.busy:
            break
        cluster.now, _, call, argument = heapq.heappop(cluster._events)
        call(argument)
    for engine in cluster.engines.values():
        assert engine.used == engine.reserved == engine.moves == 0
    assert not +cluster.busy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("request_policy", ["SR", "FCWSR", "LCR"])
def test_whatever_moves_every_request_ends_and_every_block_comes_back(seed: int, request_policy: str) -> None:
    eager = replace(EAGER, request_policy=request_policy, max_moves_per_engine=2)
    cluster = run(some_trace(seed, high=0.1, rate=8.0), settings=eager)
    settle(cluster)
    assert sum(count for (_, outcome), count in cluster.outcomes.items() if outcome == move.MOVED) > 10


def move_alone(
    tokens: int, output: int = 200, device: Device = A10, later: Callable[[Cluster], None] | None = None
) -> Cluster:
    """A request decodes on the first of two engines and moves to the second at 5 s; `later` happens at 5.05 s."""
    trace = make_trace("x", [0.0, 0.0], [tokens, 16], [output, 1])
    cluster = Checked(ClusterConfig(device, LlumnixSettings(), 2, moves=False), trace)

    def begin(_: object) -> None:
        source = next(engine for engine in cluster.engines.values() if cluster.requests[0] in engine.running)
        other = next(engine for engine in cluster.engines.values() if engine is not source)
        Move(cluster, cluster.requests[0], source, other, "balance").start()

    cluster.at(5.0, begin, None)
    if later is not None:
        cluster.at(5.05, lambda _: later(cluster), None)
    cluster.run()
    return cluster


def test_silence_is_flat_while_recomputing_is_not() -> None:
    """What a move costs its client: the last stage and the boundaries at both ends, whatever its length."""
    silences = [move_alone(tokens).requests[0].silence[0] for tokens in (256, 512, 1024, 2048, 4096, 8192)]
    step = A10.step_s(1, 8192)
    assert max(silences) < 2 * step
    assert max(silences) - min(silences) < step
    assert A10.prompt_s(8192) > 20 * max(silences)


def test_a_request_that_ends_during_its_move_stays_where_it_was() -> None:
    cluster = move_alone(8192, output=75)
    settle(cluster)
    assert dict(cluster.outcomes) == {("balance", move.ENDED): 1} and cluster.requests[0].moves == 0


def test_a_destination_that_fills_up_ends_the_move() -> None:
    def fill(cluster: Cluster) -> None:
        engine = next(engine for engine in cluster.engines.values() if not engine.running)
        assert engine.reserve(engine.free_blocks(cluster.now) - 8, cluster.now)
        cluster.at(30.0, lambda _: engine.cancel(engine.reserved, cluster.now), None)

    cluster = move_alone(8192, output=800, later=fill)
    assert dict(cluster.outcomes) == {("balance", move.NO_ROOM): 1} and cluster.requests[0].silence == []
    settle(cluster)


def test_causes_of_moves() -> None:
    seen = set()
    for seed in range(4):
        cluster = run(some_trace(seed, high=0.2, rate=5.0), autoscale=(2, 6), settings=EAGER)
        seen |= {cause for cause, _ in cluster.outcomes}
    assert seen >= {"balance", "room", "priority", "drain"}


def test_a_slow_network_moves_requests_by_recomputing() -> None:
    slow = replace(SMALL, bandwidth_bytes_per_s=1e7)
    cluster = run(some_trace(1, count=200), device=slow, settings=EAGER)
    settle(cluster)
    moved = [r for r in cluster.requests if r.silence]
    assert moved and min(min(r.silence) for r in moved) > slow.prompt_token_s * 10


def test_without_moves_nothing_moves() -> None:
    cluster = run(some_trace(2, rate=6.0), moves=False, autoscale=(2, 6))
    assert not cluster.outcomes and all(r.moves == 0 for r in cluster.requests)


def test_replicas_follow_the_load_between_their_limits() -> None:
    for moves in (True, False):
        cluster = run(some_trace(3, count=1500, rate=6.0), autoscale=(2, 7), moves=moves, sample_s=1.0)
        counts = [sample.replicas for sample in cluster.samples]
        assert min(counts) >= 2 and max(counts) <= 7 + 1, "one may still drain while another starts"
        assert len(set(counts)) > 2
        result = result_of(cluster)
        assert result.replicas == pytest.approx(np.mean(counts), abs=0.4)


def test_an_engine_that_starts_takes_requests_only_when_it_is_ready() -> None:
    slow = replace(SMALL, startup_s=10_000.0)
    cluster = run(some_trace(3, count=300, rate=6.0), device=slow, autoscale=(1, 6), replicas=2)
    assert any(engine.state not in (READY, DRAINING) for engine in cluster.engines.values())
    assert all(engine._admitted == 0 for engine in cluster.engines.values() if engine.state not in (READY, DRAINING))


def test_the_high_class_is_faster_and_nobody_knows_it_under_a_blind_policy() -> None:
    runs = {name: Run("S-S", policy(name), 26.0, 1, 4.0, 3000, high_share=0.1) for name in ("llumnix", "llumnix_base")}
    results = {name: simulate(one) for name, one in runs.items()}
    high, blind = (results[name].row(high=True) for name in ("llumnix", "llumnix_base"))
    assert high["decode_mean_s"] < 0.9 * blind["decode_mean_s"]
    assert high["decode_p99_s"] < 0.9 * blind["decode_p99_s"]
    assert high["request_mean_s"] < 0.9 * blind["request_mean_s"]
    normal, before = (results[name].row(high=False) for name in ("llumnix", "llumnix_base"))
    assert normal["request_mean_s"] < 1.1 * before["request_mean_s"]


def test_a_run_repeats() -> None:
    one = Run("M-M", policy("llumnix"), 7.8, 3, requests=600)
    first, second = simulate(one), simulate(one)
    assert np.array_equal(first.total, second.total) and first.moves == second.moves
    other = simulate(replace(one, seed=4))
    assert not np.array_equal(first.total, other.total)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs(name: str) -> None:
    result = simulate(Run("M-M", policy(name), 7.6, 0, requests=300))
    assert np.isfinite(result.total).all() and len(result.total) == 300


def test_old_loads_without_bookings_send_bursts_to_one_engine() -> None:
    trace = trace_of(Run("M-M", policy("infaas"), 7.6, 1, requests=1500))
    blind = LlumnixSettings(dispatch_policy="infaas")
    late = {}
    for report_s, booking in ((0.1, True), (3.0, True), (3.0, False)):
        config = ClusterConfig(A10, blind, moves=False, report_s=report_s, booking=booking)
        cluster = Cluster(config, trace)
        cluster.run()
        late[report_s, booking] = result_of(cluster).row()["prefill_mean_s"]
    assert late[3.0, False] > 1.5 * late[3.0, True] and late[3.0, True] < 2 * late[0.1, True]


def test_migration_shortens_the_wait_at_the_knee() -> None:
    """Two traces, one rate, one seed: what the full comparison does in many."""
    for trace, rate in (("M-M", 7.8), ("L-L", 3.0)):
        rows = {}
        for name in ("infaas", "llumnix_paper"):
            settings = LlumnixSettings(migrate_out_share=3 / PAPER_BLOCKS)
            rows[name] = simulate(Run(trace, policy(name, settings), rate, 1, requests=6000)).row()
        old, new = rows["infaas"], rows["llumnix_paper"]
        assert new["prefill_p99_s"] * 3 < old["prefill_p99_s"], (trace, rows)
        assert new["preemption_loss_s"] < 0.3 * old["preemption_loss_s"], (trace, rows)
        assert new["request_mean_s"] < old["request_mean_s"]
