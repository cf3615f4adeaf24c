"""What a run shows: one row of numbers, the requests behind them, and samples over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llumnix.simulator.cluster import Cluster


class Sample(NamedTuple):
    """The cluster at one time."""

    time: float
    replicas: int
    running: int
    waiting: int
    used_share: float  # of all blocks
    fragmented_share: float  # free, and enough for heads of queues that fit on no single engine
    preemptions: int  # so far


@dataclass(frozen=True)
class Result:
    """Seconds, one row a request in the order of arrival; moves by (cause, outcome)."""

    prefill: np.ndarray  # arrival to first token
    total: np.ndarray  # arrival to last token
    decode: np.ndarray  # per token after the first; NaN where there is one token
    loss: np.ndarray  # lost to preemption
    priority: np.ndarray
    silence: np.ndarray  # [moves], between the last token before a move and the first after
    preempted: int  # requests that were preempted
    moves: dict[tuple[str, str], int]
    replicas: float  # mean over time
    samples: list[Sample]

    def row(self, high: bool | None = None) -> dict[str, float]:
        """Means and 99th percentiles; of one class only if asked."""
        chosen = np.ones(len(self.total), bool) if high is None else (self.priority < 0) == high
        decode = self.decode[chosen]
        decode = decode[~np.isnan(decode)]
        used = [sample for sample in self.samples if sample.running]
        return {
            "prefill_mean_s": _mean(self.prefill[chosen]),
            "prefill_p99_s": _p99(self.prefill[chosen]),
            "request_mean_s": _mean(self.total[chosen]),
            "request_p99_s": _p99(self.total[chosen]),
            "decode_mean_s": _mean(decode),
            "decode_p99_s": _p99(decode),
            "preemption_loss_s": _mean(self.loss[chosen]),
            "preempted_share": self.preempted / len(self.total),
            "moves_per_request": sum(n for (_, outcome), n in self.moves.items() if outcome == "moved")
            / len(self.total),
            "silence_p50_s": float(np.median(self.silence)) if len(self.silence) else 0.0,
            "fragmented_share": _mean([sample.fragmented_share for sample in used]),
            "used_share": _mean([sample.used_share for sample in used]),
            "replicas": self.replicas,
        }


def result_of(cluster: Cluster) -> Result:
    """The result of a cluster that has run."""
    requests = cluster.requests
    arrival = np.array([r.arrival for r in requests])
    first = np.array([r.first for r in requests])
    end = np.array([r.end for r in requests])
    tokens = np.array([r.output for r in requests])
    decode = np.full(len(requests), np.nan)
    several = tokens > 1
    decode[several] = (end - first)[several] / (tokens[several] - 1)
    return Result(
        prefill=first - arrival,
        total=end - arrival,
        decode=decode,
        loss=np.array([r.loss for r in requests]),
        priority=np.array([r.priority for r in requests]),
        silence=np.array([seconds for r in requests for seconds in r.silence]),
        preempted=sum(r.preemptions > 0 for r in requests),
        moves=dict(cluster.outcomes),
        replicas=cluster.replica_seconds / cluster.now if cluster.now else 0.0,
        samples=cluster.samples,
    )


def _mean(values: np.ndarray | list[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0
