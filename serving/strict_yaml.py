"""YAML whose mappings must not repeat a key."""

from __future__ import annotations

from typing import Any

import yaml

from engine.config import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(text: str) -> dict[str, Any]:
    """A YAML mapping without repeated keys; nothing but comments is an empty one. Raises ConfigError."""
    try:
        document = yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"holds {type(document).__name__}, must be a mapping")
    return document
