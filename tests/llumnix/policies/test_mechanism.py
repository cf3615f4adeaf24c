"""The cheaper mechanism by measured cost, on the paper's figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llumnix.policies.mechanism import COPY, QUEUE, RECOMPUTE, Costs, choose, copy_s, recompute_s, silence_s
from llumnix.settings import LlumnixSettings
from tests.llumnix.reports import movable

# LLaMA-7B on an A10: 0.5 MiB a token, 2.4 GB/s between hosts, 4,700 prompt tokens/s
PAPER = Costs(8 << 20, 16, 2.4e9, 0.002, 4700.0, 0.045)


@pytest.mark.parametrize("tokens", [256, 512, 1024, 2048, 4096, 8192])
def test_the_papers_requests_are_copied(tokens: int) -> None:
    request = movable(blocks=tokens // 16)
    assert choose(request, PAPER) == COPY
    assert silence_s(PAPER) < PAPER.step_s < recompute_s(request, PAPER)


def test_costs_by_hand() -> None:
    request = movable(blocks=64)
    assert copy_s(request, PAPER) == pytest.approx(64 * (8 << 20) / 2.4e9 + 0.006)
    assert recompute_s(request, PAPER) == pytest.approx(1024 / 4700 + 0.002)
    assert silence_s(PAPER) == pytest.approx(2 * (8 << 20) / 2.4e9 + 0.002)


def test_a_slow_network_makes_recomputing_better() -> None:
    slow = replace(PAPER, bytes_per_s=1e7)
    assert choose(movable(blocks=16), slow) == RECOMPUTE
    assert choose(movable(blocks=600), slow) == COPY, "2 s of silence against 1.7 s of the last stage"


def test_a_bandwidth_limit_counts_like_a_slow_network() -> None:
    assert choose(movable(blocks=16), PAPER, LlumnixSettings(bandwidth_mb_per_s=10)) == RECOMPUTE


def test_cheaper_but_longer_than_a_step_is_not_chosen() -> None:
    slow = replace(PAPER, bytes_per_s=4e8)
    request = movable(blocks=20)
    assert slow.step_s < recompute_s(request, slow) < copy_s(request, slow)
    assert choose(request, slow) == COPY
    assert choose(request, replace(slow, step_s=0.2)) == RECOMPUTE


def test_queued_requests_move_without_kv() -> None:
    assert choose(movable(blocks=600, waiting=True), PAPER) == QUEUE


def test_before_anything_is_measured_the_kv_is_copied() -> None:
    assert choose(movable(), replace(PAPER, prefill_tokens_per_s=0.0)) == COPY
    assert choose(movable(), replace(PAPER, bytes_per_s=0.0)) == COPY
