"""What an engine tells Prometheus, made from its stats."""

from __future__ import annotations

from collections.abc import Mapping

from engine.engine import EngineStats
from serving.metrics import Family

GAUGES = {
    "ferry_requests_running": ("requests in the running batch", "running"),
    "ferry_requests_waiting": ("requests in the queue", "waiting"),
    "ferry_kv_blocks_total": ("KV blocks", "total_blocks"),
    "ferry_kv_blocks_free": ("KV blocks that may be allocated, cached ones included", "free_blocks"),
    "ferry_kv_blocks_cached": ("KV blocks nobody uses whose contents can be hit", "cached_blocks"),
    "ferry_step_seconds": ("moving average of a step", "step_seconds"),
    "ferry_prefill_tokens_per_second": ("measured prefill speed", "prefill_tokens_per_s"),
}
COUNTERS = {
    "ferry_steps": ("engine steps", "steps"),
    "ferry_preemptions": ("requests preempted for want of KV blocks", "preemptions"),
    "ferry_prompt_tokens": ("prompt tokens of admitted requests", "prompt_tokens"),
    "ferry_prompt_tokens_cached": ("of those, tokens whose KV was found in a cache", "cached_tokens"),
    "ferry_generation_tokens": ("tokens sampled", "generated_tokens"),
    "ferry_reservations_expired": (
        "promises of room to requests on their way here that nobody used",
        "reservations_expired",
    ),
    "ferry_prefix_cache_evictions": ("cached blocks that were overwritten", "evictions"),
    "ferry_verified": ("moved or resumed requests that were run again and compared", "verified"),
    "ferry_verify_mismatches": ("of those, requests with a token that differs: must be 0", "verify_mismatches"),
    "ferry_verify_skipped": ("of the sample, requests for which there was never the time", "verify_skipped"),
}


STAYING = "ferry_requests_staying", "requests that would not move to another replica now, by reason"
PASSED = "ferry_move_passed_over", "requests that were not considered when one was to move, by reason"
EMPTY: Mapping[str, int] = {}


class EngineMetrics:
    """Families with the label replica=<engine id>."""

    def __init__(self, engine_id: str):
        self.labels = {"replica": engine_id}

    def families(
        self, stats: EngineStats | None, staying: Mapping[str, int] = EMPTY, passed_over: Mapping[str, int] = EMPTY
    ) -> list[Family]:
        """`staying` and `passed_over`: requests by the reason why they do not move, now and when one was to."""
        if stats is None:
            return []
        gauges: list[Family] = [
            (name, text, "gauge", [(name, self.labels, float(getattr(stats, field)))])
            for name, (text, field) in GAUGES.items()
        ]
        counters: list[Family] = [
            (name, text, "counter", [(f"{name}_total", self.labels, float(getattr(stats, field)))])
            for name, (text, field) in COUNTERS.items()
        ]
        moves = [self._by_reason(STAYING, "gauge", staying), self._by_reason(PASSED, "counter", passed_over)]
        return [*gauges, *counters, *moves]

    def _by_reason(self, metric: tuple[str, str], kind: str, counts: Mapping[str, int]) -> Family:
        name, text = metric
        sample = f"{name}_total" if kind == "counter" else name
        values = [(sample, {**self.labels, "reason": why}, float(n)) for why, n in sorted(counts.items())]
        return name, text, kind, values
