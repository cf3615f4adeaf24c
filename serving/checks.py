"""What is checked before anything starts, without reading weights; and the explanation of a plan."""

from __future__ import annotations

import importlib.metadata
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ConfigError, EngineConfig, dtype_name
from serving.plan import Plan, changed_fields

if TYPE_CHECKING:
    from engine.model_config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Model:
    """A model found on this machine."""

    path: Path
    config: ModelConfig
    max_model_len: int
    dtype: str


def check_environment() -> None:
    """A distribution that replaces our package `kernels` breaks imports in both directions."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"the distribution kernels {version} is installed and hides the package kernels of ferry-serve; "
        "remove it: pip uninstall -y kernels (then reinstall ferry-serve)"
    )


def check_plan(plan: Plan, weights: bool = True) -> Model:
    """Find the model, with its weights or without, and compare the configuration with it.

    Raises ConfigError with one line.
    """
    from engine.model_config import ModelConfig, check_lengths
    from engine.source import resolve_model

    config = plan.config
    try:
        path = Path(resolve_model(config.model, weights))
        model = ModelConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise ConfigError(_about_model(config.model, error)) from error
    if not config.skip_tokenizer_init and path.is_dir() and not any((path / f).exists() for f in TOKENIZER_FILES):
        raise ConfigError(f"--model {config.model}: no tokenizer in {path}, set skip_tokenizer_init to do without one")
    longest = model.max_position_embeddings
    check_lengths(config, longest)
    return Model(path, model, config.max_model_len or longest, dtype_name(config.dtype, model.dtype))


def _about_model(name: str, error: Exception) -> str:
    message = str(error)
    return f"--{message}" if message.startswith(f"model {name} ") else f"--model {name}: {message}"


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when the address cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"--port {port} on {host} cannot be used: {error.strerror or error}") from None


def explain(plan: Plan, model: Model) -> str:
    """The resolved plan as text: what was given and from where, then what follows from the model."""
    lines = ["Given:"]
    lines += [f"  {name:<28} {_show(value):<24} {source}" for name, value, source in changed_fields(plan)]
    lines += ["Resolved:"]
    lines += [f"  {name:<28} {value}" for name, value in _resolved(plan, model)]
    return "\n".join(lines) + "\n"


def _resolved(plan: Plan, model: Model) -> list[tuple[str, str]]:
    import torch

    from engine.kv_cache import KVFormat
    from engine.memory import activation_bytes, plan_memory

    config, shape = plan.config, model.config
    dtype = getattr(torch, model.dtype)
    fmt = KVFormat(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, dtype)
    step = activation_bytes(
        *(shape.hidden_size, shape.intermediate_size, shape.vocab_size),
        *(config.max_num_batched_tokens, config.max_num_seqs),
    )
    here = config.most_replicas  # no more is known of the nodes before the start
    memory = plan_memory(config, fmt, shape.max_position_embeddings, weight_file_bytes(model.path), step, here)
    kv_bytes = memory.num_blocks * fmt.block_bytes
    return [
        ("model files", str(model.path)),
        ("architecture", shape.architecture),
        ("dtype", model.dtype),
        ("max_model_len", str(memory.max_model_len)),
        ("block_size", str(config.block_size)),
        ("tokens in one step", str(config.max_num_batched_tokens)),
        ("sequences in one step", str(config.max_num_seqs)),
        ("engines", engines_text(config)),
        ("KV cache of one engine", f"{kv_bytes} bytes, {memory.num_blocks} blocks ({memory.reason})"),
        ("host slots for swapped KV", str(memory.host_slots)),
        ("address", f"http://{config.host}:{config.port}"),
    ]


def engines_text(config: EngineConfig) -> str:
    """How many engines there are to be: "2", or "0 to 4"."""
    return (
        str(config.num_replicas) if config.max_replicas is None else f"{config.min_replicas} to {config.max_replicas}"
    )


def weight_file_bytes(path: Path) -> int:
    """Size of the weight files, which bounds what the weights will take."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _show(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
