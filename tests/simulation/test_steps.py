"""One thing goes wrong at a time, at every point there is."""

from __future__ import annotations

import pytest

from tests.simulation.steps import WRONGS, run_step

MOST = 1000  # messages of the script


@pytest.mark.parametrize("wrong", WRONGS)
def test_no_single_message_matters(wrong: str) -> None:
    for number in range(MOST):
        exists, violations = run_step(wrong, number)
        assert not violations, f"{wrong}, message {number}: {violations}\nrun_step({wrong!r}, {number}, trace := [])"
        if not exists:
            assert number > 50, "the script is shorter than it was"
            return
    pytest.fail("the script has no end")
