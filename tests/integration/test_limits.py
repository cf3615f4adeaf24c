"""Bounded queues, queue times, priorities and request times, as a client meets them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray

from engine.sampling.params import SamplingParams
from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams, stream, until

STEP_S = 0.02  # of a paced engine


def client_of(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def statuses(service: Service) -> list[str]:
    return sorted(r["status"] for s in service.snapshots().values() for r in s["requests"])


def completion(max_tokens: int, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": max_tokens, "ignore_eos": True, **changes}


def extra(body: dict[str, Any]) -> dict[str, Any]:
    """A body as arguments of openai-python, which knows no ignore_eos and priority."""
    known = {key: value for key, value in body.items() if key not in ("ignore_eos", "priority")}
    return {**known, "extra_body": {key: value for key, value in body.items() if key not in known}}


# -- two engines, each with one seat and two places in its queue, ordered by priority --------------------------------


@pytest.fixture
def two_seats(application: Service, long_llama: Path) -> Service:
    return application.ensure(
        model=str(long_llama),
        num_replicas=2,
        dtype="float32",
        num_gpu_blocks_override=64,
        max_num_seqs=1,
        max_num_queued=2,
        scheduling_policy="priority",
        lease_s=30,
    )


def test_a_full_queue_is_an_http_429_that_disturbs_nobody(two_seats: Service) -> None:
    requests = bodies(6, 40)
    expected = run_streams(two_seats.url, requests)
    refusals: list[openai.RateLimitError] = []

    def refused() -> None:
        full = ["queued", "queued", "queued", "queued", "running", "running"]
        wait_for(lambda: statuses(two_seats) == full, 10, "full queues")
        for streaming in (False, True):  # a stream is refused before its first event, with a status
            with pytest.raises(openai.RateLimitError) as refusal:
                client_of(two_seats).completions.create(**extra(completion(5)), stream=streaming)
            refusals.append(refusal.value)

    async def overfill(results: list[Result]) -> None:
        await asyncio.to_thread(refused)

    with two_seats.paced(STEP_S):
        results = run_streams(two_seats.url, requests, overfill)
    assert results == expected
    assert all(result.done and result.completion_tokens == 40 for result in results)
    assert len(refusals) == 2
    for error in refusals:
        assert error.status_code == 429
        assert error.body == {
            "message": "every replica's queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.response.headers["content-type"] == "application/json"


@contextmanager
def occupied(*loads: tuple[Any, list[int]]) -> Iterator[None]:
    """Long requests straight to engines, of an ingress that does not exist: (actor, lengths of their prompts)."""
    params = SamplingParams(max_tokens=400, ignore_eos=True).to_dict()
    held: list[tuple[Any, str]] = []
    for actor, lengths in loads:
        for length in lengths:
            name = f"held-{uuid.uuid4().hex}"  # an engine takes no request that it once ended
            message = {"client": "test", "id": name, "prompt": [7] * length, "params": params}
            ray.get(actor.add.remote({**message, "epoch": [0, 0]}), timeout=10)
            held.append((actor, name))
    try:
        yield
    finally:
        for actor, name in held:
            ray.get(actor.abort.remote("test", [(name, [0, 0])]), timeout=10)


def test_priority_reorders_the_queue(two_seats: Service) -> None:
    order: list[str] = []

    async def one(client: httpx.AsyncClient, name: str, priority: int) -> None:
        result = await stream(client, completion(20, priority=priority), Result())
        assert result.done and result.error is None
        order.append(name)

    async def run(queued: int) -> None:
        async with httpx.AsyncClient(base_url=two_seats.url, timeout=60) as client:
            tasks = []
            for name, priority in (("first", 0), ("late", 5), ("urgent", -3)):
                tasks.append(asyncio.create_task(one(client, name, priority)))
                expected = ["queued"] * queued + ["running"] * 2
                await asyncio.to_thread(wait_for, lambda e=expected: statuses(two_seats) == e, 10, f"{name} in place")
                queued += 1
            await asyncio.gather(*tasks)

    other = list(two_seats.engines().values())[1]
    with two_seats.paced(2 * STEP_S), occupied((other, [8, 8, 8])):  # full: all of ours meet in the first one
        asyncio.run(run(queued=2))
    assert order == ["first", "urgent", "late"]


def test_a_full_queue_is_tried_elsewhere_before_429(two_seats: Service) -> None:
    actors = list(two_seats.engines().values())

    def count(actor: Any) -> None:
        refuse = type(actor)._refuse
        actor.refusals = []
        actor._refuse = lambda message, kind, why: (actor.refusals.append(kind), refuse(actor, message, kind, why))

    def shown() -> bool:
        loads = {r["id"]: (r["running"], r["waiting"]) for r in two_seats.cluster()["replicas"]}
        return [loads[name] for name in two_seats.engines()] == [(1, 2), (1, 1)]

    def version() -> int:
        return two_seats.cluster()["manager"]["version"]

    def refusals() -> list[list[str]]:
        return list(two_seats.inside(lambda actor: actor.refusals).values())

    two_seats.inside(count)
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(f"{two_seats.url}/v1/completions", json=completion(3), timeout=60))

    # The first engine has no place left, but looks freer than the second, where a prompt fills most of the memory.
    with two_seats.paced(STEP_S), occupied((actors[0], [8, 8, 8]), (actors[1], [600, 8])):
        wait_for(shown, 10, "both engines' load in the manager's view")
        seen = version()
        wait_for(lambda: version() > seen + 5, 10, "a view that every ingress has")
        queued = threading.Thread(target=post)
        queued.start()
        wait_for(lambda: statuses(two_seats).count("queued") == 4, 10, "the request in the second engine's queue")
        assert refusals() == [["queue_full"], []]
        with pytest.raises(openai.RateLimitError):
            client_of(two_seats).completions.create(**extra(completion(3)))
        assert sorted(map(len, refusals())) == [1, 2]  # both were asked
    queued.join(30)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 3


# -- one engine without a tokenizer, short queue and request times ---------------------------------------------------


@pytest.fixture(scope="module")
def bare_llama(long_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint without its tokenizer."""
    bare = tmp_path_factory.mktemp("bare")
    for file in long_llama.iterdir():
        if "token" not in file.name:
            (bare / file.name).symlink_to(file)
    return bare


