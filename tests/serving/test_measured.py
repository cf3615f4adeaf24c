"""What moves cost, as the choice of the mechanism sees it."""

from __future__ import annotations

import pytest

from serving.measured import MEMORY_BYTES, Measured

BLOCK = 1 << 18


def test_nothing_is_known_at_first_and_one_measurement_is_itself() -> None:
    measured = Measured()
    assert measured.bytes_per_s == measured.call_s == 0.0
    measured.transferred(16 * BLOCK, 0.004)
    measured.called(0.002)
    assert measured.bytes_per_s == pytest.approx(16 * BLOCK / 0.004) and measured.call_s == 0.002


def test_the_one_block_at_the_end_of_a_move_does_not_make_the_way_look_slow() -> None:
    measured = Measured()
    for _ in range(4):
        measured.transferred(16 * BLOCK, 0.004)  # 1 GB/s
    before = measured.bytes_per_s
    measured.transferred(BLOCK, 0.002)  # mostly the call: 0.13 GB/s
    assert 0.85 * before < measured.bytes_per_s < before


def test_a_way_that_has_become_slow_is_known_after_as_many_bytes_as_are_remembered() -> None:
    measured = Measured()
    for _ in range(100):
        measured.transferred(16 * BLOCK, 0.004)
    for _ in range(3 * MEMORY_BYTES // (16 * BLOCK)):
        measured.transferred(16 * BLOCK, 0.04)
    assert measured.bytes_per_s == pytest.approx(16 * BLOCK / 0.04, rel=0.6)


def test_one_slow_call_counts_for_a_fifth() -> None:
    measured = Measured()
    measured.called(0.001)
    measured.called(0.011)
    assert measured.call_s == pytest.approx(0.003)
