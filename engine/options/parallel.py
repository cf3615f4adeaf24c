"""Parameters of parallel execution that are not built yet."""

from __future__ import annotations

from engine.options.option import Option

TENSOR = "tensor parallelism"
PIPELINE = "pipeline parallelism"
ATTENTION_DP = "attention data parallelism"
WORKERS = "multi-process execution"

PARALLEL = (
    Option("tensor_parallel_size", "int", 1, "ranks that split each layer", "parallel", feature=TENSOR,
           short=("-tp",), low=1),
    Option("pipeline_parallel_size", "int", 1, "stages that split the layers", "parallel", feature=PIPELINE,
           short=("-pp",), low=1),
    Option("pipeline_micro_batch", "int", 1, "micro-batches in flight through the stages", "parallel",
           feature=PIPELINE, short=("-ppmb",), low=1),
    Option("attention_dp_size", "int", 1, "data-parallel attention groups", "parallel", feature=ATTENTION_DP,
           short=("-dp",), low=1),
    Option("enable_hybrid_dp", "bool", False, "attention DP with tensor-parallel MLP", "parallel",
           feature=ATTENTION_DP),
    Option("enable_custom_allreduce", "bool", True, "own all-reduce in place of the library's", "parallel",
           feature=TENSOR, flag=True, negations=("disable_custom_all_reduce",), blade=False),
    Option("worker_socket_path", "str", "/tmp/blade_llm.sock", "socket between the driver and its local workers",
           "parallel", feature=WORKERS),
    Option("distributed_executor_backend", "str", None, "where the workers run", "parallel", feature=WORKERS,
           choices=("ray", "mp", "uni", "external_launcher"), auto=True, default_text="auto"),
    Option("max_parallel_loading_workers", "int", None, "ranks that load at once", "parallel", feature=WORKERS, low=1),
    Option("ray_workers_use_nsight", "bool", False, "profile Ray workers with Nsight", "parallel", feature=WORKERS,
           flag=True),
    Option("worker_cls", "str", "auto", "worker class, by import path", "parallel", feature=WORKERS),
    Option("cpu_offload_gb", "float", 0.0, "GiB of weights kept in host memory", "parallel",
           feature="weight offloading", low=0.0),
    Option("enable_sleep_mode", "bool", False, "sleep and wake: weights to host or dropped", "parallel",
           feature="sleep mode", flag=True),
)  # fmt: skip
