"""Reading a Serve configuration file strictly.

Serve accepts unknown keys at every level without a word; here each is an error that names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.options.resolution import nearest, normalize
from serving.rescheduling import parse_user_config
from serving.strict_yaml import load_mapping

APP_NAME = "llm"
IMPORT_PATH = "serving.app:build"
LOCAL_TOP = ("proxy_location", "http_options", "logging_config", "applications")
LOCAL_HTTP = ("host", "port", "request_timeout_s", "keep_alive_timeout_s")
LOCAL_APP = ("name", "route_prefix", "import_path", "args")


@dataclass(frozen=True)
class ConfigFile:
    """The parts of a configuration file that a local start uses."""

    path: str
    args: dict[str, Any] = field(default_factory=dict)
    http_options: dict[str, Any] = field(default_factory=dict)
    logging_config: dict[str, Any] | None = None
    proxy_location: str = "HeadOnly"


def read_config_file(path: str | Path) -> ConfigFile:
    """Read, lint and reduce a file to what `ferry serve` applies. Raises ConfigError with one line."""
    try:
        document = load_yaml(Path(path).read_text(encoding="utf-8"))
        lint(document)
        return _local(str(path), document)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_yaml(text: str) -> dict[str, Any]:
    document = load_mapping(text)
    if not document:
        raise ConfigError("must be a mapping with the key applications")
    return document


def lint(document: dict[str, Any]) -> None:
    """Check every level of a Serve configuration: keys, types, and the arguments of our application."""
    from ray.serve import schema

    _keys("", document, schema.ServeDeploySchema.model_fields)
    _keys("http_options", document.get("http_options"), schema.HTTPOptionsSchema.model_fields)
    _keys("grpc_options", document.get("grpc_options"), schema.gRPCOptionsSchema.model_fields)
    _keys("logging_config", document.get("logging_config"), schema.LoggingConfig.model_fields)
    applications = document.get("applications")
    if not isinstance(applications, list) or not applications:
        raise ConfigError(f"applications is {applications!r}, must be a list with one application")
    for index, application in enumerate(applications):
        where = f"applications[{index}]"
        if not isinstance(application, dict):
            raise ConfigError(f"{where} is {application!r}, must be a mapping")
        _keys(where, application, schema.ServeApplicationSchema.model_fields)
        for number, deployment in enumerate(application.get("deployments") or []):
            _keys(f"{where}.deployments[{number}]", deployment, schema.DeploymentSchema.model_fields)
            if application.get("import_path") == IMPORT_PATH and deployment.get("name") == "Manager":
                parse_user_config(deployment.get("user_config") or {})
        if application.get("import_path") == IMPORT_PATH:
            _arguments(f"{where}.args", application.get("args"))
    _types(document, schema.ServeDeploySchema)


def _keys(where: str, mapping: Any, known: Iterable[str]) -> None:
    if mapping is None:
        return
    if not isinstance(mapping, dict):
        raise ConfigError(f"{where} is {mapping!r}, must be a mapping")
    for key in mapping:
        if key not in known:
            place = f" in {where}" if where else " at the top level"
            raise ConfigError(f"{key!r} is not a known key{place}{nearest(str(key), known)}")


def _arguments(where: str, args: Any) -> None:
    if not isinstance(args, dict):
        raise ConfigError(f"{where} is {args!r}, must be a mapping of parameter names to values")
    for key in ("host", "port"):
        if key in args:
            raise ConfigError(f"{where}.{key}: the HTTP address belongs to http_options.{key}")
    normalize(args)


def _types(document: dict[str, Any], schema: Any) -> None:
    from pydantic import ValidationError

    try:
        schema.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place}: {first['msg']}") from None


def _local(path: str, document: dict[str, Any]) -> ConfigFile:
    applications = document["applications"]
    if len(applications) != 1:
        raise ConfigError(f"applications has {len(applications)} entries, a local start takes one")
    application = applications[0]
    http_options = document.get("http_options") or {}
    _applied("", document, LOCAL_TOP)
    _applied("http_options.", http_options, LOCAL_HTTP)
    _applied("applications[0].", application, LOCAL_APP)
    for key, expected in (("name", APP_NAME), ("route_prefix", "/"), ("import_path", IMPORT_PATH)):
        if application.get(key, expected) != expected:
            raise ConfigError(f"applications[0].{key} is {application[key]!r}, must be {expected!r} for a local start")
    return ConfigFile(
        path,
        dict(application.get("args") or {}),
        dict(http_options),
        document.get("logging_config"),
        document.get("proxy_location") or "HeadOnly",
    )


def _applied(where: str, mapping: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in mapping:
        if key not in keys:
            raise ConfigError(f"{where}{key}: a local start does not apply it, use `serve deploy` on a cluster")
