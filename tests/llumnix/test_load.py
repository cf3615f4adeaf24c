"""Virtual usage and freeness by hand; reports on the wire; prefix summaries."""

from __future__ import annotations

import json
import time

import pytest

from engine.kv import block_hash, root_hash
from llumnix.load import (
    SUMMARY_BYTES,
    LoadReport,
    freeness,
    headroom_blocks,
    summarise,
    truncated,
)
from llumnix.settings import LlumnixSettings
from tests.llumnix.reports import movable, report
from tests.machine import cheapest


def test_the_high_class_counts_its_headroom_once() -> None:
    one = report(free_blocks=400, running=5, high_running=1)
    assert headroom_blocks(one) == 851 - 100
    assert freeness(one) == (400 - 751) * 16
    assert freeness(report(free_blocks=400, running=5, high_running=3)) == freeness(one)
    assert freeness(report(free_blocks=831, running=5, high_running=2)) == (831 - 751) * 16 / 5


def test_headroom_is_not_demand() -> None:
    assert freeness(report(free_blocks=400, running=5, high_running=1), headroom=False) == 400 * 16 / 5


def test_without_the_setting_there_is_no_headroom() -> None:
    blind = LlumnixSettings(high_headroom=False)
    assert freeness(report(free_blocks=400, running=5, high_running=1), blind) == 400 * 16 / 5


def test_a_waiting_high_request_is_demand_and_no_headroom() -> None:
    one = report(free_blocks=400, running=5, waiting=1, head_blocks=30, waiting_blocks=30)
    assert freeness(one) == 370 * 16 / 5


def test_headroom_follows_the_target() -> None:
    half = LlumnixSettings(high_target_share=0.5)
    assert headroom_blocks(report(total_blocks=100, running=1, high_running=1), half) == 50


def test_what_is_owed_is_not_divided() -> None:
    """Else the engine with the longer batch would look better for it."""
    few = report(free_blocks=0, running=2, head_blocks=30)
    many = report(free_blocks=0, running=40, head_blocks=30)
    assert freeness(few) == freeness(many) == -480


def test_freeness_falls_with_every_block_and_request() -> None:
    values = [freeness(report(free_blocks=free, running=4, head_blocks=20)) for free in range(100)]
    assert all(a < b for a, b in zip(values, values[1:]))
    values = [freeness(report(free_blocks=60, running=running, head_blocks=20)) for running in range(1, 50)]
    assert all(a > b for a, b in zip(values, values[1:]))


def test_a_report_survives_the_wire() -> None:
    one = report(running=3, high_running=1, seats=2, movable=(movable("a", last_moved=4.0), movable("b", waiting=True)))
    wire = json.loads(json.dumps(one.to_message(), allow_nan=False))
    assert LoadReport.from_message(wire) == one
    assert LoadReport.from_message(wire).movable[0].last_moved == 4.0


def test_newer_keys_and_columns_are_ignored() -> None:
    wire = report(movable=(movable("a"),)).to_message()
    wire["movable"] = [(*wire["movable"][0], "a newer column")]
    wire["a newer key"] = 1
    assert LoadReport.from_message(wire).movable == (movable("a"),)


def test_an_older_report_without_the_new_keys_is_read() -> None:
    wire = {name: value for name, value in report().to_message().items() if name not in ("movable", "prefix", "moving")}
    assert LoadReport.from_message(wire) == report()


def chain(tokens: range, blocks: int) -> list[bytes]:
    hashes = [root_hash("")]
    for i in range(blocks):
        hashes.append(block_hash(hashes[-1], tokens[i * 16 : i * 16 + 16]))
    return hashes[1:]


def test_a_prefix_summary_keeps_the_first_hashes_within_its_size() -> None:
    hashes = chain(range(20_000), 1200)
    text = summarise(hashes)
    assert len(text) <= SUMMARY_BYTES
    found = report(prefix=text).prefix_hashes
    assert all(truncated(digest) in found for digest in hashes[:819])
    assert not any(truncated(digest) in found for digest in hashes[819:])
    assert report().prefix_hashes == frozenset() and summarise([]) == ""


def test_decoding_reports_is_cheap() -> None:
    """1,024 engines at 10 reports a second must leave most of half a core to the rest of the manager."""
    wire = report(movable=tuple(movable(str(i)) for i in range(8)), prefix=summarise(chain(range(20_000), 819)))
    message = wire.to_message()
    best = cheapest(lambda: _timed(lambda: [LoadReport.from_message(message) for _ in range(1024)]), 0.03)
    assert best < 0.03, f"{best:.3f} s for 1,024 reports, 0.3 core"


def _timed(call: object) -> float:
    started = time.process_time()
    call()  # type: ignore[operator]
    return time.process_time() - started


@pytest.mark.parametrize("total", [0, 1, 7])
def test_tiny_engines_have_a_freeness(total: int) -> None:
    assert freeness(report(total_blocks=total, free_blocks=total)) == total * 16
