"""Serve's autoscaling with freeness as the measure: what the policy wants of what replicas record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve.config import AutoscalingConfig

from engine.config import EngineConfig
from serving.app import number_of_replicas
from serving.autoscaling import FreenessPolicy, autoscaling_config

SETTINGS = {"scale_interval_s": 10, "scale_up_after_s": 0, "scale_down_after_s": 20, "scale_to_zero_after_s": 60}
FULL = {"free_share": 0.0, "running": 9, "waiting": 3}
BUSY = {"free_share": 0.03, "running": 2, "waiting": 0}  # inside the band
FREE = {"free_share": 0.9, "running": 1, "waiting": 0}
IDLE = {"free_share": 1.0, "running": 0, "waiting": 0}


class Cluster:
    """What Serve would do with the policy's answers, with delays of 0."""

    def __init__(self, low: int, high: int, target: int, **settings: Any):
        self.policy = FreenessPolicy({**SETTINGS, **settings})
        self.low, self.high, self.target, self.now = low, high, target, 1000.0
        self.state: dict[str, Any] = {}
        self.targets = [target]  # one after another

    def run(self, seconds: float, *recorded: dict[str, float], queued: float = 0.0) -> int:
        """The target after so long with these replicas running."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            metrics = {
                name: {
                    f"r{i}": [SimpleNamespace(value=-1.0), SimpleNamespace(value=one[name])]
                    for i, one in enumerate(recorded)
                }
                for name in ("free_share", "running", "waiting")
            }
            context = SimpleNamespace(
                policy_state=dict(self.state),
                raw_metrics=metrics if recorded else {},
                target_num_replicas=self.target,
                current_time=self.now,
                total_num_requests=queued,
                capacity_adjusted_min_replicas=self.low,
                capacity_adjusted_max_replicas=self.high,
            )
            wanted, self.state = self.policy(context)
            self.target = min(max(wanted, self.low), self.high)
            if self.target != self.targets[-1]:
                self.targets.append(self.target)
        return self.target


def test_below_the_band_one_is_added_and_counts_as_empty_until_it_runs() -> None:
    cluster = Cluster(1, 4, 1)
    assert cluster.run(1, FULL) == 2
    assert cluster.run(100, FULL) == 2, "the one on its way is enough for now"
    assert cluster.run(10, FULL, FULL) == 3, "it was not"
    assert cluster.run(50, FULL, FULL, FULL) == 4
    assert cluster.run(50, FULL, FULL, FULL, FULL) == 4


def test_above_the_band_they_go_one_by_one_with_patience() -> None:
    cluster = Cluster(1, 4, 3)
    assert cluster.run(19, FREE, FREE, FREE) == 3
    assert cluster.run(2, FREE, FREE, FREE) == 2
    assert cluster.run(18, FREE, FREE) == 2
    assert cluster.run(3, FREE, FREE) == 1
    assert cluster.run(100, FREE) == 1


def test_inside_the_band_and_before_anything_is_recorded_nothing_changes() -> None:
    assert Cluster(1, 4, 2).run(200, BUSY, BUSY) == 2
    assert Cluster(1, 4, 2).run(200) == 2


def test_none_is_taken_away_while_requests_wait_at_another() -> None:
    assert Cluster(1, 4, 2).run(200, FULL, IDLE) == 2
    assert Cluster(1, 4, 2).run(200, {**FULL, "waiting": 0}, IDLE) == 1


def test_none_is_taken_away_while_one_starts() -> None:
    assert Cluster(1, 4, 3).run(200, FREE, FREE) == 3


def test_the_last_one_goes_after_a_while_without_requests_if_it_may() -> None:
    cluster = Cluster(0, 4, 1)
    assert cluster.run(59, IDLE) == 1
    assert cluster.run(3, IDLE) == 0
    assert cluster.run(1000) == 0, "nothing but a request brings one back"
    assert Cluster(1, 4, 1).run(1000, IDLE) == 1


@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 1}, {"queued": 0.2}], ids=str)
def test_any_work_keeps_the_last_one(work: dict[str, float]) -> None:
    cluster = Cluster(0, 4, 1)
    recorded = {**IDLE, **{k: v for k, v in work.items() if k != "queued"}}
    assert cluster.run(50, IDLE) == 1
    assert cluster.run(1, recorded, queued=work.get("queued", 0.0)) == 1
    assert cluster.run(55, IDLE) == 1
    assert cluster.run(10, IDLE) == 0


def test_one_that_was_woken_has_its_time_although_it_took_long_to_start() -> None:
    cluster = Cluster(0, 4, 1)
    assert cluster.run(63, IDLE) == 0
    cluster.target = 1  # Serve itself, for a queued call
    assert cluster.run(300) == 1
    assert cluster.run(55, IDLE) == 1


def test_from_many_to_none_leads_over_one() -> None:
    cluster = Cluster(0, 4, 3, scale_to_zero_after_s=30)
    cluster.run(60, IDLE, IDLE, IDLE)
    assert cluster.targets == [3, 2, 1, 0]


def test_serve_takes_the_configuration_and_carries_the_policy_into_its_controller() -> None:
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        made = AutoscalingConfig(**autoscaling_config(0, 3, {"scale_low_share": 0.02}))
    definition = made.policy.get_serialized_policy_def()
    assert definition is not None and b"capacity_adjusted_min_replicas" in definition, "by value"
    policy = cloudpickle.loads(definition)(**made.policy.policy_kwargs)
    assert policy.settings.scale_low_share == 0.02
    assert (made.min_replicas, made.max_replicas, made.initial_replicas) == (0, 3, None)
    assert made.upscale_delay_s == made.downscale_delay_s == 0


def test_without_limits_the_number_is_fixed() -> None:
    assert number_of_replicas(EngineConfig(model="m", num_replicas=3)) == {"num_replicas": 3}
    low = {"scale_low_share": 0.02}
    made = number_of_replicas(EngineConfig(model="m", max_replicas=3, llumnix_config=low, enable_llumnix=True))
    assert made == {"autoscaling_config": autoscaling_config(1, 3, low)}
