"""Why requests move by themselves: room for a prompt that fits nowhere, headroom for the high class, balance.

Each scene runs with rescheduling off as well, where it must end otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serving.cli.main import main
from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, client_of, run_streams, stream, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCKS = 64  # of each of two replicas, 16 tokens each
STEP_S = 0.1  # of a paced engine: a request's end is far away
EAGER = {"migrate_out_share": 0.02, "migrate_in_share": 0.04}  # 20 steps before the end is early enough


@pytest.fixture(scope="module", params=[False, True], ids=["off", "on"])
def moves(request: pytest.FixtureRequest) -> bool:
    """Whether enable_llumnix is set. All scenes of one value run on one deployment."""
    return request.param


@pytest.fixture
def service(application: Service, long_llama: Path, moves: bool) -> Service:
    return application.ensure(
        model=str(long_llama),
        num_replicas=2,
        dtype="bfloat16",
        max_model_len=1000,
        num_gpu_blocks_override=BLOCKS,
        num_cpus_per_replica=0.5,
        enable_llumnix=moves,
        llumnix_config=EAGER,
        swap_space=0,
    )


def body(i: int, prompt_tokens: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Prompts that have no block in common."""
    prompt = [10 + (7 * i + j * (i + 1)) % 180 for j in range(prompt_tokens)]
    same = {"model": "tiny", "ignore_eos": True, "logprobs": 0, "temperature": 0.9, "seed": i}
    return {**same, "prompt": prompt, "max_tokens": max_tokens, **more}


def undisturbed(service: Service, requests: list[dict[str, Any]]) -> list[Result]:
    """The answers; then all is idle, and the ingress has heard of it."""
    expected = run_streams(service.url, requests)
    service.wait_idle()
    time.sleep(1.5)
    return expected


def owners(service: Service) -> dict[str, str]:
    """Request -> its replica."""
    return {q["id"]: r["id"] for r in service.cluster()["replicas"] for q in r["requests"]}


def causes(service: Service, before: list[dict[str, Any]]) -> Counter[str]:
    """Of the moves since `before` that succeeded."""
    seen = {(move["request_id"], move["at"]) for move in before}
    new = [move for move in service.cluster()["moves"] if (move["request_id"], move["at"]) not in seen]
    return Counter(move["cause"] for move in new if move["outcome"] == "moved")


def top(service: Service, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["top", "--once", "--url", service.url]) == 0
    return capsys.readouterr().out


async def begun(results: list[Result]) -> None:
    await until(lambda: all(result.chunks > 0 for result in results), 60)


def test_a_long_prompt_that_fits_nowhere_gets_room(
    service: Service, moves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten short requests hold 5 blocks on each replica, in the end 8 each; the prompt wants 50 of 64."""
    shorts = [body(i, 60, 60) for i in range(10)]
    long = body(99, 50 * 16 - 5, 4)
    expected = undisturbed(service, [*shorts, long])
    before = service.cluster()["moves"]
    scene: dict[str, Any] = {}

    async def send_long(results: list[Result]) -> None:
        await begun(results)
        at = await asyncio.to_thread(owners, service)
        assert list(Counter(at.values()).values()) == [5, 5]
        free = [r["blocks"]["free"] for r in (await asyncio.to_thread(service.cluster))["replicas"]]
        assert max(free) < 50 < sum(free), "room in the cluster, but on no replica"
        answer = Result()
        scene["answer"] = answer
        task = asyncio.create_task(_stream(service, long, answer))
        await until(lambda: answer.chunks > 0, 60)
        scene["shorts done"] = sum(result.done for result in results)
        await task

    with service.paced(STEP_S):
        assert run_streams(service.url, shorts, send_long) == expected[:-1]
    assert scene["answer"] == expected[-1]
    found = causes(service, before)
    if moves:
        assert scene["shorts done"] == 0, "it began while all of them ran"
        assert found["room"] > 0
        line = next(line for line in top(service, capsys).splitlines() if " room " in line)
        assert " moved " in line
    else:
        assert scene["shorts done"] > 0, "it had to wait for some to end"
        assert not found and "no request has moved yet" in top(service, capsys)


def test_the_high_class_has_its_replica_to_itself(
    service: Service, moves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    normal = [body(i, 40, 60) for i in range(6)]
    high = body(50, 40, 30, priority=-1)
    expected = undisturbed(service, [*normal, high])
    before = service.cluster()["moves"]
    company: list[int] = []

    async def send_high(results: list[Result]) -> None:
        await begun(results)
        answer = Result()
        task = asyncio.create_task(_stream(service, high, answer))
        await until(lambda: answer.chunks > 0, 60)

        def others() -> int:
            """Requests of the normal class beside that of the high one."""
            for replica in service.cluster()["replicas"]:
                classes = [request["priority"] for request in replica["requests"]]
                if -1 in classes:
                    return len(classes) - 1
            raise AssertionError("it has ended")

        if moves:
            await asyncio.to_thread(wait_for, lambda: others() == 0, 30, "a replica for itself")
        while not answer.done:
            if answer.chunks < 25:
                company.append(await asyncio.to_thread(others))
            await asyncio.sleep(0.1)
        await task
        assert answer == expected[-1] and not any(result.done for result in results)

    with service.paced(STEP_S):
        assert run_streams(service.url, normal, send_high) == expected[:-1]
    if moves:
        assert set(company) == {0}, "nobody came back"
        assert set(causes(service, before)) == {"priority"}
        assert " priority " in top(service, capsys)
    else:
        assert min(company) > 0 and not causes(service, before)


def test_a_replica_short_of_memory_gives_to_one_that_has_plenty(
    service: Service, moves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six requests that an operator has gathered on one replica hold 42 of its 64 blocks, and want 74 in the end."""
    requests = [body(i, 100 + 3 * i, 90) for i in range(6)]
    expected = undisturbed(service, requests)
    before = service.cluster()["moves"]
    preempted_before = service.inside(lambda actor: actor.engine.scheduler.preemptions)

    def gather() -> None:
        at = owners(service)
        destination = min(at.values())
        away = [request for request, replica in at.items() if replica != destination]
        for move in [service.handle.migrate.remote(request, destination) for request in away]:
            assert move.result(timeout_s=30)["outcome"] == "moved"

    async def crowd(results: list[Result]) -> None:
        await begun(results)
        await asyncio.to_thread(gather)
        assert not any(result.done for result in results)

    with service.paced(STEP_S):
        assert run_streams(service.url, requests, crowd) == expected
    found = causes(service, before)
    preempted = sum(service.inside(lambda actor: actor.engine.scheduler.preemptions).values())
    preempted -= sum(preempted_before.values())
    if moves:
        assert found["balance"] > 0 and preempted == 0
        assert " balance " in top(service, capsys)
    else:
        assert set(found) == {"operator"} and preempted > 0, "without moves somebody has to start again"


async def _stream(service: Service, request: dict[str, Any], result: Result) -> None:
    async with client_of(service.url) as client:
        await stream(client, request, result)