def impatient(bare: Path) -> dict[str, Any]:
    return {
        "model": str(bare),
        "dtype": "float32",
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 1,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_queue_time": 1,
        "request_timeout_s": 3.0,
    }


@pytest.fixture
def hasty(application: Service, bare_llama: Path) -> Service:
    return application.ensure(**impatient(bare_llama))


def test_health_tells_the_phase_while_an_engine_loads(application: Service, bare_llama: Path) -> None:
    config = bare_llama / "config.json"
    target = config.readlink()
    config.unlink()
    os.mkfifo(config)  # the engine waits for whoever writes it
    application.delete()
    deploying = threading.Thread(target=application.update, kwargs=impatient(bare_llama))
    deploying.start()
    try:
        health = f"{application.url}/health"
        wait_for(lambda: httpx.get(health).json().get("phase") == "finding the model", 60, "the phase of the engine")
        answer = httpx.get(health)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        refused = httpx.post(f"{application.url}/v1/completions", json=completion(3))
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no replica is ready: finding the model"
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        pipe = os.open(config, os.O_WRONLY)
        os.write(pipe, target.read_bytes())
        os.close(pipe)
        config.unlink()
        config.symlink_to(target)
    deploying.join(60)
    application.wait_ready(replicas=1)
    assert httpx.get(health).json() == {"status": "ready"}


def test_without_a_tokenizer_ids_go_in_and_come_out(hasty: Service) -> None:
    body = completion(6, temperature=0)
    whole = httpx.post(f"{hasty.url}/v1/completions", json=body).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"] == 6 and whole["usage"]["prompt_tokens"] == 3
    assert whole["choices"][0]["text"] == ""
    streamed = []
    for chunk in client_of(hasty).completions.create(**extra(body), stream=True):
        streamed += chunk.choices[0].token_ids  # type: ignore[attr-defined]
    assert streamed == ids
    longer = httpx.post(f"{hasty.url}/v1/completions", json={**body, "prompt": [*body["prompt"], *ids[:2]]}).json()
    assert longer["choices"][0]["token_ids"][:4] == ids[2:]


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "messages"),
        ("completions", {"prompt": "hello"}, "prompt"),
        ("completions", {"prompt": [5], "stop": ["x"]}, "stop"),
        ("completions", {"prompt": [5], "logprobs": 1}, "logprobs"),
        ("completions", {"prompt": [5], "echo": True}, "echo"),
        ("completions", {"prompt": [10**6]}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_needs_a_tokenizer_is_a_one_line_400(
    hasty: Service, path: str, changes: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(f"{hasty.url}/v1/{path}", json={"model": "tiny", **changes})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert ("skip_tokenizer_init" in error["message"]) == (param is not None)
    assert "\n" not in error["message"]


def test_a_request_queued_for_too_long_is_a_503(hasty: Service) -> None:
    with hasty.paced(STEP_S):

        async def behind(results: list[Result]) -> None:
            await until(lambda: results[0].chunks > 0)
            with pytest.raises(openai.InternalServerError) as late:
                await asyncio.to_thread(client_of(hasty).completions.create, **extra(completion(3)))
            assert late.value.status_code == 503 and late.value.code == "service_unavailable"
            assert "queued for longer than max_queue_time" in late.value.message
            assert int(late.value.response.headers["retry-after"]) >= 1
            assert results[0].finish_reason is None  # what runs goes on

        (result,) = run_streams(hasty.url, [completion(100)], behind)
    assert result.done and result.error is None and result.finish_reason == "length"


def test_a_request_that_takes_too_long_is_a_504_and_frees_its_blocks(hasty: Service) -> None:
    with hasty.paced(STEP_S):
        started = time.monotonic()
        answer = httpx.post(f"{hasty.url}/v1/completions", json=completion(1000), timeout=30)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error" and answer.json()["error"]["code"] == "timeout"
        assert time.monotonic() - started >= 3.0
        hasty.wait_idle(5)  # 1,000 steps would take 20 s
        (result,) = run_streams(hasty.url, [completion(1000)])
        assert result.done and result.chunks > 0 and result.finish_reason is None
        assert result.error is not None and result.error["code"] == "timeout"
        hasty.wait_idle(5)
