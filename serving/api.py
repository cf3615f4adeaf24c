"""The two completion endpoints, apart from HTTP: bytes of a request in, a whole response or its event stream out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.step import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from serving.engine_client import EngineClient
from serving.generation import Delta, Sequence, make_sequence, run_all
from serving.ingress_metrics import IngressMetrics
from serving.openai import responses
from serving.openai.errors import bad_request, not_found_model, unavailable
from serving.openai.logprobs import chat_logprobs, completion_logprobs
from serving.openai.protocol import (
    ChatCompletionRequest,
    CommonRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from serving.openai.sampling import check_token_ids, to_sampling_params
from serving.openai.streaming import ChatStream, CompletionStream

P = TypeVar("P")

OFF_LOOP_BYTES = 20_000
"""Larger bodies become token ids in a thread, so that they do not hold up other requests' tokens."""


@dataclass
class Answer:
    """`whole` is for plain requests; `stream` is set for streaming ones: encoded events without the closing [DONE]."""

    whole: Callable[[], Awaitable[dict[str, Any]]]
    stream: Callable[[], AsyncGenerator[bytes, None]] | None


@dataclass
class Choice:
    """A choice of a plain response while it gathers."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.cached_tokens = delta.cached_tokens


class Api:
    """One served model."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, client: EngineClient, metrics: IngressMetrics
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics

    @property
    def max_model_len(self) -> int:
        return self.client.max_model_len or self.config.max_model_len or 0

    def check_model(self, name: str) -> None:
        """Raises APIError 404 for a model that is not served."""
        if name not in self.config.served_model_name:
            raise not_found_model(name, list(self.config.served_model_name))

    async def chat(self, body: bytes, priority: int | None = None) -> Answer:
        """/v1/chat/completions; `priority` is the header's. Raises APIError before anything is queued."""
        request, prompt = await _prepared(self._prepare_chat, body)
        _set_priority(request, priority)
        await self._ready()
        request_id = responses.new_chat_id()
        return self._answer(request, request_id, self._sequences(request, request_id, [prompt]), chat=True)

    async def completion(self, body: bytes, priority: int | None = None) -> Answer:
        """/v1/completions: one choice for each prompt."""
        request, prompts = await _prepared(self._prepare_completion, body)
        _set_priority(request, priority)
        await self._ready()
        request_id = responses.new_completion_id()
        return self._answer(request, request_id, self._sequences(request, request_id, prompts), chat=False)

    # -- from bytes to token ids, perhaps in a thread: nothing here touches what the loop owns ------------------

    def _prepare_chat(self, body: bytes) -> tuple[ChatCompletionRequest, list[int]]:
        request = parse_chat(body)
        self._check(request)
        return request, self._chat_prompt(request)

    def _prepare_completion(self, body: bytes) -> tuple[CompletionRequest, list[list[int]]]:
        request = parse_completion(body)
        self._check(request)
        return request, [self._completion_prompt(request, prompt) for prompt in request.prompt]

    def _check(self, request: CommonRequest) -> None:
        self.check_model(request.model)
        if self.tokenizer is None:
            _check_ids_only(request)

    def _chat_prompt(self, request: ChatCompletionRequest) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise bad_request("chat needs a tokenizer, and skip_tokenizer_init is set; use /v1/completions", "messages")
        messages = request.template_messages()
        try:
            text = tokenizer.render_chat(messages, request.add_generation_prompt, **request.chat_template_kwargs)
            return self._encode(tokenizer, text, request.add_special_tokens, "messages")
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def _completion_prompt(self, request: CompletionRequest, prompt: str | list[int]) -> list[int]:
        tokenizer = self.tokenizer
        if not isinstance(prompt, str):
            if tokenizer is not None:
                check_token_ids(prompt, tokenizer.vocab_size, "prompt")
            return prompt
        if tokenizer is None:
            raise bad_request("prompt is text, must be token ids: skip_tokenizer_init is set", "prompt")
        try:
            return self._encode(tokenizer, prompt, request.add_special_tokens, "prompt")
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    def _encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids. A text that no tokens of the model's length could hold is refused before it costs seconds."""
        limit = self.max_model_len * tokenizer.longest_token
        if limit and len(text) > limit:
            message = f"the prompt has {len(text)} characters: more than {self.max_model_len} tokens can hold"
            raise bad_request(message, param, "context_length_exceeded")
        return tokenizer.encode(text, add_special_tokens)

    # -- before the engine --------------------------------------------------------------------------------------

    async def _ready(self) -> None:
        reason = "" if self.client.ready else await self.client.wait_ready()
        if reason:
            raise unavailable(reason, 2.0)

    def _sequences(self, request: CommonRequest, request_id: str, prompts: list[list[int]]) -> list[Sequence]:
        vocab_size = self.tokenizer.vocab_size if self.tokenizer is not None else None
        sequences = []
        for index, prompt in enumerate(prompts):
            params = to_sampling_params(
                request,
                defaults={},
                max_model_len=self.max_model_len,
                prompt_len=len(prompt),
                vocab_size=vocab_size,
            )
            sequences.append(make_sequence(request, request_id, index, prompt, params, self.tokenizer))
        return sequences

    # -- after the engine ---------------------------------------------------------------------------------------

    def _answer(self, request: CommonRequest, request_id: str, sequences: list[Sequence], chat: bool) -> Answer:
        created = int(time.time())

        async def whole() -> dict[str, Any]:
            return await self._whole(request, sequences, request_id, created, chat)

        def stream() -> AsyncGenerator[bytes, None]:
            return self._stream(request, sequences, request_id, created, chat)

        return Answer(whole, stream if request.stream else None)

    async def _whole(
        self, request: CommonRequest, sequences: list[Sequence], request_id: str, created: int, chat: bool
    ) -> dict[str, Any]:
        gathered = [Choice() for _ in sequences]
        async with aclosing(run_all(self.client, sequences, self.metrics)) as deltas:
            async for delta in deltas:
                gathered[delta.index].add(delta)
        choices = [
            self._choice(request, sequence, choice, chat) for sequence, choice in zip(sequences, gathered, strict=True)
        ]
        usage = responses.usage(
            sum(len(sequence.prompt) for sequence in sequences),
            sum(len(choice.token_ids) for choice in gathered),
            sum(choice.cached_tokens for choice in gathered),
        )
        finish = responses.chat_completion if chat else responses.text_completion
        return finish(request_id, created, request.model, choices, usage)

    def _choice(self, request: CommonRequest, sequence: Sequence, choice: Choice, chat: bool) -> dict[str, Any]:
        if self.tokenizer is None:
            return responses.token_choice(choice.token_ids, choice.finish_reason, index=sequence.index)
        make = responses.chat_choice if chat else responses.completion_choice
        return make(
            self._echo(request, sequence) + choice.text,
            choice.finish_reason,
            index=sequence.index,
            logprobs=self._logprobs(request, choice.token_ids, choice.logprobs, choice.offsets, chat),
        )

    async def _stream(
        self, request: CommonRequest, sequences: list[Sequence], request_id: str, created: int, chat: bool
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events. The first one comes with the first token: before it an error is still an HTTP status."""
        kind = ChatStream if chat else CompletionStream
        events = kind(request_id, created, request.model, include_usage=request.include_usage)
        prompt_tokens = sum(len(sequence.prompt) for sequence in sequences)
        cached = dict.fromkeys(range(len(sequences)), 0)
        completion_tokens = 0
        opened: set[int] = set()
        async with aclosing(run_all(self.client, sequences, self.metrics)) as deltas:
            async for delta in deltas:
                completion_tokens += len(delta.token_ids)
                cached[delta.index] = delta.cached_tokens
                usage = None
                if request.continuous_usage:
                    usage = responses.usage(prompt_tokens, completion_tokens, sum(cached.values()))
                if self.tokenizer is None and isinstance(events, CompletionStream):
                    yield events.ids(delta.token_ids, delta.finish_reason, index=delta.index, usage=usage)
                    continue
                event = b""
                text = delta.text
                if delta.index not in opened:
                    opened.add(delta.index)
                    if isinstance(events, ChatStream):
                        event += events.first(delta.index, usage)
                    text = self._echo(request, sequences[delta.index]) + text
                logprobs = self._logprobs(request, delta.token_ids, delta.logprobs, delta.offsets, chat)
                if text or logprobs is not None or delta.finish_reason is not None:
                    event += events.delta(text, delta.finish_reason, index=delta.index, logprobs=logprobs, usage=usage)
                if event:
                    yield event
        if request.include_usage:
            yield events.usage(responses.usage(prompt_tokens, completion_tokens, sum(cached.values())))

    def _logprobs(
        self,
        request: CommonRequest,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        offsets: list[int],
        chat: bool,
    ) -> dict[str, Any] | None:
        if request.alternatives() is None or self.tokenizer is None or not token_ids:
            return None
        if chat:
            return chat_logprobs(self.tokenizer, token_ids, logprobs)
        return completion_logprobs(self.tokenizer, token_ids, logprobs, offsets)

    def _echo(self, request: CommonRequest, sequence: Sequence) -> str:
        """The prompt's text, for completions that ask for it."""
        if not isinstance(request, CompletionRequest) or not request.echo or self.tokenizer is None:
            return ""
        prompt = request.prompt[sequence.index]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)


async def _prepared(prepare: Callable[[bytes], P], body: bytes) -> P:
    return prepare(body) if len(body) < OFF_LOOP_BYTES else await asyncio.to_thread(prepare, body)


def _set_priority(request: CommonRequest, header: int | None) -> None:
    """Body and header may both say it. Raises APIError 400 if they differ."""
    if header is None:
        return
    if "priority" in request.model_fields_set and request.priority != header:
        raise bad_request(f"priority is {request.priority} and X-Priority is {header}, give one of them", "priority")
    request.priority = header


def _check_ids_only(request: CommonRequest) -> None:
    """Without a tokenizer there are only ids. Raises APIError 400 for what needs text."""
    if request.stop:
        raise bad_request("stop strings need a tokenizer, and skip_tokenizer_init is set", "stop")
    if request.alternatives() is not None:
        raise bad_request("logprobs need a tokenizer, and skip_tokenizer_init is set", "logprobs")
    if isinstance(request, CompletionRequest) and request.echo:
        raise bad_request("echo needs a tokenizer, and skip_tokenizer_init is set", "echo")
