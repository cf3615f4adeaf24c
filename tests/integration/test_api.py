"""The API as real clients use it: openai-python, plain HTTP, Serve handles."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.openai.errors import APIError
from tests.integration.service import Service, wait_for
from tests.integration.streams import bodies, run_streams
from tests.machine import slowdown

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **changes}


def test_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**chat())
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens <= 12
    text, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(**chat(stream=True, stream_options={"include_usage": True})):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_logprobs_are_one_entry_a_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat(logprobs=True, top_logprobs=3))
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = answer.choices[0].logprobs.content
    assert answer.usage is not None and len(entries) == answer.usage.completion_tokens
    for entry in entries:  # greedy: the sampled token is the most likely one
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3


def test_completions_of_text_and_of_token_ids(client: openai.OpenAI) -> None:
    ids = client.completions.create(model="tiny", prompt=[11, 12, 13], max_tokens=5, temperature=0)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3
    assert ids.usage.completion_tokens <= 5
    several = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=5, temperature=0, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert [choice.text[:2] for choice in several.choices] == ["ab", "cd"]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0, extra_body=no_eos())
    text = free.choices[0].text
    stop = text[10:12]
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=[stop], extra_body=no_eos()
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def no_eos() -> dict[str, Any]:
    return {"ignore_eos": True}


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        request = chat(temperature=1.5, seed=seed, max_tokens=30, extra_body=no_eos())
        return client.chat.completions.create(**request).choices[0].message.content or ""

    assert sample(1) == sample(1) != sample(2)


def test_penalties_and_min_p_reach_the_engine(client: openai.OpenAI) -> None:
    def tokens(temperature: float = 0, **fields: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=[11, 12, 13], max_tokens=40, temperature=temperature, logprobs=0, seed=1,
            extra_body=no_eos() | fields,
        )  # fmt: skip
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens is not None
        return answer.choices[0].logprobs.tokens

    plain = tokens()
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert len(set(tokens(**{name: 2}))) > len(set(plain))
    assert tokens(2.0, min_p=1) == plain != tokens(2.0)
    with pytest.raises(openai.BadRequestError) as wrong:
        tokens(presence_penalty=3)
    assert wrong.value.param == "presence_penalty" and "[-2, 2]" in str(wrong.value)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_openai_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**chat(model="gpt-9"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**chat(temperature="hot"))
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as field:
        client.chat.completions.create(**chat(extra_body={"max_tokenz": 5}))
    assert field.value.param == "max_tokenz" and "max_tokens" in str(field.value)


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": 7}',
    b'{"model": "tiny", "prompt": ""}',
    b'{"model": "tiny", "prompt": [99999999]}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": -1}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": "5"}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": 5000}',
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "top_p": 2}',
    b'{"model": "tiny", "prompt": "x", "logprobs": 100}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b"\xff\xfe",
]


def test_bad_requests_are_4xx_in_openais_shape_and_disturb_nobody(service: Service) -> None:
    requests = bodies(4, 150)
    calm = run_streams(service.url, requests)
    stop = threading.Event()
    statuses: list[int] = []

    def pester() -> None:
        with httpx.Client(base_url=service.url, timeout=30) as client:
            while not stop.is_set():
                for body in BAD_BODIES:
                    response = client.post("/v1/completions", content=body)
                    error = response.json()["error"]
                    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"], body
                    statuses.append(response.status_code)

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        disturbed = run_streams(service.url, requests)
    finally:
        stop.set()
        thread.join(60)
    assert set(statuses) == {400} and len(statuses) >= len(BAD_BODIES)
    assert disturbed == calm
    assert all(result.finish_reason == "length" and len(result.tokens) == 150 for result in calm)


def test_unknown_paths_and_methods_have_openais_shape(service: Service) -> None:
    for response, status in (
        (httpx.get(f"{service.url}/v1/nothing"), 404),
        (httpx.get(f"{service.url}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_request_id_is_echoed(service: Service) -> None:
    response = httpx.post(f"{service.url}/v1/chat/completions", json=chat(), headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert "abc-1" not in response.json()["id"]


def cancelled(service: Service) -> float:
    families = text_string_to_metric_families(httpx.get(f"{service.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert sum(s.value for s in samples if s.name == "ferry_requests_open") == 0
    return sum(s.value for s in samples if s.labels.get("reason") == "cancelled")


def test_a_closed_connection_frees_its_blocks_and_is_counted(service: Service) -> None:
    for streaming in (True, False):
        wait_for(lambda: cancelled(service) >= 0, 10, "metrics of an idle service")  # they are a second old
        before = cancelled(service)
        body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 900, "ignore_eos": True, "stream": streaming}
        with httpx.Client(base_url=service.url, timeout=0.5 if not streaming else 30) as client:
            if streaming:
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body)
        closed = time.monotonic()
        wait_for(lambda: service.open_requests() == 0, 5, "open requests gone")
        assert (time.monotonic() - closed) / slowdown() < 1.0  # the tiny model would go on for seconds
        wait_for(lambda was=before: cancelled(service) > was, 5, "its count")  # type: ignore[misc]
        service.wait_idle()


def test_handle_calls(service: Service) -> None:
    handle = service.handle
    whole = handle.chat.remote(chat()).result(timeout_s=30)
    assert whole["object"] == "chat.completion"
    chunks = list(handle.options(stream=True).chat_stream.remote(chat()))
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    completion = handle.completions.remote({"model": "tiny", "prompt": [3, 4], "max_tokens": 2}).result(timeout_s=30)
    assert completion["object"] == "text_completion"


def test_errors_of_handle_calls_are_typed(service: Service) -> None:
    handle = service.handle
    with pytest.raises(APIError, match="gpt-9") as unknown:
        handle.chat.remote(chat(model="gpt-9")).result(timeout_s=30)
    assert (unknown.value.status, unknown.value.code, unknown.value.param) == (404, "model_not_found", "model")
    assert unknown.value.message.startswith("model 'gpt-9' does not exist")
    with pytest.raises(APIError) as wrong:
        list(handle.options(stream=True).completions_stream.remote({"model": "tiny", "prompt": ""}))
    assert (wrong.value.status, wrong.value.message) == (400, "prompt is empty, must have at least one token")


def test_metrics_of_every_process(service: Service) -> None:
    httpx.post(f"{service.url}/v1/chat/completions", json=chat())
    time.sleep(2.5)  # engines and ingresses push once a second
    text = httpx.get(f"{service.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    replicas = {s.labels["replica"] for s in samples if s.name == "ferry_kv_blocks_total"}
    assert replicas == set(service.engines())
    assert sum(s.value for s in samples if s.name == "ferry_generation_tokens_total") > 0
    assert sum(s.value for s in samples if s.name == "ferry_ttft_seconds_count") > 0
    assert {s.labels["reason"] for s in samples if s.name == "ferry_requests_finished_total"} & {"stop", "length"}


def test_both_replicas_work(service: Service) -> None:
    results = run_streams(service.url, bodies(16, 60))
    assert all(result.done and result.finish_reason == "length" for result in results)
    steps = httpx.get(f"{service.url}/metrics").text
    assert json.dumps(sorted(service.engines())) and steps.count("ferry_steps_total{") == 2


def test_a_text_that_cannot_fit_is_refused_at_once(service: Service) -> None:
    started = time.monotonic()
    for path, body in (
        ("/v1/completions", {"prompt": "a " * 3_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 3_000_000}]}),
    ):
        response = httpx.post(f"{service.url}{path}", json={"model": "tiny", **body}, timeout=30)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (time.monotonic() - started) / slowdown() < 5.0  # tokenising it would take longer
    response = httpx.post(f"{service.url}/v1/completions", content=b" " * (9 << 20), timeout=30)
    assert response.status_code == 413 and response.json()["error"]["message"]
