"""The Llumnix paper's experiments: its rates, the figures it shows, and the runs that repeat them.

Numbers are read off the paper's figures 11, 13, 14 and 15 (16 engines with LLaMA-7B on A10, 10,000 requests a trace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llumnix.settings import PAPER_BLOCKS, LlumnixSettings
from llumnix.simulator.policies import Policy, policy
from llumnix.simulator.run import Run

RATES = {
    "ShareGPT": (7.0, 7.25, 7.5, 7.75, 8.0),
    "BurstGPT": (7.5, 7.75, 8.0, 8.25, 8.5),
    "S-S": (32.0, 33.0, 34.0, 35.0, 36.0),
    "M-M": (7.4, 7.5, 7.6, 7.7, 7.8),
    "L-L": (2.6, 2.7, 2.8, 2.9, 3.0),
    "S-L": (4.1, 4.15, 4.2, 4.25, 4.3),
    "L-S": (10.0, 12.0, 14.0, 16.0, 18.0),
}

# Mean seconds of a request under INFaaS++ at the first and the last rate, where the paper shows them.
INFAAS_REQUEST_MEAN = {
    "ShareGPT": (27.1, 32.2),
    "S-S": (9.3, 13.3),
    "M-M": (14.3, 21.4),
    "L-L": (25.8, 29.3),
    "S-L": (35.3, 40.9),
}

# P99 of the first token in seconds at each rate: Llumnix, INFaaS++.
PREFILL_P99 = {
    "ShareGPT": ((1.52, 1.86, 2.48, 4.63, 8.70), (1.58, 4.47, 14.0, 19.8, 27.8)),
    "BurstGPT": ((4.1, 5.4, 7.7, 10.5, 17.8), (21.1, 19.4, 24.1, 23.6, 27.5)),
    "S-S": ((28, 37, 54, 66, 74), (40, 49, 65, 76, 72)),
    "M-M": ((2.5, 3.9, 4.1, 9.3, 17.9), (5.6, 30.3, 48.8, 61.8, 240)),
    "L-L": ((2.47, 2.62, 2.91, 3.10, 2.75), (2.78, 3.71, 10.6, 39.3, 41.2)),
    "S-L": ((17.9, 4.9, 15.1, 25.7, 51.9), (36.9, 50.3, 49.2, 119, 134)),
    "L-S": ((4.6, 5.3, 6.0, 8.7, 73.9), (6.2, 5.3, 15.1, 30.9, 206)),
}

# Its threshold for moves, in blocks a request, was 3 but for these traces.
THRESHOLDS = {"M-M": 10, "S-L": 10}

CVS = (2.0, 4.0, 6.0, 8.0)
AUTOSCALE_RATES = (2.0, 2.2, 2.4, 2.6, 2.8, 3.0)
AUTOSCALE_CVS = (2.0, 3.0, 4.0, 5.0, 6.0)
AUTOSCALE_LOW = (5, 25, 45, 65, 85)  # low ends of the band in blocks a request; the high end is 50 more
AZURE_RATES = (6.0, 6.5, 7.0, 7.5)


def paper_ratio(trace: str) -> float:
    """The largest ratio over the rates of P99 first token, INFaaS++ over Llumnix, in the paper."""
    ours, theirs = PREFILL_P99[trace]
    return max(b / a for a, b in zip(ours, theirs))


def tuned(name: str, trace: str) -> Policy:
    """A policy with the paper's threshold for this trace; what takes keeps at least as much as what gives lacks."""
    blocks = THRESHOLDS.get(trace, 3)
    ours = LlumnixSettings()
    settings = LlumnixSettings(
        migrate_out_share=blocks / PAPER_BLOCKS,
        migrate_in_share=blocks * ours.migrate_in_share / ours.migrate_out_share / PAPER_BLOCKS,
    )
    return policy(name, settings)


def serving(seeds: int, requests: int = 10_000, traces: Sequence[str] = tuple(RATES)) -> list[Run]:
    """Figure 11: every trace at its rates, on loads as old as the paper's, and this system beside them."""
    return [
        Run(trace, tuned(name, trace), rate, seed, requests=requests)
        for trace in traces
        for rate in RATES[trace]
        for name in ("llumnix_paper", "infaas", "llumnix")
        for seed in range(seeds)
    ]


def informed(seeds: int, requests: int = 10_000) -> list[Run]:
    """Beyond the paper: both on loads of the moment, at rates up to where they differ."""
    return [
        Run(trace, tuned(name, trace), round(rates[-1] * factor, 2), seed, requests=requests)
        for trace, rates in RATES.items()
        for factor in (1.0, 1.08, 1.16)
        for name in ("llumnix", "infaas_informed")
        for seed in range(seeds)
    ]


def priorities(seeds: int, requests: int = 10_000) -> list[Run]:
    """Figure 13: S-S, 26 requests a second, bursts ever longer, every tenth request of the high class."""
    return [
        Run("S-S", policy(name), 26.0, seed, cv, requests, high_share=0.1)
        for cv in CVS
        for name in ("llumnix", "llumnix_base")
        for seed in range(seeds)
    ]


def autoscaling(seeds: int, requests: int = 10_000) -> list[Run]:
    """Figure 14: L-L on 1 to 16 replicas, 8 at first; by rate and by burstiness."""
    points = [(rate, 1.0) for rate in AUTOSCALE_RATES] + [(2.0, cv) for cv in AUTOSCALE_CVS]
    return [
        Run("L-L", policy(name), rate, seed, cv, requests, replicas=8, autoscale=(1, 16))
        for rate, cv in points
        for name in ("llumnix_paper", "infaas")
        for seed in range(seeds)
    ]


def trade_off(seeds: int, requests: int = 10_000) -> list[Run]:
    """Figure 15: replicas against latency as the band moves; L-L, 2 requests a second, CV 2."""
    made = []
    for low in AUTOSCALE_LOW:
        band = LlumnixSettings(scale_low_share=low / PAPER_BLOCKS, scale_high_share=(low + 50) / PAPER_BLOCKS)
        for name in ("llumnix", "llumnix_paper", "infaas"):
            how = replace(policy(name, band), name=f"{name} from {low}")
            made += [Run("L-L", how, 2.0, seed, 2.0, requests, replicas=8, autoscale=(1, 16)) for seed in range(seeds)]
    return made


def azure(path: str, seeds: int, requests: int = 10_000) -> list[Run]:
    """The same policies on a production trace, its arrivals at several rates."""
    return [
        Run(path, policy(name), rate, seed, requests=requests)
        for rate in AZURE_RATES
        for name in ("llumnix_paper", "infaas", "llumnix", "round_robin")
        for seed in range(seeds)
    ]
