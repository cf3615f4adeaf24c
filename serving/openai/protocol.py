"""Requests of /v1/chat/completions and /v1/completions, checked before anything is queued.

Strict on purpose: an unknown field, "5" for 5 or a field whose feature is missing is a 400 that names the field.
A typing error that is silently ignored costs its author hours.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from serving.openai.errors import bad_request, from_validation, shown
from serving.openai.fields import drop_known
from serving.openai.messages import Messages

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 64
MOST_TOKENS = 2**31 - 1  # that can be asked for, however long the model's longest sequence is

_RESERVED_TEMPLATE_NAMES = ("messages", "add_generation_prompt")


def _stop(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("stop must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} strings, must have at most {MAX_STOPS}")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string is empty or too long, must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _distinct(ids: list[int]) -> list[int]:
    if len(ids) > MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids has {len(ids)} ids, must have at most {MAX_STOP_TOKENS}")
    return list(dict.fromkeys(ids))


def _prompt(value: Any) -> list[str | list[int]]:
    prompts = value if isinstance(value, list) and value and not _is_int(value[0]) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"prompt has {len(prompts)} prompts, must have at most {MAX_PROMPTS}")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_int, prompt))):
            raise ValueError("prompt must be a string, a list of token ids, or a list of either")
        if not prompt:
            raise ValueError("prompt is empty, must have at least one token")
    return prompts


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # needs include_usage: usage in every chunk


class CommonRequest(BaseModel):
    """What both kinds of request share. Null means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int = 1
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_token_ids: Annotated[list[int], AfterValidator(_distinct)] = []  # looked through for every token
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)

    @field_validator("n")
    @classmethod
    def _one_choice(cls, n: int) -> int:
        if n < 1:
            raise ValueError(f"n is {shown(n)}, must be 1")
        if n > 1:
            raise ValueError(f"n is {shown(n)}: more than one choice per prompt is not built yet, use n = 1")
        return n

    @model_validator(mode="after")
    def _options_of_streams(self) -> CommonRequest:
        if self.stream_options is not None:
            if not self.stream:
                raise ValueError("stream_options is set, must only be set with stream = true")
            if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
                raise ValueError("continuous_usage_stats is true, must only be set with include_usage = true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def alternatives(self) -> int | None:
        """Alternatives asked for beside each token's logprob; None: no logprobs."""
        raise NotImplementedError


class ChatCompletionRequest(CommonRequest):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # BOS before the rendered template, which as a rule writes its own
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in _RESERVED_TEMPLATE_NAMES:
            if name in kwargs:
                raise ValueError(f"chat_template_kwargs holds {name!r}, must be given as a field of the request")
        return kwargs

    @model_validator(mode="after")
    def _pairs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, must only be set with logprobs = true")
        limit, older = self.max_completion_tokens, self.max_tokens
        if limit is not None and older is not None and limit != older:
            raise ValueError(f"max_completion_tokens is {limit} but max_tokens is {older}, give one of them")
        return self

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


class CompletionRequest(CommonRequest):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt)]  # one entry a prompt, each its own choice
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False  # the prompt's text before the completion's
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _echo_without_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo is true: logprobs of the prompt are not supported yet, leave out echo or logprobs")
        return self

    def alternatives(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=CommonRequest)


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """The request in an HTTP body. Raises APIError 400 with one sentence that names the field."""
    return _parse(body, ChatCompletionRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in an HTTP body. Raises APIError 400 with one sentence that names the field."""
    return _parse(body, CompletionRequest)


def body_of(request: Any, **fields: Any) -> bytes:
    """The HTTP body that a Python handle's request, a dict, stands for; `fields` replace those it has.

    Raises APIError 400 naming a field that JSON cannot hold.
    """
    if not isinstance(request, dict):
        raise bad_request(f"the request is {shown(request)}, must be a dict of its fields")
    try:
        return json.dumps({**request, **fields}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        name = next((name for name, value in request.items() if not _is_json(name, value)), None)
        raise bad_request(f"{name} is {shown(request.get(name))}, must be a value of JSON", str(name)) from None


def _is_json(name: Any, value: Any) -> bool:
    try:
        return bool(json.dumps({name: value}, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return False


def _parse(body: bytes, kind: type[R]) -> R:
    data = drop_known(load_json(body))
    for name in data:
        if name not in kind.model_fields:
            close = difflib.get_close_matches(name, kind.model_fields, 1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise bad_request(f"unknown field {name[:60]!r}{hint}", name[:60], "unknown_parameter")
    try:
        # null means the default, except where the field has none
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise from_validation(error) from error


def load_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises APIError 400."""
    try:
        data = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:  # escapes are the one way to write half a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise bad_request(f"the request body is not valid JSON: {reason}") from error
    except UnicodeError as error:
        raise bad_request("the request body is not valid Unicode: it must be UTF-8 without lone surrogates") from error
    except (ValueError, RecursionError) as error:
        raise bad_request("the request body is not valid JSON: a number or the nesting is out of range") from error
    if not isinstance(data, dict):
        raise bad_request("the request body must be a JSON object")
    return data


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
