"""Trace readers, arrivals, and lengths against the paper's table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from engine.options.option import ConfigError
from llumnix.simulator.arrivals import arrivals
from llumnix.simulator.lengths import DATA_SETS, GENERATED, LONGEST, TRACES, by_quantiles, lengths, power_law
from llumnix.simulator.policies import policy
from llumnix.simulator.run import Run, trace_of
from llumnix.simulator.trace import make_trace, read_trace

DATA = Path(__file__).parents[4] / "shared" / "data"


# P50, P80, P95 and P99 of the paper's table 1
@pytest.mark.parametrize(
    "mean, table",
    [(128, (38, 113, 413, 1464)), (256, (32, 173, 1288, 4208)), (512, (55, 582, 3113, 5166))],
)
def test_generated_lengths_have_the_papers_quantiles(mean: int, table: tuple[int, ...]) -> None:
    drawn = power_law(mean, 200_000, np.random.default_rng(0))
    assert drawn.min() >= 1 and drawn.max() <= LONGEST
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    # The paper's are of one sample of 10,000, whose scale depends on its mean.
    assert np.percentile(drawn, [50, 80, 95, 99]) == pytest.approx(table, rel=0.18)


@pytest.mark.parametrize("mean", [128, 256, 512, 1024])
def test_the_power_law_by_its_definition(mean: int) -> None:
    """Before they are cut off, lengths are whole multiples of one unit, and frequencies fall by the exponent."""
    exponent = {128: 2.0, 256: 1.5, 512: 1.15, 1024: 1.0005}[mean]
    drawn = power_law(mean, 400_000, np.random.default_rng(1))
    values, counts = np.unique(drawn, return_counts=True)
    # Rank 1 against rank 2, rank 2 against rank 4.
    assert counts[0] / counts[1] == pytest.approx(2**exponent, rel=0.1)
    assert counts[1] / counts[3] == pytest.approx(2**exponent, rel=0.1)
    assert len(values) <= 2 * mean - 1


@pytest.mark.parametrize("name", DATA_SETS)
def test_data_sets_have_their_published_means_and_quantiles(name: str) -> None:
    for table in DATA_SETS[name]:
        drawn = by_quantiles(table, 200_000, np.random.default_rng(0))
        mean, *quantiles = table
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert np.percentile(drawn, [50, 80, 95, 99]) == pytest.approx(quantiles, rel=0.03)
        assert drawn.min() >= 1 and drawn.max() <= LONGEST


def test_prompts_and_outputs_of_a_trace() -> None:
    assert len(TRACES) == 7 and len(GENERATED) == 5
    prompt, output = lengths("L-S", 50_000, np.random.default_rng(0))
    assert prompt.mean() == pytest.approx(512, rel=0.03) and output.mean() == pytest.approx(128, rel=0.05)
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.02


@pytest.mark.parametrize("cv", [1.0, 2.0, 6.0])
def test_arrivals_have_their_rate_and_variation(cv: float) -> None:
    gaps = np.diff(arrivals(5.0, 200_000, np.random.default_rng(0), cv), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(arrivals(1.0, 200_000, np.random.default_rng(0)), prepend=0.0)
    assert np.percentile(gaps, [50, 90, 99]) == pytest.approx(-np.log([0.5, 0.1, 0.01]), rel=0.03)


# Files


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_own_csv(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t.csv", "output,arrival,prompt\n5,12.5,100\n6,10,7\n"))
    assert found.arrival.tolist() == [0.0, 2.5] and found.prompt.tolist() == [7, 100]
    assert found.output.tolist() == [6, 5] and found.priority.tolist() == [0, 0] and found.name == "t"
    with_class = read_trace(write(tmp_path / "p.csv", "arrival,prompt,output,priority\n0,1,1,-1\n"))
    assert with_class.priority.tolist() == [-1]


def test_azures_csv(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    rows.append("2023-11-16 18:15:50.9951690,396,0")
    found = read_trace(write(tmp_path / "a.csv", "\n".join(rows)))
    assert found.arrival[1] == pytest.approx(4.314579, abs=1e-5)
    assert found.prompt.tolist() == [374, 396] and found.output.tolist() == [44, 1]


def test_mooncakes_json_lines(tmp_path: Path) -> None:
    lines = [{"timestamp": 3000, "input_length": 50, "output_length": 6, "hash_ids": [1]}]
    lines.append({"timestamp": 1000, "input_length": 60, "output_length": 7, "hash_ids": []})
    packed = tmp_path / "m.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    found = read_trace(packed)
    assert found.arrival.tolist() == [0.0, 2.0] and found.prompt.tolist() == [60, 50] and found.name == "m"


@pytest.mark.parametrize(
    "name, text, part",
    [
        ("a.csv", "", "no column 'arrival'"),
        ("a.csv", "arrival,prompt\n1,2\n", "no column 'output'"),
        ("a.csv", "arrival,prompt,output\n1,2,3\n1,x,3\n", "after line 2"),
        ("a.csv", "arrival,prompt,output\n", "empty"),
        ("a.jsonl", '{"timestamp": 1}\n', "input_length"),
        ("a.jsonl", "nonsense\n", "after line 0"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, name: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as failed:
        read_trace(write(tmp_path / name, text))
    assert part in str(failed.value) and "\n" not in str(failed.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a file or a family"):
        read_trace(tmp_path / "none.csv")


def test_changes_of_a_trace() -> None:
    made = make_trace("x", [0.0, 1.0, 3.0, 4.0], [10, 20, 30, 5000], [1, 1, 1, 9000])
    assert made.rate == 1.0
    assert made.at_rate(2.0).arrival.tolist() == [0.0, 0.5, 1.5, 2.0]
    assert made.fitting(13616).prompt.tolist() == [10, 20, 30]
    assert made.window(1, 2).arrival.tolist() == [0.0, 2.0]
    high = make_trace("y", np.arange(10_000), np.ones(10_000), np.ones(10_000)).with_high(0.1, np.random.default_rng(0))
    assert (high.priority < 0).mean() == pytest.approx(0.1, abs=0.01)


def test_seeds_change_the_window_of_a_file_and_runs_are_within_capacity(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i + 1},{20_000 if i == 3 else 1}" for i in range(100))
    path = str(write(tmp_path / "t.csv", f"arrival,prompt,output\n{rows}\n"))
    traces = [trace_of(Run(path, policy("llumnix"), 2.0, seed, requests=20)) for seed in range(3)]
    assert traces[0].prompt[0] == 1 and len({int(t.prompt[0]) for t in traces}) > 1
    assert all(len(t) == 20 and t.rate == pytest.approx(2.0 * 20 / 20, rel=0.11) for t in traces)
    assert 4 not in traces[0].prompt


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not here")
def test_the_recorded_traces_are_read() -> None:
    azure = read_trace(DATA / "azure_llm_2023_conv.csv")
    assert len(azure) == 19_366 and azure.prompt.mean() == pytest.approx(1155, abs=1)
    mooncake = read_trace(DATA / "mooncake_synthetic.jsonl.gz")
    assert len(mooncake) > 1000 and mooncake.prompt[:2].tolist() == [40160, 36640]
