"""From a request to what the engine runs: limits against the model's length and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.sampling.params import SamplingParams
from serving.openai.errors import bad_request
from serving.openai.protocol import ChatCompletionRequest, CommonRequest

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions
WITH_SERVER_DEFAULT = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def to_sampling_params(
    request: CommonRequest,
    *,
    defaults: Mapping[str, Any],
    max_model_len: int,
    prompt_len: int,
    vocab_size: int | None = None,
) -> SamplingParams:
    """The engine's parameters. `defaults`: fields of WITH_SERVER_DEFAULT where the request is silent.

    Raises APIError 400 naming the field, its value and the range; code context_length_exceeded when prompt and
    output do not fit in max_model_len tokens.
    """
    if vocab_size is not None:
        check_token_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    given = {name: getattr(request, name) for name in WITH_SERVER_DEFAULT if getattr(request, name) is not None}
    try:
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_output_tokens(request, max_model_len, prompt_len),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            seed=request.seed,
            logprobs=request.alternatives(),
        )
    except ValueError as error:  # its message starts with the field
        raise bad_request(str(error), str(error).split(maxsplit=1)[0]) from error


def max_output_tokens(request: CommonRequest, max_model_len: int, prompt_len: int) -> int:
    """Tokens the output may have: what was asked for, or the default as far as it fits."""
    is_chat = isinstance(request, ChatCompletionRequest)
    param = "messages" if is_chat else "prompt"
    if prompt_len < 1:
        raise bad_request("the prompt has no tokens, must have at least 1", param)
    asked = request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        asked = request.max_completion_tokens
    left = max_model_len - prompt_len
    if left < max(asked or 1, 1):
        wanted = f"max_tokens {asked}" if asked is not None else "at least one token of output"
        message = f"the prompt has {prompt_len} tokens: with {wanted} it exceeds the model's limit of {max_model_len}"
        raise bad_request(message, param, "context_length_exceeded")
    return asked if asked is not None else left if is_chat else min(left, COMPLETION_MAX_TOKENS)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises APIError 400 naming the ids that are not in [0, vocab_size)."""
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        listed = ", ".join(str(token)[:20] for token in wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        message = f"{param} holds {listed}, token ids of this model must be in [0, {vocab_size - 1}]"
        raise bad_request(message, param)
