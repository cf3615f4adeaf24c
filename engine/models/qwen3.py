"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig
from engine.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().split_heads(qkv)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention = Qwen3Attention
