"""The inference engine: scheduler, paged KV cache, models. Never imports ray.

from engine import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM, CompletionOutput, RequestOutput
    from engine.sampling.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy: command-line tools and ingresses import parts of this package without paying for torch.
    if name == "SamplingParams":
        from engine.sampling.params import SamplingParams

        return SamplingParams
    if name in __all__:
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
