"""The short form of python -m tests.chaos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run
from tests.integration.service import Service

SECONDS, EVERY_S = 22.0, 1.5


@pytest.mark.slow
@pytest.mark.timeout(400)  # what ends is waited for; alone it takes about 50 s
def test_random_faults_lose_nothing(application: Service, long_llama: Path) -> None:
    outcome = run(application, long_llama, seed=5, seconds=SECONDS, every_s=EVERY_S)
    application.delete()
    assert outcome.lost == []
    assert outcome.finished > 20
    assert sum(outcome.injected.values()) >= 5
    assert sum(count for (_, result), count in outcome.moves.items() if result == "moved") > 0, outcome
