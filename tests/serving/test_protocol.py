from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from serving.openai.errors import APIError
from serving.openai.fields import ACCEPTED_WITHOUT_EFFECT, REFUSED
from serving.openai.protocol import CommonRequest, parse_chat, parse_completion
from serving.openai.sampling import check_token_ids, to_sampling_params

USER = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": USER, **fields}).encode())


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused(call, *args, **fields) -> APIError:
    with pytest.raises(APIError) as caught:
        call(*args, **fields)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert "\n" not in error.message
    assert len(error.message) <= 500
    assert "pydantic" not in error.message.lower()
    assert ".py" not in error.message
    return error


def params(request: CommonRequest, prompt_len: int = 10, **more) -> SamplingParams:
    options = {"defaults": {}, "max_model_len": 100, "prompt_len": prompt_len} | more
    return to_sampling_params(request, **options)


# What is accepted


def test_chat_defaults():
    request = chat()
    assert request.template_messages() == USER
    assert (request.stream, request.stop, request.include_usage, request.alternatives()) == (False, [], False, None)
    assert request.add_generation_prompt
    assert not request.add_special_tokens
    assert params(request) == SamplingParams(temperature=1.0, max_tokens=90)


def test_completion_defaults():
    request = completion()
    assert request.prompt == ["hi"]
    assert request.add_special_tokens
    assert not request.echo
    assert params(request) == SamplingParams(temperature=1.0, max_tokens=16)


def test_every_field_is_carried_over():
    fields = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -3, "max_tokens": 5, "stop_token_ids": [4, 5],
        "ignore_eos": True, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 0.5,
    }  # fmt: skip
    expected = SamplingParams(0, 7, 0.5, 5, (4, 5), True, -3, 2, 0.1, 1.2, -1, 0.5)
    assert params(chat(**fields, logprobs=True, top_logprobs=2)) == expected
    assert params(completion(**fields, logprobs=2)) == expected
    assert params(chat(logprobs=True)).logprobs == 0


def test_null_is_the_default():
    nulls = dict.fromkeys(
        ["max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "seed", "n", "stream",
         "stream_options", "logprobs", "top_logprobs", "stop_token_ids", "priority", "chat_template_kwargs", "min_p",
         "repetition_penalty", "presence_penalty", "frequency_penalty"]
    )  # fmt: skip
    assert chat(**nulls) == chat()


def test_server_defaults_yield_to_the_request():
    defaults = {"temperature": 0.2, "top_k": 50, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    chosen = params(chat(top_k=3, presence_penalty=0), defaults=defaults)
    assert chosen == SamplingParams(0.2, 3, repetition_penalty=1.1, max_tokens=90)


@pytest.mark.parametrize(("value", "stops"), [("a", ["a"]), (["a", "bc"], ["a", "bc"]), ([], []), (None, [])])
def test_stop_is_a_list(value, stops):
    assert chat(stop=value).stop == stops


def test_stop_token_ids_are_distinct():
    assert chat(stop_token_ids=[5, 3, 5, 3, 4]).stop_token_ids == [5, 3, 4]
    assert len(chat(stop_token_ids=list(range(128))).stop_token_ids) == 128


@pytest.mark.parametrize(
    ("value", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]), (["a"], ["a"])],
)
def test_prompt_is_a_list_of_prompts(value, prompts):
    assert completion(prompt=value).prompt == prompts


def test_messages_for_the_template():
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "tool_calls": None},
    ]  # fmt: skip
    assert chat(messages=messages).template_messages() == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


def test_stream_options():
    request = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert request.include_usage
    assert request.continuous_usage
    assert not chat(stream=True, stream_options={}).include_usage


@pytest.mark.parametrize("name", sorted(ACCEPTED_WITHOUT_EFFECT))
def test_accepted_without_effect(name):
    assert chat(**{name: "x"}) == chat()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name_unless_it_asks_for_nothing(name):
    for neutral in [None, *REFUSED[name][0]]:
        assert chat(**{name: neutral}) == chat()
    error = refused(chat, **{name: "something"})
    assert error.param == name
    assert error.message.startswith(name)
    assert error.code == "unsupported_parameter"


def test_guided_fields_are_refused():
    assert refused(completion, guided_json={}).param == "guided_json"
    assert completion(guided_regex=None) == completion()


