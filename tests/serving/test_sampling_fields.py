"""Sampling fields from the body of a request to the tokens of an engine: what a client asks for is what it gets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from serving.api import Api
from serving.ingress_metrics import IngressMetrics
from serving.messages import Output, is_terminal, output_of
from serving.openai.errors import APIError
from serving.openai.protocol import body_of

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 90, 91]
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0, "presence_penalty": 2},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"temperature": 2.0, "seed": 3, "min_p": 0.2},
]


class InProcess:
    """Stands in for the client of engines: one engine, one request at a time."""

    ready, phase = True, ""

    def __init__(self, llm: LLM):
        self.engine = llm.engine
        self.max_model_len = llm.engine.scheduler.max_length

    async def generate(
        self, request_id: str, prompt: list[int], params: dict[str, Any], priority: int = 0
    ) -> AsyncGenerator[list[Output], None]:
        message = json.loads(json.dumps(params))  # it crosses processes
        self.engine.add_request(request_id, prompt, SamplingParams.from_dict(message), priority=priority)
        while self.engine.has_work:
            outputs = [output_of(event) for event in self.engine.step()]
            if outputs:
                yield outputs
                if is_terminal(outputs[-1]):
                    return


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), dtype="float32", kv_cache_memory_bytes=8 << 20, threads=1)


@pytest.fixture
def served(llm: LLM) -> Api:
    config = EngineConfig(model="m", served_model_name=("m",), skip_tokenizer_init=True)
    return Api(config, None, InProcess(llm), IngressMetrics("i"))  # type: ignore[arg-type]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, **fields}).encode()


def offline(llm: LLM, **fields: Any) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, **fields))[0].outputs[0].token_ids


@pytest.mark.parametrize("fields", FIELDS, ids=str)
async def test_the_answer_is_that_of_the_engine_with_these_parameters(
    fields: dict[str, Any], served: Api, llm: LLM
) -> None:
    answer = await (await served.completion(body(**fields))).whole()
    tokens = answer["choices"][0]["token_ids"]
    assert tokens == offline(llm, **fields)
    plain = {name: value for name, value in fields.items() if name in ("temperature", "seed")}
    assert tokens != offline(llm, **plain)
    streamed: list[int] = []
    stream = (await served.completion(body(**fields, stream=True))).stream
    assert stream is not None
    async for chunk in stream():
        for line in chunk.decode().splitlines():
            if line.startswith("data: {"):
                streamed += [token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]]
    assert streamed == tokens


async def test_prompts_of_one_request_are_penalized_apart(served: Api, llm: LLM) -> None:
    fields = {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    answer = await (await served.completion(body(prompt=[PROMPT, PROMPT], **fields))).whole()
    assert [choice["token_ids"] for choice in answer["choices"]] == [offline(llm, **fields)] * 2


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("min_p", 1.5, "min_p is 1.5, must be in [0, 1]"),
        ("top_p", 0, "top_p is 0.0, must be in (0, 1]"),
        ("top_p", 1.5, "top_p is 1.5, must be in (0, 1]"),
        ("repetition_penalty", 0, "repetition_penalty is 0.0, must be in [0.01, 100]"),
        ("presence_penalty", -2.5, "presence_penalty is -2.5, must be in [-2, 2]"),
        ("frequency_penalty", "1", "frequency_penalty is '1', must be a valid number"),
    ],
)
async def test_wrong_values_are_refused_before_anything_runs(
    field: str, value: Any, sentence: str, served: Api, llm: LLM
) -> None:
    with pytest.raises(APIError) as wrong:
        await served.completion(body(**{field: value}))
    assert (wrong.value.status, wrong.value.param, wrong.value.message) == (400, field, sentence)
    assert not llm.engine.has_work


WRONG: list[Any] = [10**400, -(10**400), "INF", "-INF", True, "5", {}, [1.5], [[1]], [[[[]]]], ["5"], [None], [10**400]]
RIGHT: dict[str, list[Any]] = {"ignore_eos": [True]}


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
async def test_whatever_a_field_is_given_is_refused_with_its_name(name: str, served: Api) -> None:
    for value in WRONG:
        if value in RIGHT.get(name, []):
            continue
        sent = body(**{name: value}).replace(b'"INF"', b"1e400").replace(b'"-INF"', b"-1e400")
        with pytest.raises(APIError) as wrong:
            await served.completion(sent)
        assert (wrong.value.status, wrong.value.type) == (400, "invalid_request_error"), value
        assert wrong.value.param in (name, f"{name}[0]"), value
        assert wrong.value.message.startswith(name) and len(wrong.value.message) < 160, wrong.value.message


def test_a_handles_request_holds_what_json_can_hold() -> None:
    for value in (float("nan"), [float("inf")], 10**5000, {1}, object(), b"x"):
        with pytest.raises(APIError) as wrong:
            body_of({"model": "m", "temperature": value}, stream=False)
        assert (wrong.value.status, wrong.value.param) == (400, "temperature")
        assert wrong.value.message.startswith("temperature is ") and len(wrong.value.message) < 120


def test_a_handles_request_becomes_a_body() -> None:
    assert json.loads(body_of({"model": "m", "stream": True}, stream=False)) == {"model": "m", "stream": False}
    for request in (None, "model", [1]):
        with pytest.raises(APIError, match="must be a dict of its fields"):
            body_of(request, stream=False)
