"""What the paper's experiments come to: calibration, ratios, savings, each as a small table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llumnix.simulator import paper
from llumnix.simulator.table import Row, find

CALIBRATED = 0.15  # how far the baseline's mean latency may be from the paper's


def calibration(table: Sequence[Row]) -> list[Row]:
    """Mean request latency of the baseline against the paper's: at both ends of the rates, and their mean."""
    made: list[Row] = []
    for trace, (first, last) in paper.INFAAS_REQUEST_MEAN.items():
        if not any(row["trace"] == trace for row in table):
            continue
        ends = [_value(table, trace, rate, "infaas", "request_mean_s") for rate in _ends(trace)]
        off = (sum(ends) / (first + last)) - 1
        made.append(
            {
                "trace": trace,
                "paper s": f"{first:g} to {last:g}",
                "here s": f"{ends[0]:.1f} to {ends[1]:.1f}",
                "off at ends": f"{ends[0] / first - 1:+.0%} {ends[1] / last - 1:+.0%}",
                "off": f"{off:+.0%}",
                "within 15 %": "yes" if abs(off) <= CALIBRATED else "no",
            }
        )
    return made


def ratios(table: Sequence[Row]) -> list[Row]:
    """Per trace the largest ratio over the rates of P99 first token, and what preemption loss goes down by."""
    made: list[Row] = []
    for trace, rates in paper.RATES.items():
        if not any(row["trace"] == trace for row in table):
            continue
        row: Row = {"trace": trace, "paper": f"{paper.paper_ratio(trace):.1f}"}
        for name in ("llumnix_paper", "llumnix"):
            row[name] = f"{max(_ratio(table, trace, rate, name) for rate in rates):.1f}"
        row["rate of it"] = f"{max(rates, key=lambda rate: _ratio(table, trace, rate, 'llumnix_paper')):g}"
        row["loss"] = f"{loss_reduction(table, trace, 'llumnix_paper'):.0%}"
        row["mean request"] = f"{_mean_gain(table, trace, 'llumnix_paper'):+.1%}"
        row["reached"] = "yes" if float(row["llumnix_paper"]) >= paper.paper_ratio(trace) else "no"
        made.append(row)
    return made


def loss_reduction(table: Sequence[Row], trace: str, name: str) -> float:
    """Share by which preemption loss, averaged over the rates, is lower than the baseline's; in [0, 1] or below 0."""
    ours = sum(_value(table, trace, rate, name, "preemption_loss_s") for rate in paper.RATES[trace])
    theirs = sum(_value(table, trace, rate, "infaas", "preemption_loss_s") for rate in paper.RATES[trace])
    return 1 - ours / theirs if theirs > 0 else 0.0


def priority_effect(table: Sequence[Row]) -> list[Row]:
    """The high class against the same requests under the blind policy, and what the others pay."""
    made: list[Row] = []
    for cv in paper.CVS:
        row: Row = {"CV": f"{cv:g}"}
        for kind in ("high", "normal"):
            ours = find(table, cv=cv, policy="llumnix", **{"class": kind})
            blind = find(table, cv=cv, policy="llumnix_base", **{"class": kind})
            row[f"{kind} request s"] = f"{ours['request_mean_s']:.2f}"
            row[f"{kind} gain"] = f"{blind['request_mean_s'] / ours['request_mean_s']:.2f}x"
            row[f"{kind} first token P99 s"] = f"{ours['prefill_p99_s']:.2f} (blind {blind['prefill_p99_s']:.2f})"
            row[f"{kind} token ms"] = f"{ours['decode_mean_s'] * 1e3:.1f} (blind {blind['decode_mean_s'] * 1e3:.1f})"
        made.append(row)
    return made


def replica_savings(table: Sequence[Row]) -> list[Row]:
    """Autoscaling at equal settings: replicas and P99 first token."""
    made: list[Row] = []
    for rate, cv in dict.fromkeys((row["rate"], row["cv"]) for row in table):
        ours = find(table, rate=rate, cv=cv, policy="llumnix_paper")
        theirs = find(table, rate=rate, cv=cv, policy="infaas")
        made.append(
            {
                "req/s": f"{rate:g}",
                "CV": f"{cv:g}",
                "replicas": f"{ours['replicas']:.1f}",
                "INFaaS++": f"{theirs['replicas']:.1f}",
                "fewer": f"{1 - ours['replicas'] / theirs['replicas']:.0%}",
                "P99 s": f"{ours['prefill_p99_s']:.1f}",
                "INFaaS++ P99 s": f"{theirs['prefill_p99_s']:.1f}",
            }
        )
    return made


def saved_at_equal_latency(table: Sequence[Row]) -> list[Row]:
    """Replicas that the baseline needs for the P99 first token of each band here, read off its own points.

    Policies are named "<policy> from <low end of the band>".
    """
    theirs = sorted((r["prefill_p99_s"], r["replicas"]) for r in table if r["policy"].startswith("infaas "))
    latency, replicas = (np.array(column) for column in zip(*theirs))
    made: list[Row] = []
    for row in table:
        name, _, low = row["policy"].partition(" from ")
        if name == "infaas":
            continue
        p99, mine = row["prefill_p99_s"], row["replicas"]
        needed = float(np.interp(p99, latency, replicas))
        beyond = p99 < latency[0]  # the baseline never was as fast
        made.append(
            {
                "policy": name,
                "band from": low,
                "P99 s": f"{p99:.1f}",
                "replicas": f"{mine:.1f}",
                "INFaaS++": f"{needed:.1f}" + (" or more" if beyond else ""),
                "fewer": f"{1 - mine / needed:.0%}" + (" or more" if beyond else ""),
            }
        )
    return made


def lines(table: Sequence[Row]) -> list[list[str]]:
    """A heading and cells, for table.aligned."""
    return [list(table[0]), *([str(value) for value in row.values()] for row in table)]


def _ends(trace: str) -> tuple[float, float]:
    return paper.RATES[trace][0], paper.RATES[trace][-1]


def _value(table: Sequence[Row], trace: str, rate: float, name: str, column: str) -> float:
    return float(find(table, trace=trace, rate=rate, policy=name)[column])


def _ratio(table: Sequence[Row], trace: str, rate: float, name: str) -> float:
    mine = _value(table, trace, rate, name, "prefill_p99_s")
    return _value(table, trace, rate, "infaas", "prefill_p99_s") / mine


def _mean_gain(table: Sequence[Row], trace: str, name: str) -> float:
    """Change of the mean request latency, averaged over the rates."""
    changes = [
        _value(table, trace, rate, name, "request_mean_s") / _value(table, trace, rate, "infaas", "request_mean_s") - 1
        for rate in paper.RATES[trace]
    ]
    return sum(changes) / len(changes)
