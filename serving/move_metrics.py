"""What the manager tells Prometheus about moves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from llumnix.load import freeness
from llumnix.manager import ClusterView
from llumnix.rescheduler import Rescheduler
from serving.metrics import Family, families_of

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOTALS = {
    "blocks_sent": ("ferry_move_blocks_sent", "KV blocks sent for moves"),
    "blocks_skipped": ("ferry_move_blocks_skipped", "KV blocks of moves that the destination had cached"),
    "bytes": ("ferry_move_bytes", "bytes sent for moves"),
    "stages": ("ferry_move_stages", "copies made while requests went on"),
}


class Downtimes:
    """The silence of moved requests as their clients see it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histogram = Histogram(
            "ferry_move_downtime_seconds",
            "last token before a move to the first one after it, as the client sees it",
            ["cause"],
            buckets=BUCKETS,
            registry=self.registry,
        )

    def observe(self, cause: str, seconds: float) -> None:
        self._histogram.labels(cause).observe(seconds)


def move_families(rescheduler: Rescheduler, cluster: ClusterView, downtimes: Downtimes) -> list[Family]:
    moves = [
        ("ferry_moves_total", {"cause": cause, "outcome": outcome}, float(count))
        for (cause, outcome), count in sorted(rescheduler.counts.items())
    ]
    families: list[Family] = [("ferry_moves", "moves of requests between replicas", "counter", moves)]
    for field, (name, text) in TOTALS.items():
        families.append((name, text, "counter", [(f"{name}_total", {}, float(rescheduler.totals[field]))]))
    free = [
        ("ferry_freeness_steps", {"replica": name}, freeness(member.report, rescheduler.settings))
        for name, member in sorted(cluster.members.items())
    ]
    families.append(("ferry_freeness_steps", "decode steps until a replica's KV is full", "gauge", free))
    return families + families_of(downtimes.registry)
