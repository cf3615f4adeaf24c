"""The draft model's parameters: every model parameter of BladeLLM with the prefix `draft.`."""

from __future__ import annotations

from dataclasses import replace

from engine.options.decoding import DECODING, SPECULATION
from engine.options.models import MODELS
from engine.options.option import Option
from engine.options.quantization import QUANTIZATION

PREFIX = "draft."

MODEL_OPTIONS = (
    *("tokenizer_dir", "chat_template", "kv_cache_quant", "kv_cache_quant_sub_heads", "tokenizer_special_tokens"),
    *("enable_triton_mla", "disable_cuda_graph", "cuda_graph_max_batch_size", "cuda_graph_batch_sizes", "with_visual"),
    *("use_sps", "use_lookahead", "look_ahead_window_size", "look_ahead_gram_size", "guess_set_size"),
)


def _draft(name: str) -> Option:
    target = next(o for o in (*MODELS, *QUANTIZATION, *DECODING) if name in o.names)
    negations = tuple(PREFIX + n for n in target.negations)
    return replace(
        target, name=PREFIX + name, group="draft", feature=SPECULATION, aliases=(), negations=negations, short=()
    )


DRAFT = (
    Option("draft.model", "str", None, "draft model", "draft", feature=SPECULATION, aliases=("speculative_model",)),
    Option("draft.dtype", "str", "auto", "the draft model's precision", "draft", feature=SPECULATION, blade="half",
           choices=("auto", "half", "float16", "bfloat16", "float", "float32")),
    *(_draft(name) for name in MODEL_OPTIONS),
)  # fmt: skip
