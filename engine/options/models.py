"""Parameters of tokenizers, checkpoints, model structure and GPU graphs that are not built yet."""

from __future__ import annotations

from engine.options.option import Option

TOKENIZERS = "choosing a tokenizer or chat template"
LOADING = "choosing revisions and loader options"
STRUCTURE = "changing the model's structure"
GENERATION_DEFAULTS = "sampling defaults of the server"
TASKS = "serving tasks other than text generation"
GPU = "GPU support"

MODELS = (
    Option("tokenizer", "str", None, "tokenizer name or directory", "tokenizer", feature=TOKENIZERS,
           aliases=("tokenizer_dir",), default_text="model"),
    Option("chat_template", "str", None, "chat template, text or file", "tokenizer", feature=TOKENIZERS,
           default_text="the model's"),
    Option("tokenizer_mode", "str", "auto", "which tokenizer", "tokenizer", feature=TOKENIZERS,
           choices=("auto", "slow", "mistral", "custom")),
    Option("tokenizer_revision", "str", None, "revision of the tokenizer", "tokenizer", feature=TOKENIZERS),
    Option("tokenizer_special_tokens", "list", (), "overrides such as bos_token=<s>", "tokenizer", feature=TOKENIZERS),
    Option("revision", "str", None, "branch, tag or commit of the weights", "loading", feature=LOADING),
    Option("code_revision", "str", None, "revision of the model code", "loading", feature=LOADING),
    Option("download_dir", "str", None, "where weights are kept", "loading", feature=LOADING,
           default_text="hub cache"),
    Option("config_format", "str", "auto", "format of the model's configuration", "loading", feature=LOADING,
           choices=("auto", "hf", "mistral")),
    Option("hf_overrides", "json", None, "overrides of the model's configuration", "loading", feature=LOADING),
    Option("model_loader_extra_config", "json", None, "options of the chosen loader", "loading", feature=LOADING),
    Option("ignore_patterns", "list", (), "files not loaded", "loading", feature=LOADING),
    Option("trust_remote_code", "bool", False, "allow code shipped with a checkpoint", "loading", feature=LOADING,
           flag=True),
    Option("disable_sliding_window", "bool", False, "full attention, length capped at the window", "structure",
           feature=STRUCTURE, flag=True),
    Option("rope_scaling", "json", None, "linear, dynamic, yarn, llama3 or longrope", "structure", feature=STRUCTURE),
    Option("rope_theta", "float", None, "RoPE base", "structure", feature=STRUCTURE, default_text="the model's"),
    Option("generation_config", "str", None, "auto or a directory: default sampling parameters", "structure",
           feature=GENERATION_DEFAULTS),
    Option("override_generation_config", "json", None, "overrides of generation_config", "structure",
           feature=GENERATION_DEFAULTS),
    Option("task", "str", "auto", "what the model serves", "tasks", feature=TASKS, synonyms={"generate": "auto"},
           choices=("auto", "generate", "embedding", "embed", "classify", "score", "reward", "transcription")),
    Option("override_pooler_config", "json", None, "pooling type and normalization", "tasks", feature=TASKS),
    Option("with_visual", "bool", True, "vision tower of a vision-language model", "multimodal",
           feature="vision-language models", negations=("nowith_visual",)),
    Option("allowed_local_media_path", "str", None, "directory from which file:// media may be read", "multimodal",
           feature="multimodal input"),
    Option("limit_mm_per_prompt", "str", "image=1,video=1", "media items in a prompt", "multimodal",
           feature="multimodal input"),
    Option("mm_processor_kwargs", "json", None, "options of the media processor", "multimodal",
           feature="multimodal input"),
    Option("disable_mm_preprocessor_cache", "bool", False, "no cache of processed media", "multimodal",
           feature="multimodal input", flag=True),
    Option("override_neuron_config", "json", None, "options of Neuron hardware", "gpu", feature="Neuron hardware"),
    Option("enforce_eager", "bool", False, "no graphs, no compilation", "gpu", feature=GPU, flag=True),
    Option("compilation_config", "json", 0, "torch.compile level or options", "gpu", feature=GPU, short=("-O", "-o")),
    Option("max_seq_len_to_capture", "int", 8192, "longer sequences run without graphs", "gpu", feature=GPU, low=1),
    Option("enable_triton_mla", "bool", False, "MLA attention in Triton", "gpu", feature=GPU, flag=True),
    Option("disable_cuda_graph", "bool", False, "no graph capture", "gpu", feature=GPU, flag=True),
    Option("cuda_graph_max_batch_size", "int", 64, "largest captured batch", "gpu", feature=GPU, low=1),
    Option("cuda_graph_batch_sizes", "list", None, "captured batch sizes", "gpu", feature=GPU),
)  # fmt: skip