# What is not


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
        ({"zzz": 1}, "zzz", "unknown field 'zzz'"),
        ({"temperature": "0.5"}, "temperature", "is '0.5', must be a valid number"),
        ({"temperature": True}, "temperature", "is True"),
        ({"min_p": "0.1"}, "min_p", "is '0.1', must be a valid number"),
        ({"presence_penalty": [1]}, "presence_penalty", "is a list, must be a valid number"),
        ({"frequency_penalties": 1}, "frequency_penalties", "did you mean 'frequency_penalty'"),
        ({"max_tokens": 5.0}, "max_tokens", "is 5.0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"stream": 1}, "stream", "boolean"),
        ({"n": 2}, "n", "n is 2: more than one choice per prompt is not built yet"),
        ({"n": 0}, "n", "n is 0"),
        ({"seed": 2**70}, "seed", "less than or equal"),
        ({"priority": 2**40}, "priority", "less than or equal"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"stop": {"a": 1}}, "stop", "list of strings"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]", "integer"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids", "at most 128"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs = true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats", "needs|only"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one of them"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"model": None}, "model", "model is missing"),
        ({"model": 5}, "model", "string"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(fields, param, words):
    error = refused(chat, **fields)
    assert error.param == param
    assert any(word in error.message for word in words.split("|")), error.message


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        ("hi", "messages", "list"),
        ([5], "messages[0]", "is 5"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "tool calling is not supported"),
        ([{"role": "king", "content": "x"}], "messages[0].role", "must be one of system, developer, user, assistant"),
        ([{"role": "user"}], "messages", "messages[0] has no content"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content", "string or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content", "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "string in text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content", "type 'text'"),
        ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood", "unknown field"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "messages[0].tool_calls", "not supported"),
        ([{"content": "x"}], "messages[0].role", "messages[0].role is missing"),
    ],
)
def test_wrong_messages_are_named(messages, param, words):
    error = refused(chat, messages=messages)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"echo": True, "logprobs": 1}, "echo", "not supported yet"),
        ({"messages": USER}, "messages", "unknown field"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "did you mean"),
    ],
)
def test_wrong_completions_are_named(fields, param, words):
    error = refused(completion, **fields)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "not valid"),
        (b'{"model": "\\ud800"}', "Unicode"),
        (b'{"model": "m", "temperature": NaN}', "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_bodies(body, words):
    assert words in refused(parse_chat, body).message


def test_surrogate_pairs_are_fine():
    request = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}')
    assert request.messages[0].content == "😀"


def test_large_values_are_not_shown_back():
    assert len(refused(chat, temperature="x" * 10_000).message) < 200
    assert len(refused(chat, **{"x" * 10_000: 1}).message) < 200
    assert "more)" in refused(chat, temperature="a", top_p="b", top_k="c").message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["model", "prompt", "messages", "stop", "temperature", "n", "stream_options", "tools", "zz"])


@given(st.dictionaries(names, json_values, max_size=5))
def test_any_json_is_a_request_or_a_400(fields):
    body = json.dumps(fields).encode()
    for parse in (parse_chat, parse_completion):
        error = None
        try:
            parse(body)
        except APIError as caught:
            error = caught
        assert error is None or (error.status, "\n" in error.message) == (400, False)


# Limits of the model


def test_prompt_and_output_must_fit():
    assert params(chat(max_tokens=90), prompt_len=10).max_tokens == 90
    assert params(chat(max_completion_tokens=7)).max_tokens == 7
    error = refused(params, chat(max_tokens=91), prompt_len=10)
    assert error.code == "context_length_exceeded"
    assert error.param == "messages"
    assert "10 tokens" in error.message
    assert "max_tokens 91" in error.message
    assert "100" in error.message
    error = refused(params, completion(), prompt_len=100)
    assert error.code == "context_length_exceeded"
    assert "at least one token" in error.message
    assert "no tokens" in refused(params, completion(), prompt_len=0).message


def test_completion_default_shrinks_to_what_is_left():
    assert params(completion(), prompt_len=95).max_tokens == 5


@pytest.mark.parametrize(
    ("field", "value", "range_"),
    [
        ("temperature", -1.0, "[0, 100]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("top_k", -2, "[-1, 2147483647]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("repetition_penalty", 0.0, "[0.01, 100]"),
        ("repetition_penalty", -1.0, "[0.01, 100]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -3.0, "[-2, 2]"),
    ],
)
def test_ranges_of_the_engine(field, value, range_):
    for request in (chat(**{field: value}), completion(**{field: value})):
        error = refused(params, request)
        assert error.param == field
        assert error.message == f"{field} is {value}, must be in {range_}"


def test_token_ids_out_of_the_vocabulary():
    check_token_ids([0, 99], 100, "prompt")
    error = refused(check_token_ids, [1, 100, -5], 100, "prompt")
    assert "100, -5" in error.message
    assert "[0, 99]" in error.message
    assert refused(params, chat(stop_token_ids=[100]), vocab_size=100).param == "stop_token_ids"
    assert len(refused(check_token_ids, [10**50] * 50, 100, "prompt").message) < 250
