"""Server-side defaults of request fields, and HTTP options, that are not built yet."""

from __future__ import annotations

from engine.options.models import GENERATION_DEFAULTS
from engine.options.option import Option

HTTP = "this HTTP option"

REQUESTS = (
    Option("temperature", "float", None, "default of the request field", "sampling", feature=GENERATION_DEFAULTS,
           low=0.0),
    Option("top_p", "float", None, "default of the request field", "sampling", feature=GENERATION_DEFAULTS,
           above=0.0, high=1.0),
    Option("top_k", "int", None, "default of the request field", "sampling", feature=GENERATION_DEFAULTS, low=-1),
    Option("repetition_penalty", "float", None, "default of the request field", "sampling",
           feature=GENERATION_DEFAULTS, low=0.01, high=100.0),
    Option("presence_penalty", "float", None, "default of the request field", "sampling",
           feature=GENERATION_DEFAULTS, low=-2.0, high=2.0),
    Option("max_new_tokens", "int", None, "cap and default of max_tokens", "sampling", feature=GENERATION_DEFAULTS,
           low=1),
    Option("stop_sequences", "list", None, "stop strings", "sampling", feature=GENERATION_DEFAULTS),
    Option("stop_tokens", "list", None, "stop token ids or id sequences", "sampling", feature=GENERATION_DEFAULTS),
    Option("ignore_eos", "bool", None, "do not stop at EOS", "sampling", feature=GENERATION_DEFAULTS),
    Option("skip_special_tokens", "bool", None, "leave special tokens out of the text", "sampling",
           feature=GENERATION_DEFAULTS),
    Option("cat_prompt", "bool", None, "detokenize prompt and output together", "sampling",
           feature=GENERATION_DEFAULTS),
    Option("max_logprobs", "int", 20, "largest logprobs a request may ask", "http", feature=HTTP, low=0),
    Option("api_key", "list", None, "bearer keys", "http", feature=HTTP),
    Option("disable_log_stats", "bool", False, "no periodic statistics line", "http", feature=HTTP, flag=True),
)  # fmt: skip
