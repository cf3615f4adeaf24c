"""Tiny random checkpoints with a tokenizer, made with transformers: what the tests serve, and the oracle's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, IM_START, IM_END = "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [EOS, BOS, IM_START, IM_END]  # ids 0 to 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "a request moves while it runs", "hello world, hello ferry"]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,  # large enough that greedy decoding has clear winners
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: all 256 bytes, a few merges, four special tokens. The same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_tokenizer(path: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the vocabulary's size."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": EOS,
        "model_max_length": SMALL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer.get_vocab_size()


def make_llama(path: Path | str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A random Llama checkpoint in `path`; `overrides` are fields of transformers' LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _make(Path(path), LlamaConfig, LlamaForCausalLM, seed, dtype, overrides)


def make_qwen3(path: Path | str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A random Qwen3 checkpoint in `path`; `overrides` are fields of transformers' Qwen3Config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _make(Path(path), Qwen3Config, Qwen3ForCausalLM, seed, dtype, overrides)


def _make(path: Path, config_class: Any, model_class: Any, seed: int, dtype: torch.dtype, overrides: dict) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(path)
    config = config_class(**{**SMALL, "vocab_size": vocab_size, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms are all ones and biases all zeros otherwise, which hides mix-ups
                parameter.data.normal_(0.0 if name.endswith("bias") else 1.0, 0.1)
    model.to(dtype).save_pretrained(path)
    return path
