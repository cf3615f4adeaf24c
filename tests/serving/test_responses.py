from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serving.openai import errors, logprobs, responses, streaming
from tests.serving.demo import demo_tokenizer

USAGE = responses.usage(7, 3, cached_tokens=4)


@dataclass
class Logprobs:
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def event(data: bytes) -> dict:
    """The object of one data line."""
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


def exactly(kind, data: dict):
    """Validated by openai-python's own type, without a field that it does not know."""
    parsed = kind.model_validate(data, strict=True)
    assert not parsed.model_extra
    return parsed


def test_usage():
    assert USAGE == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_chat_completion():
    data = responses.chat_completion("chatcmpl-1", 5, "m", [responses.chat_choice("hi", "stop")], USAGE)
    parsed = exactly(ChatCompletion, data)
    assert (parsed.id, parsed.created, parsed.model) == ("chatcmpl-1", 5, "m")
    assert parsed.choices[0].message.content == "hi"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert set(data) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert data["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}


def test_text_completion():
    choices = [responses.completion_choice(text, "length", index=index) for index, text in enumerate("ab")]
    parsed = exactly(Completion, responses.text_completion("cmpl-1", 5, "m", choices, USAGE))
    assert [(choice.index, choice.text, choice.finish_reason) for choice in parsed.choices] == [
        (0, "a", "length"),
        (1, "b", "length"),
    ]


def test_model_list():
    data = responses.model_list(["a", "b"], 5, 2048)
    assert data["object"] == "list"
    assert [Model.model_validate(card).id for card in data["data"]] == ["a", "b"]
    assert data["data"][0]["max_model_len"] == 2048


def test_ids_are_unique():
    assert responses.new_chat_id().startswith("chatcmpl-")
    assert responses.new_completion_id().startswith("cmpl-")
    assert len({responses.new_chat_id() for _ in range(100)}) == 100


# Streams


def test_chat_stream():
    stream = streaming.ChatStream("chatcmpl-1", 5, "m")
    sent = [stream.first(), stream.delta("hi"), stream.delta("!", "stop")]
    chunks = [exactly(ChatCompletionChunk, event(data)) for data in sent]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        ("chatcmpl-1", 5, "m", "chat.completion.chunk")
    }
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.content for delta in deltas] == ["", "hi", "!"]
    assert [delta.role for delta in deltas] == ["assistant", None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert all("usage" not in event(data) for data in sent)


def test_empty_last_delta():
    data = event(streaming.ChatStream("i", 5, "m").delta("", "length"))
    assert data["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_usage_comes_last_and_is_null_before():
    stream = streaming.ChatStream("i", 5, "m", include_usage=True)
    assert all(event(data)["usage"] is None for data in (stream.first(), stream.delta("x"), stream.delta("", "stop")))
    last = exactly(ChatCompletionChunk, event(stream.usage(USAGE)))
    assert last.choices == []
    assert last.usage.total_tokens == 10


def test_continuous_usage():
    stream = streaming.ChatStream("i", 5, "m", include_usage=True)
    for data in (stream.first(usage=USAGE), stream.delta("x", usage=USAGE)):
        assert exactly(ChatCompletionChunk, event(data)).usage.completion_tokens == 3


def test_completion_stream():
    stream = streaming.CompletionStream("cmpl-1", 5, "m", include_usage=True)
    data = event(stream.delta("hi", index=1))
    assert data["choices"] == [{"index": 1, "text": "hi", "logprobs": None, "finish_reason": None}]
    assert data["object"] == "text_completion"
    assert data["usage"] is None
    assert exactly(Completion, event(stream.delta("", "stop"))).choices[0].finish_reason == "stop"
    assert event(stream.usage(USAGE))["choices"] == []


@given(st.text(), st.text())
def test_any_text_survives_and_stays_on_one_line(text, model):
    for stream in (streaming.ChatStream(model, 5, model), streaming.CompletionStream(model, 5, model)):
        data = stream.delta(text, "stop")
        assert len(data.decode().splitlines()) == 2  # also for clients that split at U+2028 or U+0085
        choice = event(data)["choices"][0]
        assert (choice["delta"].get("content", "") if "delta" in choice else choice["text"]) == text
        assert event(data)["model"] == model


def test_a_chunk_costs_microseconds():
    stream = streaming.ChatStream("i", 5, "m")
    start = time.perf_counter()
    for _ in range(10_000):
        stream.delta(" hello")
    assert (time.perf_counter() - start) / 10_000 < 50e-6  # 0.7 us on an idle core


def test_failure_in_the_middle_of_a_stream():
    lines = streaming.error_event(errors.internal()).decode().split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["error"]["type"] == "server_error"
    assert lines[1:] == ["data: [DONE]", ""]


# Logprobs


def test_chat_logprobs():
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(" hello😀")
    entries = [Logprobs(-0.5, 1, [(ids[0], -0.5), (2, float("-inf"))]) for _ in ids]
    shape = logprobs.chat_logprobs(tokenizer, ids, entries)
    choice = responses.chat_choice(" hello😀", "stop", logprobs=shape)
    content = (
        exactly(ChatCompletion, responses.chat_completion("i", 5, "m", [choice], USAGE)).choices[0].logprobs.content
    )
    assert len(content) == len(ids)
    assert content[0].token == " hello"
    assert content[0].bytes == list(b" hello")
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == " hello😀"
    assert [(entry.token, entry.logprob) for entry in content[0].top_logprobs] == [
        (" hello", -0.5),
        ("<|im_end|>", -9999.0),
    ]
    chunk = streaming.ChatStream("i", 5, "m").delta(" hello😀", logprobs=shape)
    assert exactly(ChatCompletionChunk, event(chunk)).choices[0].logprobs.content[0].logprob == -0.5


def test_completion_logprobs():
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("a😀")
    entries = [Logprobs(-1.5, 3, [(2, -0.1)]) for _ in ids]
    shape = logprobs.completion_logprobs(tokenizer, ids, entries, [0, *[1] * (len(ids) - 1)])
    choice = responses.completion_choice("a😀", "stop", logprobs=shape)
    parsed = exactly(Completion, responses.text_completion("i", 5, "m", [choice], USAGE)).choices[0].logprobs
    assert parsed.tokens[0] == "a"
    assert parsed.tokens[1].startswith("bytes:\\xf0")
    assert parsed.token_logprobs == [-1.5] * len(ids)
    assert parsed.top_logprobs[0] == {"<|im_end|>": -0.1, "a": -1.5}
    assert parsed.text_offset == [0, *[1] * (len(ids) - 1)]


def test_no_alternatives_and_no_entry():
    shape = logprobs.completion_logprobs(demo_tokenizer(), [2, 2], [Logprobs(-1.0, 1, []), None], [0, 0])
    assert shape["token_logprobs"] == [-1.0, -9999.0]
    assert shape["top_logprobs"] is None
    assert logprobs.chat_logprobs(demo_tokenizer(), [2], [None])["content"][0]["logprob"] == -9999.0


# Errors


@pytest.mark.parametrize(
    ("error", "status", "type", "code"),
    [
        (errors.bad_request("x", "n"), 400, "invalid_request_error", None),
        (errors.not_found_model("z", ["m"]), 404, "invalid_request_error", "model_not_found"),
        (errors.too_many_requests("x", 2.1), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.unavailable("x", 0.2), 503, "service_unavailable_error", "service_unavailable"),
        (errors.internal(), 500, "server_error", "internal_error"),
    ],
)
def test_error_shape(error, status, type, code):
    body = error.body()["error"]
    assert error.status == status
    assert set(error.body()) == {"error"}
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["type"], body["code"]) == (type, code)


def test_retry_after_is_whole_seconds():
    assert errors.too_many_requests("x", 2.1).headers == {"Retry-After": "3"}
    assert errors.unavailable("x", 0).headers == {"Retry-After": "1"}


def test_messages_are_one_capped_line():
    assert errors.bad_request("a\n  b").message == "a b"
    assert len(errors.bad_request("x" * 9999).message) == 500
    assert "model 'z' does not exist, this server has m" in errors.not_found_model("z", ["m"]).message
