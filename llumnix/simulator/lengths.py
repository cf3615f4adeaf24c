"""Lengths of the paper's traces: its five generated families, and two data sets by their published quantiles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LONGEST = 6144  # tokens, of a prompt and of an output

# mean -> exponent of the power law; "128", "256", "512" are Short, Medium, Long
EXPONENTS = {128: 2.0, 256: 1.5, 512: 1.15, 1024: 1.0005}
FAMILIES = {"S": 128, "M": 256, "L": 512}
GENERATED = ("S-S", "M-M", "L-L", "S-L", "L-S")  # inputs - outputs

# mean, P50, P80, P95, P99 of prompts and outputs
QUANTILES = (0.5, 0.8, 0.95, 0.99)
DATA_SETS = {
    "ShareGPT": ((306, 74, 348, 1484, 3388), (500, 487, 781, 988, 1234)),
    "BurstGPT": ((830, 582, 1427, 2345, 3549), (271, 243, 434, 669, 964)),
}

TRACES = (*DATA_SETS, *GENERATED)


def power_law(mean: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [count]: ranks 1 .. 2 x mean - 1 by a power law, scaled to the mean, rounded up, at most LONGEST."""
    ranks = np.arange(1, 2 * mean)
    weights = ranks ** -EXPONENTS[mean]
    sample = rng.choice(ranks, size=count, p=weights / weights.sum())
    return np.minimum(np.ceil(sample * (mean / sample.mean())), LONGEST).astype(np.int64)


def by_quantiles(table: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [count]: the inverse of a distribution function whose logarithm is linear between the quantiles.

    The table leaves the two ends open: the shortest length, and if that is not enough the longest, are set so that the
    mean comes out as nearly as it can.
    """
    mean, *known = table
    levels = np.array([0.0, *QUANTILES, 1.0])

    def mean_of(low: float, high: float) -> float:
        values = np.array([low, *known, high])
        steps = np.diff(values)
        ratios = np.log(values[1:] / values[:-1])
        means = np.where(ratios > 1e-9, steps / np.maximum(ratios, 1e-9), values[1:])
        return float((means * np.diff(levels)).sum())

    low = _nearest(lambda end: mean_of(end, known[-1]), mean, 1.0, known[0])
    high = _nearest(lambda end: mean_of(low, end), mean, known[-1], LONGEST)
    values = np.exp(np.interp(rng.random(count), levels, np.log([low, *known, high])))
    return np.maximum(1, np.rint(values)).astype(np.int64)


def _nearest(mean_of: Callable[[float], float], mean: float, low: float, high: float) -> float:
    """The end in [low, high] whose mean is nearest; means rise with the end."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    return high


def lengths(trace: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(prompts, outputs) of a trace of TRACES, int64 [count] each, drawn independently."""
    if trace in DATA_SETS:
        prompts, outputs = DATA_SETS[trace]
        return by_quantiles(prompts, count, rng), by_quantiles(outputs, count, rng)
    prompt, output = (FAMILIES[letter] for letter in trace.split("-"))
    return power_law(prompt, count, rng), power_law(output, count, rng)
