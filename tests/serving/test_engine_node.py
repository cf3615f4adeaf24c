"""An engine's node without Ray: what every request hears, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from llumnix.load import READY, LoadReport, freeness, headroom_blocks
from llumnix.policies.dispatch import Ask, choose
from llumnix.policies.fleet import Fleet
from serving.engine_node import EngineNode
from serving.messages import CLOSING, DRAINED, DRAINING, FAILED, INVALID, is_terminal
from tests.fakes import make_engine

SOON = 5.0


@pytest.fixture
async def actor() -> AsyncIterator[Any]:
    """Ready, with an engine that computes nothing."""
    made = EngineNode({"model": "m", "lease_s": 0.2}, "a")
    made._build = make_engine
    made.thread._build = make_engine
    made.loop = asyncio.get_running_loop()
    made.thread.start()
    made.engine = await asyncio.wrap_future(made.thread.ready)
    made.state = READY
    yield made
    made.thread.stop()
    await asyncio.to_thread(made.thread.join, SOON)


def message(**changes: Any) -> dict[str, Any]:
    params = SamplingParams(max_tokens=4).to_dict()
    return {"client": "i", "id": "r", "prompt": [1, 2], "params": params, "epoch": [0, 0], **changes}


async def end_of(actor: Any, request_id: str = "r") -> dict[str, Any]:
    """The terminal output of a request, from the ingress's stream."""
    async with asyncio.timeout(SOON):
        async for item in actor.stream("i", {request_id: 0}):
            for output in item["outputs"]:
                if output["id"] == request_id and is_terminal(output):
                    return output
    raise AssertionError("the stream ended")


async def test_a_request_has_its_tokens_and_its_end(actor: Any) -> None:
    await actor.add(message())
    assert (await end_of(actor))["finish"] == "length"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"params": {"temperature": -1}}, INVALID),
        ({"params": None}, FAILED),  # an AttributeError or the like: ours
        ({"prompt": []}, INVALID),
        ({"prompt": ["x"]}, INVALID),
        ({"priority": "high"}, INVALID),
        ({"priority": None}, INVALID),
        ({"output": 3}, INVALID),
    ],
    ids=str,
)
async def test_what_cannot_be_queued_hears_it_and_leaves_nothing(
    actor: Any, changes: dict[str, Any], error: str
) -> None:
    await actor.add(message(**changes))
    assert (await end_of(actor))["error"] == error
    assert not actor.engine.scheduler.requests and not actor.engine.scheduler.waiting
    await actor.add(message(epoch=[1, 0]))
    assert (await end_of(actor))["finish"] == "length"


@pytest.mark.parametrize("unforeseen", [RuntimeError("x"), MemoryError(), AttributeError("x"), OSError("x")], ids=repr)
async def test_an_unforeseen_error_while_queueing_is_told(actor: Any, unforeseen: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise unforeseen

    actor.engine.add_request = fail
    await actor.add(message())
    assert (await end_of(actor))["error"] == FAILED


@pytest.mark.parametrize(("closing", "refused", "ended"), [(False, DRAINING, DRAINED), (True, CLOSING, CLOSING)])
async def test_a_drain_tells_whether_another_engine_is_worth_a_try(
    actor: Any, closing: bool, refused: str, ended: str
) -> None:
    actor.thread.post = lambda call: None  # nothing is computed
    await actor.add(message())
    draining = asyncio.create_task(actor.drain(0.3, closing))
    await asyncio.sleep(0.1)
    await actor.add(message(id="late"))
    assert (await end_of(actor, "late"))["error"] == refused
    assert (await end_of(actor))["error"] == ended
    receipt = await draining
    assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, 1, 0)


async def test_a_load_report_tells_what_the_high_class_has_and_policies_keep_room_for_it(actor: Any) -> None:
    def report() -> LoadReport:
        actor.engine.step()
        actor.thread.stats = actor.engine.stats()
        return LoadReport.from_message(actor._report(1)[0])

    actor.thread.stop()  # and the engine is stepped by hand
    await asyncio.to_thread(actor.thread.join, SOON)
    for i in range(10):
        actor._add(message(id=f"n{i}", prompt=[i + 1] * 2, priority=i % 2))
    plain = report()
    assert plain.running == 8 and plain.waiting == 2 and plain.seats == 0
    assert plain.high_running == 0
    assert freeness(plain) == freeness(plain, headroom=False)
    for gone in ("n0", "n8", "n9"):
        actor.engine.abort(gone)
    actor._add(message(id="vip", prompt=[9] * 6, priority=-1))
    actor._add(message(id="queued", prompt=[9] * 14, priority=-2))
    high = report()
    assert (high.high_running, high.waiting, high.head_blocks) == (1, 1, 4)
    assert headroom_blocks(high) == 14  # of 16, decoding is at its fastest with 2 in use
    assert freeness(high) < 0 < freeness(high, headroom=False)
    free = LoadReport.from_message({**high.to_message(), "engine": "b", "high_running": 0, "free_blocks": 5})
    for priority, engine in ((0, "b"), (-1, "a")):
        assert choose(Fleet([high, free]), Ask(4, priority)) == engine, (high, free)


async def test_a_newer_stream_ends_the_older_one_and_forgotten_ingresses_leave_nothing(actor: Any) -> None:
    async def read() -> int:
        return len([item async for item in actor.stream("i", {})])

    streams = [asyncio.create_task(read()) for _ in range(3)]
    await asyncio.wait(streams[:2], timeout=SOON)
    assert all(stream.done() for stream in streams[:2]) and not streams[2].done()
    actor.outboxes.forget_s = 0.2
    actor.outboxes.clients["i"].last_seen -= 1.0
    actor._expire()
    assert await asyncio.wait_for(streams[2], SOON) >= 1
    assert not actor.wakeups and not actor.outboxes.clients


async def test_leases_are_kept_although_a_look_at_them_failed(actor: Any) -> None:
    expire, calls = actor.outboxes.expire, list[float]()

    def fail_once(now: float) -> Any:
        calls.append(now)
        if len(calls) == 1:
            raise ZeroDivisionError("unforeseen")
        return expire(now)

    actor.outboxes.expire = fail_once
    keeping = asyncio.create_task(actor._keep_leases())
    await asyncio.sleep(0.2)
    assert len(calls) > 1 and not keeping.done()
    keeping.cancel()
