"""The few numbers a model needs, read from config.json or from GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError, EngineConfig
from engine.rope_scaling import frequency_factors

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GGUF_FLOAT_TYPES = {0: "float32", 1: "float16"}  # general.file_type; all others run in bfloat16


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one checkpoint."""

    architecture: str  # Hugging Face class name, e.g. LlamaForCausalLM
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None  # divisors of the rotation frequencies, see engine.rope_scaling
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # of the checkpoint, a torch dtype's name

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_kv_heads}, must divide the {self.num_heads} attention heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even: rotary embeddings turn pairs")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read a model directory (config.json, generation_config.json) or a .gguf file.

        Raises ValueError with one line: no or bad config.json, a missing key, an architecture, RoPE type, activation
        or quantisation that is not supported.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return cls.from_gguf(path)
        config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        try:
            return cls._from_dict(config, _read_json(generation) if generation.exists() else {})
        except KeyError as error:
            raise ValueError(f"{path / 'config.json'} has no {error.args[0]}") from None
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from None

    @classmethod
    def _from_dict(cls, config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
        architecture = (config.get("architectures") or [config.get("model_type")])[0]
        _check_supported(str(architecture), config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        # transformers 5 writes rope_parameters with rope_theta inside, older versions rope_theta and rope_scaling
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        longest = config["max_position_embeddings"]
        scaling = {"original_max_position_embeddings": longest, **rope}
        return cls(
            architecture=str(architecture),
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=longest,
            rope_theta=theta,
            rope_factors=frequency_factors(scaling, theta, head_dim),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            eos_token_ids=tuple(dict.fromkeys([*_ids(generation), *_ids(config)])),
            bos_token_id=config.get("bos_token_id"),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelConfig:
        """Read the metadata of a .gguf file. Raises ValueError with one line."""
        from engine.gguf_file import GGUFFile

        file = GGUFFile(path)
        kind = file.metadata.get("general.architecture")
        if kind not in GGUF_ARCHITECTURES:
            known = ", ".join(GGUF_ARCHITECTURES)
            raise ValueError(f"{path}: architecture {kind} is not supported, known are {known}")
        prefix = f"{kind}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        try:
            hidden, heads = own["embedding_length"], own["attention.head_count"]
            head_dim = own.get("attention.key_length") or own.get("rope.dimension_count") or hidden // heads
            theta = float(own.get("rope.freq_base", 10000.0))
            scaling = {"rope_type": own.get("rope.scaling.type", "none"), "factor": own.get("rope.scaling.factor")}
            if scaling["rope_type"] == "none":
                scaling["rope_type"] = "default"
            if "rope_freqs.weight" in file.tensors:  # llama3's scaling, as the divisors themselves
                factors: tuple[float, ...] | None = tuple(file.read("rope_freqs.weight").tolist())
            else:
                factors = frequency_factors(scaling, theta, head_dim)
            ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
            return cls(
                architecture=GGUF_ARCHITECTURES[kind],
                hidden_size=hidden,
                num_layers=own["block_count"],
                num_heads=heads,
                num_kv_heads=own.get("attention.head_count_kv", heads),
                head_dim=head_dim,
                intermediate_size=own["feed_forward_length"],
                vocab_size=file.tensors["token_embd.weight"].shape[0],
                rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
                max_position_embeddings=own["context_length"],
                rope_theta=theta,
                rope_factors=factors,
                tie_word_embeddings="output.weight" not in file.tensors,
                attention_bias="blk.0.attn_q.bias" in file.tensors,
                eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
                bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
                dtype=GGUF_FLOAT_TYPES.get(file.metadata.get("general.file_type", -1), "bfloat16"),
            )
        except KeyError as error:
            raise ValueError(f"{path} has no {error.args[0]}") from None


def _check_supported(architecture: str, config: dict[str, Any]) -> None:
    from engine.models.registry import model_class

    model_class(architecture)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"quantization_config is {method!r}, quantised safetensors checkpoints are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}, must be 'silu'")
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true, sliding-window attention is not supported")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {config['partial_rotary_factor']}, must be 1.0")


def _ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, a model directory needs one") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def check_lengths(config: EngineConfig, longest: int) -> None:
    """Compare the lengths of a configuration with the model's longest sequence. Raises ConfigError."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"--max_model_len is {config.max_model_len}, must be at most {longest}, the model's longest")
    if not config.enable_chunked_prefill and (config.max_model_len or longest) > config.max_num_batched_tokens:
        raise ConfigError(
            f"--max_num_batched_tokens is {config.max_num_batched_tokens}, must be at least max_model_len "
            f"({config.max_model_len or longest}) while enable_chunked_prefill is off"
        )
