"""What an ingress measures: latencies as its clients see them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.metrics import Family

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)


class IngressMetrics:
    """Metrics with the label ingress=<name>, in a registry of their own."""

    def __init__(self, ingress: str):
        self.registry = registry = CollectorRegistry()
        label, buckets = ("ingress",), LATENCY_BUCKETS
        self._ingress = ingress
        ttft = Histogram("ferry_ttft_seconds", "time to first token", label, buckets=buckets, registry=registry)
        itl = Histogram("ferry_itl_seconds", "time between tokens", label, buckets=buckets, registry=registry)
        e2e = Histogram("ferry_e2e_seconds", "time to the last token", label, buckets=buckets, registry=registry)
        tokens = Counter("ferry_tokens_streamed", "output tokens handed to clients", label, registry=registry)
        open_requests = Gauge("ferry_requests_open", "requests being served", label, registry=registry)
        resumed = Gauge("ferry_requests_resumed", "requests resumed after an engine was lost", label, registry=registry)
        self._done = Counter(
            "ferry_requests_finished", "finished sequences by reason", (*label, "reason"), registry=registry
        )
        self.ttft, self.itl, self._e2e = ttft.labels(ingress), itl.labels(ingress), e2e.labels(ingress)
        self.tokens, self.open = tokens.labels(ingress), open_requests.labels(ingress)
        self.resumed = resumed.labels(ingress)

    def finished(self, reason: str, seconds: float) -> None:
        """A sequence ended: with a finish reason or the kind of an error (serving/messages.py)."""
        self._done.labels(self._ingress, reason).inc()
        self._e2e.observe(seconds)


def dispatch_family(ingress: str, decisions: Mapping[tuple[str, str], int]) -> Family:
    """Requests sent by replica and policy; a replica that has gone is left out."""
    samples = [
        ("ferry_dispatches_total", {"ingress": ingress, "replica": replica, "policy": policy}, float(number))
        for (replica, policy), number in sorted(decisions.items())
    ]
    return ("ferry_dispatches", "requests sent to a replica, resumed ones too", "counter", samples)
