"""The configuration of an engine and of the service around it: every parameter that works, with its default.

`EngineConfig` holds values. Each field is declared here once; its declaration (`Option`) also makes the command
line, the check of configuration files and docs/parameters.md. Parameters that are known but not built yet are in
engine/options. `resolve` turns what a user gave, under any name, into an `EngineConfig` or one-line `ConfigError`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.options.option import ConfigError, Option

__all__ = ["GIB", "ConfigError", "EngineConfig", "dtype_name", "resolve", "working_options"]

GIB = 1 << 30
DEFAULT_MAX_NUM_SEQS = 128
SERVICE_GROUPS = ("service", "rescheduling")  # parameters of what is around engines: an offline LLM refuses them

GPU_LATER = "GPU support is not built yet; use cpu or auto"


def option(kind: Any, default: Any, help: str, **rest: Any) -> Any:
    """A dataclass field whose metadata is its `Option`; the name is filled in by `working_options`."""
    declared = Option("", kind, default, help, **rest)
    if kind == "required":
        declared = dataclasses.replace(declared, kind="str")
        return dataclasses.field(metadata={"option": declared})
    return dataclasses.field(default=default, metadata={"option": declared})


def _hardware(name: str) -> str:
    return f"{name} hardware is not supported; use cpu or auto"


def _format(name: str) -> str:
    return f"{name} checkpoints are not built yet; use auto, safetensors, gguf or dummy"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Values of every parameter that works. Construction checks types, ranges and combinations."""

    # Model
    model: str = option(
        "required", None, "directory, .gguf file, hub name, or demo:smollm2", group="model", default_text="required"
    )
    served_model_name: tuple[str, ...] = option(
        "list", (), "names in the API and in metrics", group="service", default_text="model"
    )
    dtype: str = option(
        "str",
        "auto",
        "precision of what is not quantized; on CPU auto and half mean bfloat16 where the checkpoint is float16",
        group="model",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        blade="half",
    )
    load_format: str = option(
        "str",
        "auto",
        "weight format; dummy makes random weights",
        group="model",
        choices=(
            *("auto", "safetensors", "gguf", "dummy", "pt", "npcache", "tensorizer", "sharded_state"),
            *("bitsandbytes", "mistral", "runai_streamer"),
        ),
        refused={
            name: _format(name)
            for name in ("pt", "npcache", "tensorizer", "sharded_state", "bitsandbytes", "mistral", "runai_streamer")
        },
    )
    skip_tokenizer_init: bool = option("bool", False, "token ids in, token ids out", group="model", flag=True)
    max_model_len: int | None = option(
        "int", None, "longest sequence, prompt and output together", group="model", low=1, auto=True,
        default_text="from the model",
    )  # fmt: skip
    seed: int = option(
        "int", 0, "mixed into the seeds of requests that bring none", group="model", low=0, high=2**63 - 1
    )
    device: str = option(
        "str",
        "auto",
        "where the model runs",
        group="model",
        choices=("auto", "cpu", "cuda", "neuron", "openvino", "tpu", "xpu", "hpu"),
        refused={
            "cuda": GPU_LATER,
            "neuron": _hardware("Neuron"),
            "openvino": _hardware("OpenVINO"),
            "tpu": _hardware("TPU"),
            "xpu": _hardware("XPU"),
            "hpu": _hardware("HPU"),
        },
    )
    threads: int | None = option(
        "int",
        None,
        "CPU threads of one engine",
        group="model",
        low=1,
        default_text="physical cores of its host / engines there, at most num_cpus_per_replica",
    )

    batch_invariant: bool = option(
        "bool",
        True,
        "a request's tokens and logprobs have the same bits in any batch, chunking and after any move (bfloat16)",
        group="model",
        negations=("no_batch_invariant",),
    )

    # Step
    max_num_batched_tokens: int = option(
        "int",
        2048,
        "token budget of one step",
        group="step",
        low=1,
        auto=True,
        aliases=("ragged_flash_max_batch_tokens",),
    )
    max_num_seqs: int = option(
        "int", None, "sequences in one step", group="step", low=1, auto=True, default_text="128, at most the budget"
    )
    enable_chunked_prefill: bool = option(
        "bool", True, "long prompts are computed in chunks", group="step", negations=("no_enable_chunked_prefill",)
    )
    scheduling_policy: str = option(
        "str",
        "fcfs",
        "queue order; priority: lower value first, and one lower for each quarter of max_queue_time in the queue",
        group="step",
        choices=("fcfs", "priority"),
    )
    scheduler_delay_factor: float = option(
        "float", 0.0, "wait this share of the last prompt's latency before the next prompt", group="step", low=0.0
    )
    preempt_strategy: str = option(
        "str",
        "AUTO",
        "what becomes of a preempted request's KV; AUTO takes the cheaper one",
        group="step",
        choices=("AUTO", "RECOMPUTE", "SWAP"),
        aliases=("preemption_mode",),
    )

    # KV cache
    block_size: int = option(
        "int",
        16,
        "tokens in a KV block; results with 8 differ in their last bits from those with the others",
        group="kv cache",
        choices=(8, 16, 32, 64, 128),
        auto=True,
    )
    enable_prefix_caching: bool = option(
        "bool",
        True,
        "KV of equal prompt prefixes is kept and reused",
        group="kv cache",
        negations=("disable_prompt_cache", "no_enable_prefix_caching"),
    )
    prompt_cache_enable_swap: bool = option(
        "bool", False, "evicted prefix blocks go to host memory and come back", group="kv cache", flag=True
    )
    swap_space: float = option("float", 4.0, "GiB of host memory for swapped KV", group="kv cache", low=0.0)
    max_gpu_memory_utilization: float = option(
        "float",
        0.9,
        "share of device memory that weights, activations and KV may fill",
        group="kv cache",
        above=0.0,
        high=1.0,
        aliases=("gpu_memory_utilization",),
        blade=0.85,
    )
    num_gpu_blocks_override: int | None = option(
        "int", None, "number of KV blocks, whatever the memory", group="kv cache", low=1, default_text="none"
    )
    kv_cache_memory_bytes: int | None = option(
        "int", None, "bytes of the KV cache of one engine", group="kv cache", low=1, default_text="from the memory"
    )

    # Service
    host: str = option("str", "127.0.0.1", "HTTP bind address", group="service", blade="0.0.0.0")
    port: int = option("int", 8000, "HTTP port", group="service", low=1, high=65535, blade=8081)
    log_level: str = option("str", "INFO", "log level", group="service", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    num_replicas: int = option(
        "int", 1, "engines of the deployment, when their number does not vary", group="service", low=1
    )
    min_replicas: int | None = option(
        "int", None, "fewest engines; 0: none while there is nothing to do", group="service", low=0,
        default_text="1 with max_replicas",
    )  # fmt: skip
    max_replicas: int | None = option(
        "int", None, "most engines; with it their number follows the load", group="service", low=1,
        default_text="none: num_replicas engines",
    )  # fmt: skip
    num_cpus_per_replica: float | None = option(
        "float", None, "CPUs that Ray reserves for one engine; give it where nodes come and go", group="service",
        above=0.0, default_text="threads, or an equal part of the nodes there are at the start",
    )  # fmt: skip
    max_num_queued: int = option(
        "int", None, "requests that may wait at one engine; more get 429", group="service", low=0,
        default_text="4 x max_num_seqs",
    )  # fmt: skip
    max_queue_time: int = option("int", 3600, "seconds a request may wait before it is refused", group="service", low=1)
    request_timeout_s: float = option("float", 3600.0, "seconds of the longest request", group="service", above=0.0)
    step_timeout_s: float = option(
        "float",
        60.0,
        "seconds without a finished step after which an engine counts as hung",
        group="service",
        above=0.0,
    )
    drain_deadline_s: float = option(
        "float", 300.0, "seconds that running requests get when an engine is to go away", group="service", low=0.0
    )
    lease_s: float = option(
        "float", 5.0, "seconds of silence after which an engine drops an ingress's requests", group="service", low=0.1
    )
    max_resumes: int = option(
        "int", 3, "times a request is started again after its engine died", group="service", low=0
    )

    # Rescheduling: what is inside the last two is checked by serving/rescheduling.py
    enable_llumnix: bool = option(
        "bool",
        False,
        "requests move between engines while they run; without it only away from an engine that goes away",
        group="rescheduling",
        flag=True,
    )
    llumnix_config: str | dict[str, Any] | None = option(
        "file", None, "YAML file with the settings below, or in a configuration file the settings themselves",
        group="rescheduling", default_text="the defaults below",
    )  # fmt: skip
    kv_transfer_config: dict[str, Any] | None = option(
        "json", None, "how the KV of a moving request travels, keys below", group="rescheduling",
        default_text="the defaults below",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.model is None:
            raise ConfigError("--model is missing, must be a directory, a .gguf file, a hub name or demo:smollm2")
        for name, declared in working_options().items():
            value = getattr(self, name)
            value = declared.default if value is None else declared.coerce(value)
            object.__setattr__(self, name, value)
        if self.max_num_seqs is None:
            object.__setattr__(self, "max_num_seqs", min(DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens))
        if self.max_num_queued is None:
            object.__setattr__(self, "max_num_queued", 4 * self.max_num_seqs)
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", (self.model,))
        if self.max_replicas is not None and self.min_replicas is None:
            object.__setattr__(self, "min_replicas", 1)
        self._check_combinations()

    @property
    def most_replicas(self) -> int:
        """The largest number of engines the deployment may have."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas

    def _check_combinations(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"must be at least max_num_seqs ({self.max_num_seqs})"
            )
        longest = self.max_model_len or 0
        if not self.enable_chunked_prefill and longest > self.max_num_batched_tokens:
            raise ConfigError(
                f"--max_model_len is {longest}, must be at most max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) while enable_chunked_prefill is off"
            )
        if self.prompt_cache_enable_swap and not self.enable_prefix_caching:
            raise ConfigError("--prompt_cache_enable_swap is on, needs prefix caching, which is turned off")
        if self.swap_space == 0 and (self.preempt_strategy == "SWAP" or self.prompt_cache_enable_swap):
            name = "preempt_strategy SWAP" if self.preempt_strategy == "SWAP" else "prompt_cache_enable_swap"
            raise ConfigError(f"--swap_space is 0, must be greater than 0 for {name}")
        self._check_replicas()
        if self.num_gpu_blocks_override and self.kv_cache_memory_bytes:
            raise ConfigError("--num_gpu_blocks_override and --kv_cache_memory_bytes both size the KV cache, give one")

    def _check_replicas(self) -> None:
        low, high = self.min_replicas, self.max_replicas
        if low is None:
            return
        if high is None:
            raise ConfigError(f"--min_replicas is {low}, needs max_replicas, the most engines there may be")
        if low > high:
            raise ConfigError(f"--min_replicas is {low}, must be at most max_replicas ({high})")
        if self.num_replicas != 1:
            raise ConfigError(
                f"--num_replicas is {self.num_replicas}, which fixes the number of engines, and max_replicas is "
                f"{high}, which lets it vary: leave one out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `EngineConfig(**data)` takes back."""
        return dataclasses.asdict(self)


@cache
def working_options() -> dict[str, Option]:
    """The declaration of every field of EngineConfig, by name."""
    fields = dataclasses.fields(EngineConfig)
    return {f.name: dataclasses.replace(f.metadata["option"], name=f.name) for f in fields}


def resolve(options: Any, *, preset: str = "") -> EngineConfig:
    """The configuration that `options` (a mapping, or pairs of name and value) describe.

    preset="blade" puts BladeLLM's defaults under them. Raises ConfigError with one line.
    """
    from engine.options.resolution import normalize, preset_values

    return EngineConfig(**{"model": None, **preset_values(preset), **normalize(options, preset=preset)})


def dtype_name(dtype: str, checkpoint_dtype: str, device: str = "cpu") -> str:
    """Torch's name of the precision that `dtype` asks for: float16, bfloat16 or float32.

    float16 is slow on CPUs: there `half` and `auto` mean bfloat16 and only the explicit `float16` means itself.
    """
    if dtype == "auto":
        known = checkpoint_dtype in ("float16", "bfloat16", "float32")
        dtype = checkpoint_dtype if known else "bfloat16"
        return "bfloat16" if dtype == "float16" and device == "cpu" else dtype
    if dtype == "half":
        return "bfloat16" if device == "cpu" else "float16"
    return "float32" if dtype == "float" else dtype
