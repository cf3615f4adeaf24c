"""From a checkpoint to a model ready to run.

The model is built on the meta device, then given memory that stays untouched until weights are copied in, so that
loading needs no second copy of them. (A tied head that is packed keeps one of its matrix.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedLinear
from engine.loader import dummy, gguf, safetensors
from engine.model_config import ModelConfig
from engine.models.registry import model_class
from engine.source import resolve_model

__all__ = ["load_model"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
IGNORED = "rotary_emb.inv_freq"  # old checkpoints store what is computed from the configuration
LISTED_KEYS = 5


@torch.inference_mode()
def load_model(
    path_or_name: str | Path,
    config: ModelConfig,
    *,
    load_format: str = "auto",
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """The model of `config` with its weights in `dtype`, ready to run.

    Raises ValueError with one line: an unknown load_format, no weights, missing or unexpected keys, a shape that
    does not fit. `seed` is that of dummy weights.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}, must be one of {', '.join(LOAD_FORMATS)}")
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    _materialise(model, dtype, device)
    if load_format == "dummy":
        dummy.fill(model, seed)
    else:
        path = path_or_name if isinstance(path_or_name, Path) else resolve_model(path_or_name)
        _load(model, _weights(path, config, load_format, dtype), path, tied=config.tie_word_embeddings)
    for module in model.modules():
        finish = getattr(module, "finish_loading", None)
        if finish is not None:
            finish()
    return model.eval()


def _materialise(model: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Give meta parameters memory, keeping their attributes and which modules share them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
                empty.__dict__.update(parameter.__dict__)
                made[id(parameter)] = empty
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _weights(path: Path, config: ModelConfig, load_format: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    if load_format == "gguf" or (load_format == "auto" and path.suffix == ".gguf"):
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a .gguf file, load_format gguf needs one")
        return gguf.iterate(path, config, dtype)
    if path.suffix == ".gguf":
        raise ValueError(f"{path} is a .gguf file, load_format must be gguf or auto")
    if not safetensors.files(path):
        raise ValueError(f"{path} has no .safetensors files")
    return safetensors.iterate(path)


def _load(model: nn.Module, weights: Iterator[tuple[str, Tensor]], path: Path, tied: bool) -> None:
    expected = _expected(model)
    missing = set(expected)
    unexpected = []
    for name, tensor in weights:
        if name in expected:
            parameter, shard = expected[name]
            try:
                _copy(parameter, tensor, shard)
            except RuntimeError:
                raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, which does not fit") from None
            missing.discard(name)
        elif not name.endswith(IGNORED) and not (tied and name == "lm_head.weight"):
            unexpected.append(name)
    for what, names in (("lacks", sorted(missing)), ("has unexpected", sorted(unexpected))):
        if names:
            rest = f" and {len(names) - LISTED_KEYS} more" if len(names) > LISTED_KEYS else ""
            raise ValueError(f"{path} {what} weights: {', '.join(names[:LISTED_KEYS])}{rest}")


def _expected(model: nn.Module) -> dict[str, tuple[nn.Parameter, str | None]]:
    """Checkpoint name -> parameter, and which shard of it where one parameter merges several projections."""
    expected: dict[str, tuple[nn.Parameter, str | None]] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                for shard in module.shards:
                    expected[f"{parent}.{shard}.{name}"] = (parameter, shard)
            elif not any(parameter is other for other, _ in expected.values()):  # a tied head comes with the embedding
                expected[f"{path}.{name}"] = (parameter, None)
    return expected


def _copy(parameter: nn.Parameter, tensor: Tensor, shard: str | None) -> None:
    loader = getattr(parameter, "weight_loader", None)
    if loader is not None:
        loader(parameter, tensor, shard)
    elif parameter.shape != tensor.shape:
        raise RuntimeError("shapes differ")
    else:
        parameter.copy_(tensor)
