"""Metrics of several processes as one text that Prometheus understands."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from engine.sampling.params import SamplingParams
from serving.engine_metrics import COUNTERS, GAUGES, EngineMetrics
from serving.ingress_metrics import IngressMetrics, dispatch_family
from serving.metrics import families_of, render
from tests.fakes import make_engine


def parse(text: bytes) -> dict[str, Any]:
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a family appears twice"
    return {family.name: family for family in families}


def value(families: dict[str, Any], sample: str, **labels: str) -> float:
    found = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, f"{sample}{labels}: {found}"
    return found[0]


def ingress(name: str, tokens: int) -> IngressMetrics:
    metrics = IngressMetrics(name)
    metrics.tokens.inc(tokens)
    metrics.open.inc(2)
    metrics.ttft.observe(0.03)
    metrics.ttft.observe(3.0)
    metrics.finished("stop", 1.0)
    return metrics


def test_families_of_equal_names_are_merged_and_labels_tell_them_apart() -> None:
    text = render([families_of(ingress("i1", 5).registry), families_of(ingress("i2", 7).registry)])
    families = parse(text)
    assert value(families, "ferry_tokens_streamed_total", ingress="i1") == 5
    assert value(families, "ferry_tokens_streamed_total", ingress="i2") == 7
    assert text.count(b"# TYPE ferry_ttft_seconds histogram") == 1
    assert value(families, "ferry_requests_finished_total", ingress="i2", reason="stop") == 1


def test_histograms_stay_cumulative() -> None:
    families = parse(render([families_of(ingress("i1", 1).registry)]))
    buckets = [s for s in families["ferry_ttft_seconds"].samples if s.name.endswith("_bucket")]
    counts = [s.value for s in buckets]
    assert counts == sorted(counts) and counts[-1] == 2 and buckets[-1].labels["le"] == "+Inf"
    assert value(families, "ferry_ttft_seconds_count", ingress="i1") == 2
    assert value(families, "ferry_ttft_seconds_sum", ingress="i1") == 3.03


def test_an_engines_stats_become_gauges_and_counters() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    families = parse(
        render([EngineMetrics("r0").families(engine.stats()), EngineMetrics("r1").families(engine.stats())])
    )
    for name in GAUGES:
        assert families[name].type == "gauge"
    for name in COUNTERS:
        assert families[name].type == "counter" and families[name].documentation
    assert value(families, "ferry_generation_tokens_total", replica="r0") == 4
    assert value(families, "ferry_prompt_tokens_total", replica="r1") == 3
    assert value(families, "ferry_kv_blocks_total", replica="r0") == 16


def test_an_engine_without_stats_has_no_families() -> None:
    assert EngineMetrics("r0").families(None) == []
    assert render([]) == b""


def test_timestamps_of_creation_are_left_out() -> None:
    registry = CollectorRegistry()
    Counter("things", "some things", registry=registry).inc()
    assert [name for _, _, _, samples in families_of(registry) for name, _, _ in samples] == ["things_total"]
    assert b"_created" not in render([families_of(registry)])


def test_odd_label_values_and_documentation_are_escaped() -> None:
    family = ("odd", 'a "quoted"\nline \\ done', "gauge", [("odd", {"model": 'x"y\\z\n'}, 1.5)])
    families = parse(render([[family]]))
    assert value(families, "odd", model='x"y\\z\n') == 1.5


def test_families_survive_being_sent_as_plain_data() -> None:
    sent = json.loads(json.dumps(families_of(ingress("i1", 5).registry)))
    assert render([sent]) == render([families_of(ingress("i1", 5).registry)])


def test_dispatches_are_counted_by_replica_and_policy() -> None:
    decisions = {("a", "llumnix"): 3, ("b", "lmetric"): 1}
    families = parse(render([[dispatch_family("i1", decisions)], [dispatch_family("i2", {})]]))
    assert value(families, "ferry_dispatches_total", ingress="i1", replica="a", policy="llumnix") == 3
    assert value(families, "ferry_dispatches_total", ingress="i1", replica="b", policy="lmetric") == 1
