"""Whole responses in OpenAI's shape, as dicts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any


def new_chat_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def new_completion_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """cached_tokens: those of the prompt that were found in the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_choice(
    text: str, finish_reason: str, *, index: int = 0, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """finish_reason: 'stop' or 'length'. logprobs: of logprobs.chat_logprobs."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def completion_choice(
    text: str, finish_reason: str, *, index: int = 0, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """finish_reason: 'stop' or 'length'. logprobs: of logprobs.completion_logprobs."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def token_choice(token_ids: list[int], finish_reason: str, *, index: int = 0) -> dict[str, Any]:
    """A completion's choice where there is no tokenizer; token_ids is vLLM's addition."""
    return {**completion_choice("", finish_reason, index=index), "token_ids": token_ids}


def chat_completion(
    id: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """created: seconds since the epoch."""
    return _response(id, "chat.completion", created, model, choices, usage)


def text_completion(
    id: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """created: seconds since the epoch."""
    return _response(id, "text_completion", created, model, choices, usage)


def model_list(names: Sequence[str], created: int, max_model_len: int, owned_by: str = "ferry") -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [model_card(name, created, max_model_len, owned_by) for name in names]}


def model_card(name: str, created: int, max_model_len: int, owned_by: str = "ferry") -> dict[str, Any]:
    """GET /v1/models/{name}; max_model_len is vLLM's addition, in tokens."""
    return {"id": name, "object": "model", "created": created, "owned_by": owned_by, "max_model_len": max_model_len}


def _response(
    id: str, kind: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "choices": list(choices),
        "usage": usage,
    }
