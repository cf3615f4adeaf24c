"""Fields of OpenAI's (and vLLM's) requests that the protocol knows by name but does not act on.

A field that would change the answer is refused with a sentence, unless it has the value that asks for nothing; one
that cannot change the answer is accepted without effect. Anything else is an unknown field.
"""

from __future__ import annotations

from typing import Any

from serving.openai.errors import APIError, bad_request, shown

ACCEPTED_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # says how tools would be called; tools themselves are refused
    }
)

# field -> (values that ask for nothing, what to say otherwise); null always asks for nothing
_TOOLS = "tool calling is not supported yet"
_FORM = "structured output is not supported yet"
REFUSED: dict[str, tuple[list[Any], str]] = {
    "tools": ([[]], _TOOLS),
    "tool_choice": (["none"], f"{_TOOLS}, only 'none' is accepted"),
    "functions": ([[]], _TOOLS),
    "function_call": (["none"], f"{_TOOLS}, only 'none' is accepted"),
    "response_format": ([{"type": "text"}], f"{_FORM}, only type 'text' is accepted"),
    "structured_outputs": ([], _FORM),
    "logit_bias": ([{}], "token biases are not supported yet"),
    "length_penalty": ([1], "beam search is not supported, only 1 is accepted"),
    "use_beam_search": ([False], "beam search is not supported"),
    "best_of": ([1], "choosing among several completions is not supported, only 1 is accepted"),
    "min_tokens": ([0], "min_tokens is not supported yet, only 0 is accepted"),
    "bad_words": ([[]], "bad_words is not supported yet"),
    "prompt_logprobs": ([], "logprobs of the prompt are not supported yet"),
    "suffix": ([""], "inserting text before a suffix is not supported"),
    "store": ([False], "completions are not stored, only false is accepted"),
    "audio": ([], "audio output is not supported"),
    "modalities": ([["text"]], "only ['text'] is supported"),
    "prediction": ([], "predicted output is not supported"),
    "web_search_options": ([], "web search is not supported"),
    "reasoning_effort": (["none"], "reasoning effort is not supported"),
    "chat_template": ([], "the chat template is the server's and cannot be replaced by a request"),
}


def drop_known(data: dict[str, Any]) -> dict[str, Any]:
    """The fields left after those accepted without effect are taken out.

    Raises APIError 400 naming a field that asks for what is not supported.
    """
    kept = {}
    for name, value in data.items():
        if name in ACCEPTED_WITHOUT_EFFECT:
            continue
        if name.startswith("guided_") and value is not None:
            raise refusal(name, value, _FORM)
        if name in REFUSED:
            neutral, sentence = REFUSED[name]
            if value is not None and not any(value == other for other in neutral):
                raise refusal(name, value, sentence)
        elif not name.startswith("guided_"):
            kept[name] = value
    return kept


def refusal(name: str, value: Any, sentence: str) -> APIError:
    detail = "" if isinstance(value, dict | list) else f" is {shown(value)}"
    return bad_request(f"{name}{detail}: {sentence}", name, "unsupported_parameter")
