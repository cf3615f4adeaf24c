"""Our models against transformers: the same logits from whole prompts, chunks, decodes and mixed batches."""

import random
import threading

import pytest
import torch

from engine.context import get_context, reset_context, set_context
from engine.loader import load_model
from engine.model_config import ModelConfig
from engine.models.registry import model_class
from engine.source import resolve_model
from tests.engine.paged import Paged
from tests.models import make_llama, make_qwen3

SHAPES = {
    "llama": (make_llama, {}),
    "llama-tied": (make_llama, {"tie_word_embeddings": True}),
    "llama-gqa7-wide-heads": (
        make_llama,
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "llama-no-gqa": (make_llama, {"num_key_value_heads": 4}),
    "llama-biases": (make_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-3": (
        make_llama,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": (make_llama, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "qwen3": (make_qwen3, {}),
    "qwen3-tied-gqa7": (
        make_qwen3,
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
}


def oracle(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def hf_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def random_prompts(count, vocab, seed=0, longest=60):
    rng = random.Random(seed)
    return {f"r{i}": [rng.randrange(vocab) for _ in range(rng.randint(2, longest))] for i in range(count)}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    make, overrides = SHAPES[request.param]
    path = make(tmp_path_factory.mktemp(request.param), **overrides)
    config = ModelConfig.from_pretrained(path)
    return load_model(path, config, dtype=torch.float32), config, oracle(path)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


def test_whole_prompts_in_one_batch(pair):
    model, config, theirs = pair
    prompts = random_prompts(6, config.vocab_size)
    logits = Paged(model, config, torch.float32).step(prompts)
    for name, ids in prompts.items():
        assert logits[name].dtype == torch.float32
        close(logits[name], hf_logits(theirs, ids))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_chunked_prefill_then_decodes_in_mixed_batches(pair, block_size):
    model, config, theirs = pair
    prompts = random_prompts(5, config.vocab_size, seed=1)
    paged = Paged(model, config, torch.float32, block_size, num_blocks=512)
    rng = random.Random(2)
    fed = dict.fromkeys(prompts, 0)
    got = {name: [] for name in prompts}
    while any(fed[name] < len(prompts[name]) for name in prompts):
        chunks = {}
        for name, ids in prompts.items():
            count = rng.choice([0, 1, 1, 2, 7, 16])
            if ids[fed[name] : fed[name] + count]:
                chunks[name] = ids[fed[name] : fed[name] + count]
                fed[name] += len(chunks[name])
        for name, logits in (paged.step(chunks) if chunks else {}).items():
            got[name].append(logits)
    for name, ids in prompts.items():
        close(torch.cat(got[name]), hf_logits(theirs, ids))


def test_greedy_decoding_matches_generate(pair):
    model, config, theirs = pair
    prompt = random_prompts(1, config.vocab_size, seed=3)["r0"]
    paged = Paged(model, config, torch.float32)
    ids = paged.greedy("a", prompt, 20)
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
    assert ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("make", [make_llama, make_qwen3])
def test_bf16_is_as_close_to_float32_as_transformers_is(make, tmp_path):
    path = make(tmp_path, hidden_size=128, num_hidden_layers=4, head_dim=32, tie_word_embeddings=True)
    config = ModelConfig.from_pretrained(path)
    model = load_model(path, config, dtype=torch.bfloat16)
    exact, theirs = oracle(path), oracle(path, torch.bfloat16)
    prompts = random_prompts(4, config.vocab_size)
    ours = Paged(model, config, torch.bfloat16).step(prompts)
    error, allowed = 0.0, 0.0
    for name, ids in prompts.items():
        truth = hf_logits(exact, ids)
        error += (ours[name] - truth).abs().mean().item()
        allowed += (hf_logits(theirs, ids) - truth).abs().mean().item()
    assert error < 1.25 * allowed


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ValueError, match=r"^architecture BertModel is not supported, known are Llama.*, Qwen3"):
        model_class("BertModel")


def test_contexts_of_threads_are_apart():
    set_context("ours", "kv")
    seen = []

    def other():
        with pytest.raises(RuntimeError, match="no step is running"):
            get_context()
        set_context("theirs", "kv")
        seen.append(get_context().metadata)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["theirs"]
    assert get_context().metadata == "ours"
    reset_context()
    with pytest.raises(RuntimeError):
        get_context()


@pytest.mark.slow
def test_smollm2_matches_transformers():
    from transformers import AutoModelForCausalLM

    path = resolve_model("demo:smollm2")
    config = ModelConfig.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for module in theirs.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5  # transformers does not read it from the file
    model = load_model(path, config, dtype=torch.float32)
    prompt = random.Random(0).sample(range(3, config.vocab_size), 40)
    paged = Paged(model, config, torch.float32)
    logits = paged.step({"a": prompt})["a"]
    torch.testing.assert_close(logits, hf_logits(theirs, prompt), rtol=1e-3, atol=5e-3)
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert paged.greedy("b", prompt, 24) == expected[0, len(prompt) :].tolist()
