"""Chat messages: text of system, user and assistant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

ROLES = ("system", "developer", "user", "assistant")


def _role(value: Any) -> str:
    if value in ("tool", "function"):
        raise ValueError(f"tool calling is not supported yet, the role {value} cannot be used")
    if value not in ROLES:
        raise ValueError(f"role is {str(value)[:60]!r}, must be one of {', '.join(ROLES)}")
    return value


def _content(value: Any) -> str | None:
    """A string, or parts of type text, which are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts of type 'text'")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("a content part must be an object with type 'text' and a text")
        if kind != "text":
            raise ValueError(f"a content part has type {kind[:60]!r}, only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise ValueError("a content part of type 'text' must have a string in text")
        texts.append(part["text"])
    return "\n".join(texts)


def _nothing(value: Any) -> None:
    if value:
        raise ValueError("tool calls, audio, refusals and annotations are not supported, must be null")
    return None


Nothing = Annotated[None, BeforeValidator(_nothing)]


class ChatMessage(BaseModel):
    """One message. The fields of type Nothing are those that openai-python writes into the messages it got."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: Nothing = None

    def for_template(self) -> dict[str, Any]:
        """What chat templates read; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else message | {"name": self.name}


def _texts_present(messages: list[ChatMessage]) -> list[ChatMessage]:
    if not messages:
        raise ValueError("messages is empty, must hold at least one message")
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise ValueError(f"messages[{index}] has no content, must have a text")
    return messages


Messages = Annotated[list[ChatMessage], AfterValidator(_texts_present)]
