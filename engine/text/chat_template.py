"""Chat templates: jinja2 in the dialect of Hugging Face.

The same environment as transformers' own renderer (sandboxed, trim_blocks, lstrip_blocks, loop controls, tojson,
raise_exception, strftime_now, generation blocks), without the time its import takes.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    # jinja's own tojson escapes < > & ' for HTML, which no model was trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. Raises ValueError with one line when the source is not valid jinja2."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template does not compile: line {error.lineno}: {_line(error)}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt text. Raises ValueError with one line for whatever the template refuses or stumbles on."""
        try:
            return self._template.render(variables)
        except Exception as error:  # the template is foreign code: a TypeError in it is the request's fault, not ours
            raise ValueError(f"the chat template refused these messages: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
