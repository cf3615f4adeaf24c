"""Weights of a GGUF file under their Hugging Face names, dequantised tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.gguf_file import GGUFFile
from engine.model_config import ModelConfig

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NOT_WEIGHTS = ("rope_freqs.weight",)  # belongs to the configuration
THREADS = 2


def iterate(path: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Pairs of Hugging Face name and tensor, rows in Hugging Face's order. Raises ValueError with one line."""
    file = GGUFFile(path)
    names = [name for name in file.tensors if name not in NOT_WEIGHTS]

    def read(name: str) -> tuple[str, Tensor]:
        values = file.read(name, _row_order(name, config))
        if not values.flags.writeable:  # unquantised: still the file's map, which torch warns of
            values = values.copy()
        return hf_name(name), torch.from_numpy(values).to(dtype)

    with ThreadPoolExecutor(THREADS) as pool:
        # A few tensors ahead, not all: what is decoded and not yet loaded lies in memory twice.
        pending = [pool.submit(read, name) for name in names[: 2 * THREADS]]
        for name in names[2 * THREADS :]:
            yield pending.pop(0).result()
            pending.append(pool.submit(read, name))
        for future in pending:
            yield future.result()


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{LAYER.get(part, part)}.{kind}"
    return name


def _row_order(name: str, config: ModelConfig) -> np.ndarray | None:
    """llama.cpp interleaves the two halves of each llama query and key head; this undoes it."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2], 0)
    if not heads or config.architecture != "LlamaForCausalLM":
        return None
    return np.arange(heads * config.head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
