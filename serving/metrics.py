"""Metrics as data: processes send their families to the manager, any ingress renders the whole.

A scrape through the proxy reaches a random ingress, so counters kept there would jump; the labels `replica` and
`ingress` tell the sources apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""(name, documentation, type, [(sample name, labels, value)])"""


def families_of(registry: CollectorRegistry) -> list[Family]:
    """A registry's contents as plain data; `_created` timestamps are left out."""
    families: list[Family] = []
    for metric in registry.collect():
        samples = [(s.name, dict(s.labels), s.value) for s in metric.samples if not s.name.endswith("_created")]
        families.append((metric.name, metric.documentation, metric.type, samples))
    return families


def render(sources: Iterable[list[Family]]) -> bytes:
    """Families of several processes in Prometheus's text format; equal names are one family."""
    merged: dict[str, Metric] = {}
    for families in sources:
        for name, documentation, kind, samples in families:
            metric = merged.setdefault(name, Metric(name, documentation, kind))
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
    registry = CollectorRegistry()
    registry.register(_Ready(list(merged.values())))
    return generate_latest(registry)


class _Ready:
    """A collector of metrics that exist already."""

    def __init__(self, metrics: list[Metric]):
        self.metrics = metrics

    def collect(self) -> Iterable[Any]:
        return self.metrics
