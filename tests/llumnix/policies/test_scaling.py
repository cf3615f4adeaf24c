"""Average freeness inside its band, with patience, and who goes."""

from __future__ import annotations

import pytest

from llumnix.load import DRAINING, STARTING
from llumnix.policies.scaling import ScalingState, average_share, deciding_average, desired_replicas, victim
from llumnix.settings import LlumnixSettings
from tests.llumnix.reports import report

SLOW = LlumnixSettings(scale_up_after_s=20, scale_down_after_s=30)
LOW, MIDDLE, HIGH = 5 / 851, 30 / 851, 200 / 851


def drive(averages: list[float | None], settings: LlumnixSettings = SLOW, replicas: int = 4, **rest: int) -> list[int]:
    """Replicas after each decision, 10 s apart."""
    state, counts = ScalingState(), []
    for i, average in enumerate(averages):
        replicas, state = desired_replicas(average, replicas, state, 10.0 * i, settings, **rest)
        counts.append(replicas)
    return counts


def test_the_average_is_of_ready_engines_in_shares_of_their_capacity() -> None:
    reports = [
        report("a", free_blocks=200, running=10),  # 20 blocks a request of 851
        report("b", total_blocks=100, free_blocks=50, running=5),  # 10 of 100
        report("c", state=STARTING),
        report("d", state=DRAINING),
    ]
    assert average_share(reports) == pytest.approx((20 / 851 + 10 / 100) / 2)
    assert average_share([]) is None and average_share(reports[2:]) is None


def test_what_starts_counts_as_empty_and_what_waits_forbids_to_take_away() -> None:
    low, high = 0.1, 0.5
    settings = LlumnixSettings(scale_low_share=low, scale_high_share=high)
    assert deciding_average([], 1, False, settings) is None
    assert deciding_average([0.0, 0.4], 0, True, settings) == pytest.approx(0.2)
    assert deciding_average([0.0], 1, True, settings) is None
    assert deciding_average([0.0] * 19, 1, True, settings) == pytest.approx(0.05)
    assert deciding_average([1.0], 1, False, settings) is None
    assert deciding_average([0.2, 1.0], 0, False, settings) == pytest.approx(0.6)
    assert deciding_average([0.2, 1.0], 0, True, settings) is None


def test_what_is_kept_for_the_high_class_is_not_demand() -> None:
    one = [report("a", free_blocks=600, running=3, high_running=1)]
    assert average_share(one) == pytest.approx(200 / 851)


def test_one_long_queue_does_not_outweigh_the_rest() -> None:
    reports = [report("a", free_blocks=0, running=9, waiting=1, head_blocks=851), report("b", running=0)]
    assert average_share(reports) == 0.5


def test_below_the_band_replicas_are_added_after_a_while() -> None:
    assert drive([LOW] * 8) == [4, 4, 5, 5, 6, 6, 7, 7]


def test_above_the_band_they_are_taken_away_more_slowly() -> None:
    assert drive([HIGH] * 8) == [4, 4, 4, 3, 3, 3, 2, 2]


def test_inside_the_band_nothing_changes_and_patience_starts_anew() -> None:
    assert drive([MIDDLE] * 5) == [4] * 5
    assert drive([LOW, LOW, MIDDLE, LOW, LOW, LOW]) == [4, 4, 4, 4, 4, 5]
    assert drive([HIGH, HIGH, LOW, HIGH, HIGH, HIGH, HIGH]) == [4, 4, 4, 4, 4, 4, 3]


def test_nobody_ready_changes_nothing() -> None:
    assert drive([None] * 9) == [4] * 9
    assert drive([LOW, None, LOW, LOW, LOW]) == [4, 4, 4, 4, 5]


def test_limits_hold() -> None:
    assert drive([LOW] * 9, high=5)[-1] == 5
    assert drive([HIGH] * 30, low=2)[-1] == 2
    assert drive([MIDDLE], low=6) == [6] and drive([MIDDLE], high=3) == [3]


def test_the_papers_band_decides_at_every_check() -> None:
    paper = LlumnixSettings(scale_down_after_s=0)
    assert drive([LOW, LOW, HIGH, HIGH], paper) == [5, 6, 5, 4]


def test_the_one_with_the_fewest_running_requests_goes() -> None:
    reports = [
        report("a", running=3),
        report("b", running=1, waiting=2),
        report("c", running=1),
        report("d", running=0, state=DRAINING),
        report("e", running=0, state=STARTING),
    ]
    assert victim(reports) == "c"
    assert victim(reports[3:]) is None
