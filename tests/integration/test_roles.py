"""Prefill and decode replicas, live: requests begin on one and end on the other, and either does without the other."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llumnix.load import DECODE, MIXED, PREFILL
from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STREAMS, TOKENS = 12, 150
STEP_S = 0.03  # of a paced engine: slow enough for requests to outlive the death of an engine
SPLIT = {"llumnix": {"pd_ratio": "1:1"}}


def ask() -> list[dict[str, Any]]:
    """Every third request is of the high class, which otherwise stays where it is."""
    return [{**body, "priority": -(i % 3 == 0)} for i, body in enumerate(bodies(STREAMS, TOKENS))]


@pytest.fixture(scope="module")
def undisturbed(application: Service, long_llama: Path) -> list[Result]:
    """Two replicas of a tiny Llama in bfloat16; the answers without any move, before the replicas get their roles."""
    options: dict[str, Any] = {"model": str(long_llama), "dtype": "bfloat16", "max_model_len": 1024}
    options |= {"num_gpu_blocks_override": 512, "num_cpus_per_replica": 0.5}
    application.apply({"num_replicas": 2}, {"llumnix": {"enable_moves": False}}, **options)
    application.wait_ready(replicas=2)
    expected = run_streams(application.url, ask())
    assert all(result.done and result.completion_tokens == TOKENS for result in expected)
    assert set(roles(application).values()) == {MIXED} and application.cluster()["moves"] == []
    application.apply({"num_replicas": 2}, SPLIT, **options)
    return expected


def roles(service: Service) -> dict[str, str]:
    return {r["id"]: r["role"] for r in service.cluster()["replicas"] if r["state"] == "ready"}


def split_replicas(service: Service) -> tuple[str, str]:
    """(prefill, decode), once there is one of each and everything is idle."""
    wait_for(lambda: sorted(roles(service).values()) == [DECODE, PREFILL], 60, "one replica of each role")
    service.wait_idle()
    by_role = {role: name for name, role in roles(service).items()}
    return by_role[PREFILL], by_role[DECODE]


def handovers(service: Service, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The moves since `before`, all of which are handovers."""
    seen = {(move["request_id"], move["at"]) for move in before}
    new = [move for move in service.cluster()["moves"] if (move["request_id"], move["at"]) not in seen]
    assert {move["cause"] for move in new} <= {"handover"}
    return new


def test_requests_begin_on_one_replica_and_end_on_the_other(application: Service, undisturbed: list[Result]) -> None:
    service = application
    prefill, decode = split_replicas(service)
    before = service.cluster()["moves"]

    async def watch(results: list[Result]) -> None:
        await until(lambda: all(result.chunks > 0 for result in results), 60)

        def handed_over() -> bool:
            found = service.snapshots()
            return [len(found[name]["requests"]) for name in (prefill, decode)] == [0, STREAMS]

        await asyncio.to_thread(wait_for, handed_over, 30, "every request on the decode replica")
        assert not any(result.done for result in results)

    with service.paced(STEP_S):
        assert run_streams(service.url, ask(), watch) == undisturbed
    moves = handovers(service, before)
    done = [move for move in moves if move["outcome"] == "moved"]
    assert len(done) == len({move["request_id"] for move in done}) == STREAMS, "each once, and none came back"
    assert {(move["source"], move["destination"]) for move in done} == {(prefill, decode)}

    def told() -> bool:
        return all(m["downtime_ms"] is not None for m in handovers(service, before) if m["outcome"] == "moved")

    wait_for(told, 10, "the downtime of each move")
    assert split_replicas(service) == (prefill, decode), "nothing to change the roles for"


@pytest.mark.parametrize("killed", [DECODE, PREFILL])
def test_one_role_serves_everything_while_the_other_has_no_replica(
    application: Service, undisturbed: list[Result], killed: str
) -> None:
    service = application
    prefill, decode = split_replicas(service)
    victim = decode if killed == DECODE else prefill
    survivor = prefill if killed == DECODE else decode

    async def kill(results: list[Result]) -> None:
        await until(lambda: all(result.chunks > 0 for result in results), 60)
        snapshots = await asyncio.to_thread(service.snapshots)
        os.kill(snapshots[victim]["pid"], signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: victim not in service.engines(), 30, "the death of an engine")

    with service.paced(STEP_S):
        assert run_streams(service.url, ask(), kill) == undisturbed
    assert run_streams(service.url, ask()) == undisturbed, "new requests find somebody, whoever is there"

    # The replacement completes the pair; the survivor is given another role at most once.
    found = split_replicas(service)
    assert survivor in found and victim not in found
    if killed == PREFILL:
        assert found[1] == survivor, "what decoded goes on decoding"
    before, ended = service.cluster()["moves"], time.monotonic() + 3
    assert run_streams(service.url, ask()) == undisturbed
    assert {(move["source"], move["destination"]) for move in handovers(service, before)} == {found}
    while time.monotonic() < ended:
        assert split_replicas(service) == found
        time.sleep(0.2)


def test_roles_outlive_the_manager(application: Service, undisturbed: list[Result]) -> None:
    service = application
    pair = split_replicas(service)
    pid = service.manager_pid()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: service.manager_pid() != pid and service.num_ready() == 2, 30, "another manager")
    ended = time.monotonic() + 6
    while time.monotonic() < ended:
        assert roles(service) == {pair[0]: PREFILL, pair[1]: DECODE}
        time.sleep(0.2)
    assert run_streams(service.url, ask()) == undisturbed
    assert {(move["source"], move["destination"]) for move in handovers(service, [])} == {pair}
