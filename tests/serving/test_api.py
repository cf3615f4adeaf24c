"""The endpoints apart from HTTP and engines: where the work of a request is done, and how its end is counted."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.datastructures import Headers

from engine.config import EngineConfig
from serving import messages
from serving.api import OFF_LOOP_BYTES, Api
from serving.cluster_api import move_error, parse_move
from serving.http import EventStream, priority_of
from serving.ingress import answer_of
from serving.ingress_metrics import IngressMetrics
from serving.openai.errors import APIError
from tests.serving.demo import demo_tokenizer


class FakeClient:
    """Every sequence gets these outputs, then nothing more."""

    ready, phase, max_model_len = True, "", 1 << 20

    def __init__(self, *outputs: dict[str, Any]):
        self.outputs = outputs
        self.prompts: dict[str, list[int]] = {}
        self.priorities: list[int] = []

    async def generate(
        self, request_id: str, prompt: list[int], params: dict[str, Any], priority: int = 0
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        self.prompts[request_id] = prompt
        self.priorities.append(priority)
        for index, output in enumerate(self.outputs):
            yield [{"id": request_id, "epoch": [0, 0], "index": index, **output}]
        await asyncio.Event().wait()


def api(*outputs: dict[str, Any], tokenizer: Any = None) -> Api:
    config = EngineConfig(model="m", served_model_name=("m",), skip_tokenizer_init=tokenizer is None)
    return Api(config, tokenizer, FakeClient(*outputs), IngressMetrics("i"))  # type: ignore[arg-type]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode()


# Where the work is done


class Watched:
    """The demo tokenizer, and the threads that its work was done in."""

    def __init__(self) -> None:
        self.tokenizer = demo_tokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, *arguments: Any) -> list[int]:
        self.threads.add(threading.get_ident())
        return self.tokenizer.encode(*arguments)

    def render_chat(self, *arguments: Any, **variables: Any) -> str:
        self.threads.add(threading.get_ident())
        return self.tokenizer.render_chat(*arguments, **variables)


SMALL, LARGE = "word ", "word " * (OFF_LOOP_BYTES // 5)
HALF = "word " * (OFF_LOOP_BYTES // 8)


@pytest.mark.parametrize(
    ("kind", "fields", "off_loop"),
    [
        ("completion", {"prompt": SMALL}, False),
        ("completion", {"prompt": LARGE}, True),
        ("completion", {"prompt": [HALF, HALF]}, True),
        ("chat", {"messages": [{"role": "user", "content": SMALL}]}, False),
        ("chat", {"messages": [{"role": "user", "content": LARGE}]}, True),
        ("chat", {"messages": [{"role": "user", "content": HALF}] * 2}, True),
    ],
)
async def test_large_bodies_are_prepared_in_a_thread(
    kind: str, fields: dict[str, Any], off_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    served = api(tokenizer=watched)
    name = f"parse_{kind}"
    parse = getattr(__import__("serving.api", fromlist=[name]), name)

    def parsed(data: bytes) -> Any:
        watched.threads.add(threading.get_ident())
        return parse(data)

    monkeypatch.setattr(f"serving.api.{name}", parsed)
    await getattr(served, kind)(json.dumps({"model": "m", **fields}).encode())
    assert len(watched.threads) == 1
    assert (threading.get_ident() not in watched.threads) == off_loop


async def test_errors_of_large_bodies_are_the_same() -> None:
    served = api(tokenizer=demo_tokenizer())
    for size in (1, OFF_LOOP_BYTES):
        for wrong in (b"{" + b" " * size, body(model="x" * size), body(prompt=[10**9] * size)):
            with pytest.raises(APIError) as error:
                await served.completion(wrong)
            assert error.value.status in (400, 404)


# How its end is counted

TOKEN = {"token": 5}
LAST = {"token": 6, "finish": "length"}


def counted(served: Api) -> dict[str, float]:
    """Finished sequences by reason, and those open."""
    found = {}
    for metric in served.metrics.registry.collect():
        for sample in metric.samples:
            if sample.name == "ferry_requests_finished_total":
                found[sample.labels["reason"]] = sample.value
            if sample.name == "ferry_requests_open":
                found["open"] = sample.value
    return found


async def open_stream(served: Api, **fields: Any) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    answer = await served.completion(body(stream=True, **fields))
    assert answer.stream is not None
    stream = answer.stream()
    return await anext(stream), stream


async def test_requests_are_open_while_they_are_served_and_counted_once() -> None:
    served = api(TOKEN, LAST)
    answer = await served.completion(body(prompt=[[1], [2]]))
    assert counted(served) == {"open": 0}
    assert [choice["token_ids"] for choice in (await answer.whole())["choices"]] == [[5, 6], [5, 6]]
    assert counted(served) == {"open": 0, "length": 2}
    _, stream = await open_stream(served)
    assert counted(served) == {"open": 1, "length": 2}
    async with aclosing(stream):
        assert [event async for event in stream]
    assert counted(served) == {"open": 0, "length": 3}


@pytest.mark.parametrize("kind", ["timeout", "engine_lost", "queue_timeout"])
async def test_errors_are_counted_by_their_kind(kind: str) -> None:
    served = api({"error": kind})
    with pytest.raises(APIError):
        await (await served.completion(body())).whole()
    assert counted(served) == {"open": 0, kind: 1}


async def test_an_error_of_ours_is_counted() -> None:
    served = api({"token": 5, "logprobs": 7})
    with pytest.raises(TypeError):
        await (await served.completion(body())).whole()
    assert counted(served) == {"open": 0, messages.INTERNAL: 1}


@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_leaves_is_counted(prompts: int) -> None:
    served = api(TOKEN)
    whole = asyncio.create_task((await served.completion(body(prompt=[[1]] * prompts))).whole())
    await asyncio.sleep(0.01)
    assert counted(served) == {"open": 1}
    whole.cancel()
    await asyncio.wait([whole])
    assert counted(served) == {"open": 0, messages.CANCELLED: prompts}
    _, stream = await open_stream(served, prompt=[[1]] * prompts)
    await stream.aclose()
    assert counted(served) == {"open": 0, messages.CANCELLED: 2 * prompts}


async def test_a_response_that_is_dropped_before_it_is_sent_is_counted() -> None:
    served = api(TOKEN)
    response = EventStream(*await open_stream(served))
    assert counted(served) == {"open": 1}
    del response
    gc.collect()
    await asyncio.sleep(0.05)
    assert counted(served) == {"open": 0, messages.CANCELLED: 1}


# The manager


async def test_nobody_waits_for_the_manager_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ingress.MANAGER_TIMEOUT_S", 0.05)

    async def dead() -> None:
        raise ConnectionError("x")

    for call in (asyncio.Event().wait(), dead()):
        with pytest.raises(APIError) as error:
            await asyncio.wait_for(answer_of(call), 1.0)
        assert error.value.status == 503 and "manager" in error.value.message


# Priority


@pytest.mark.parametrize(
    ("header", "fields", "expected"),
    [(None, {}, 0), (None, {"priority": -2}, -2), (-3, {}, -3), (5, {"priority": 5}, 5), (0, {"priority": 0}, 0)],
)
async def test_the_header_and_the_body_say_the_same(header: int | None, fields: dict[str, Any], expected: int) -> None:
    served = api({"token": 5, "finish": "length"})
    await (await served.completion(body(**fields), header)).whole()
    assert served.client.priorities == [expected]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("header", "priority"), [(1, 2), (1, 0)])
async def test_a_header_and_a_body_that_differ_are_refused(header: int, priority: int) -> None:
    with pytest.raises(APIError) as wrong:
        await api().completion(body(priority=priority), header)
    assert (wrong.value.status, wrong.value.param) == (400, "priority")
    assert wrong.value.message == f"priority is {priority} and X-Priority is {header}, give one of them"


def test_a_header_is_an_integer() -> None:
    assert priority_of(Headers({})) is None
    assert [priority_of(Headers({"X-Priority": text})) for text in ("0", "-3", " 7 ")] == [0, -3, 7]
    for text in ("high", "1.5", "", str(2**31), "9" * 5000, "1_000", "+1", "１", "\u00a07"):
        with pytest.raises(APIError) as wrong:
            priority_of(Headers({"X-Priority": text.encode("latin-1", "replace").decode("latin-1")}))
        assert (wrong.value.status, wrong.value.param) == (400, "X-Priority")


def test_a_header_that_is_there_twice_is_refused() -> None:
    with pytest.raises(APIError, match="there 2 times"):
        priority_of(Headers(raw=[(b"x-priority", b"-5"), (b"x-priority", b"7")]))


# Moves


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("", None), ("{", None), ("[]", None), ("{}", "request_id"), ('{"request_id": "r"}', "destination"),
        ('{"request_id": "r", "destination": 3}', "destination"),
        ('{"request_id": "", "destination": "d"}', "request_id"),
        ('{"request_id": "r", "destination": "d", "to": 1}', "to"),
    ],
)  # fmt: skip
def test_wrong_bodies_of_a_move(text: str, param: str | None) -> None:
    with pytest.raises(APIError) as wrong:
        parse_move(text.encode())
    assert (wrong.value.status, wrong.value.param) == (400, param)


def test_the_body_of_a_move() -> None:
    assert parse_move(b'{"destination": "d", "request_id": "r"}') == ("r", "d")


@pytest.mark.parametrize(("kind", "status"), [("not_found", 404), ("conflict", 409)])
def test_what_the_manager_says_of_a_move_is_a_status(kind: str, status: int) -> None:
    error = move_error({"error": kind, "message": "why"})
    assert (error.status, error.message, error.code) == (status, "why", kind)
