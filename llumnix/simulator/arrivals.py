"""When requests come."""

from __future__ import annotations

import numpy as np


def arrivals(rate: float, count: int, rng: np.random.Generator, cv: float = 1.0) -> np.ndarray:
    """float64 [count], seconds: gaps of mean 1 / rate and coefficient of variation cv.

    Gamma-distributed gaps; with cv 1 they are exponential, a Poisson process.
    """
    shape = 1.0 / (cv * cv)
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count))
