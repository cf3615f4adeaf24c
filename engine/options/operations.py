"""Parameters of metrics export and traces that are not built yet."""

from __future__ import annotations

from engine.options.option import Option

METRICS = "exporting metrics"
TRACES = "tracing"

OPERATIONS = (
    Option("metric_exporters", "list", ("logger",), "logger (log lines) and eas (push)", "operations",
           feature=METRICS),
    Option("enable_disagg_metric", "bool", False, "metrics of prefill/decode disaggregation", "operations",
           feature=METRICS),
    Option("enable_export_kv_lens_metric", "bool", False, "histogram of KV lengths", "operations", feature=METRICS),
    Option("collect_detailed_traces", "str", None, "spans inside the model or worker", "operations", feature=TRACES,
           choices=("model", "worker", "all")),
    Option("otlp_traces_endpoint", "str", None, "OpenTelemetry export, http or grpc", "operations", feature=TRACES),
)  # fmt: skip
