"""A GGUF model as a folder of bfloat16 safetensors, for engines that do not read GGUF. Made once, kept in build/."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.loader import gguf
from engine.model_config import ModelConfig
from engine.source import resolve_model
from engine.text.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "build" / "models"
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


def bf16_folder(model: str, below: Path = FOLDER) -> Path:
    """The folder of a model: its own where it is one. Raises ValueError with one line."""
    source = resolve_model(model)
    if source.is_dir():
        return source
    target = below / f"{source.stem}-bf16"
    if not target.is_dir():
        below.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=below))
        try:
            write(source, made)
            made.rename(target)  # whole or not there
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def write(source: Path, target: Path) -> None:
    """config.json, weights and tokenizer of a .gguf file. Raises ValueError for RoPE scaling, which GGUF has as
    factors and config.json as a rule."""
    config = ModelConfig.from_gguf(source)
    if config.rope_factors is not None:
        raise ValueError(f"{source} scales its RoPE frequencies, must be a model that does not, or a folder")
    (target / "config.json").write_text(json.dumps(to_dict(config), indent=1))
    weights = {name: tensor.contiguous() for name, tensor in gguf.iterate(source, config, torch.bfloat16)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(source)
    tokenizer.backend.save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (target / "tokenizer_config.json").write_text(json.dumps(about | tokenizer.special_tokens, indent=1))


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """As transformers writes it."""
    return {
        "architectures": [config.architecture],
        "model_type": MODEL_TYPES[config.architecture],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
    }
