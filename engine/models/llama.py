"""Llama: pre-norm decoder with grouped-query attention, rotary positions and a gated feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.attention import Attention
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, MergedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.model_config import ModelConfig
from kernels import dispatch


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        shards = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, shards, config.attention_bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, config.attention_bias)
        self.attention = Attention(layer, config.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split_heads(self.qkv_proj(x))
        return self.o_proj(self.attention(q, k, v, cos, sin).flatten(1))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, q_size + 2 kv_size] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        q, k, v = qkv.unflatten(1, (-1, self.head_dim)).split([n // self.head_dim for n in self.sizes], 1)
        return q, k, v

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.q_size, self.kv_size, self.kv_size


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, attention: type[nn.Module]):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, float32, is added inside the next norm, so a layer returns it beside its output."""
        if residual is None:
            x, residual = self.input_layernorm(x), x.float()
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos, sin)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, attention: type[nn.Module]):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, attention) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_factors
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary_emb(positions)
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        assert residual is not None
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    attention: type[nn.Module] = LlamaAttention

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.model = Decoder(config, self.attention)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tied = config.tie_word_embeddings
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """ids and positions int64 [T] -> hidden states [T, hidden_size]; attention reads `engine.context`."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size], in the model's dtype: only rows that are not greedy need floats."""
        return self.lm_head(hidden)

    def greedy_tokens(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """The likeliest token of each row, int64 [S]; below 0 where the logits are no finite numbers.

        Rounding to bfloat16 makes the best logits equal now and then; a tied head has its plain weights at hand to
        tell them apart.
        """
        embedding = self.model.embed_tokens.weight
        if self.tied and embedding.dtype == logits.dtype:
            return dispatch.head_argmax(logits, hidden, embedding)
        return dispatch.argmax(logits)
