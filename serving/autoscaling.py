"""How many engines: Serve's autoscaling with llumnix.policies.scaling as its policy.

Serve's controller calls the policy ten times a second, on its own event loop, with what the replicas last recorded
(EngineReplica.record_autoscaling_stats). Serve pickles this module by value into the controller: everything else is
imported where it is used. The band and the patience are the policy's, so Serve's own delays are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METRICS_S = 1.0  # between a replica's records, which are this old at most when they count
LOOK_BACK_S = 5.0

Decision = tuple[int, dict[str, Any]]


class FreenessPolicy:
    """`settings`: LlumnixSettings as a message, of which the scale_* ones matter."""

    def __init__(self, settings: Mapping[str, Any]):
        from llumnix.settings import LlumnixSettings

        self.settings = LlumnixSettings.of_message(settings)

    def __call__(self, ctx: Any) -> Decision:
        """(replicas wanted, state for the next call). `ctx`: ray.serve.config.AutoscalingContext."""
        state, now = dict(ctx.policy_state), ctx.current_time
        wanted = ctx.target_num_replicas
        if wanted == 0:  # a call to EngineReplica.wake ends this
            return 0, state
        recorded = _latest(ctx.raw_metrics)
        starting = max(0, wanted - len(recorded))
        working = any(one["running"] or one["waiting"] for one in recorded)
        if working or starting or ctx.total_num_requests > 0 or "busy_at" not in state:
            state["busy_at"] = now
        if now - state.get("asked_at", float("-inf")) >= self.settings.scale_interval_s:
            wanted, state = self._ask(recorded, starting, ctx, state)
        idle = now - state["busy_at"] >= self.settings.scale_to_zero_after_s
        if wanted == ctx.target_num_replicas == 1 and idle and ctx.capacity_adjusted_min_replicas == 0:
            wanted = 0
        return wanted, state

    def _ask(self, recorded: list[dict[str, float]], starting: int, ctx: Any, state: dict[str, Any]) -> Decision:
        from llumnix.policies.scaling import ScalingState, deciding_average, desired_replicas

        shares = [one["free_share"] for one in recorded]
        average = deciding_average(shares, starting, any(one["waiting"] for one in recorded), self.settings)
        wanted, patience = desired_replicas(
            average,
            ctx.target_num_replicas,
            ScalingState(*state.get("patience", (None, None))),
            ctx.current_time,
            self.settings,
            max(1, ctx.capacity_adjusted_min_replicas),
            ctx.capacity_adjusted_max_replicas,
        )
        return wanted, state | {
            "asked_at": ctx.current_time,
            "patience": (patience.below_since, patience.above_since),
        }


def _latest(metrics: Mapping[str, Mapping[Any, Any]]) -> list[dict[str, float]]:
    """What each running replica recorded last; those that have recorded nothing yet are missing."""
    names = ("free_share", "running", "waiting")
    replicas = metrics.get(names[0], {})
    return [{name: metrics[name][replica][-1].value for name in names} for replica in replicas]


def autoscaling_config(low: int, high: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Serve's `autoscaling_config` for the engines. `settings`: those of LlumnixSettings that differ from defaults."""
    return {
        "min_replicas": low,
        "max_replicas": high,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": METRICS_S,
        "look_back_period_s": LOOK_BACK_S,
        "policy": {
            "policy_function": "serving.autoscaling:FreenessPolicy",
            "policy_kwargs": {"settings": dict(settings)},
        },
    }
