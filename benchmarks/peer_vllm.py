"""The peer's side of benchmarks/peer.py, run by the Python of the peer's environment:

    PEER/bin/python -P benchmarks/peer_vllm.py JOB.json

Imports only vllm and the standard library (-P: this folder's http.py and profile.py must not stand in for those). The
job holds the model's folder, its longest sequence, how often to run each case, and the cases. Prints one line of JSON.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

WARM_TOKENS = 8


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm = LLM(model=job["model"], dtype="bfloat16", max_model_len=job["max_model_len"], enable_prefix_caching=False)
    ready_at = time.monotonic()
    rates = {}
    for case in job["cases"]:
        run(llm, case["prompts"], min(WARM_TOKENS, case["output"]))
        rates[case["name"]] = [
            case["tokens"] / run(llm, case["prompts"], case["output"]) for _ in range(job["repeats"])
        ]
    facts = {"vllm": version("vllm"), "torch": version("torch"), "Python": platform.python_version()}
    print(json.dumps({"ready_at": ready_at, "rates": rates, "facts": facts}), flush=True)


def run(llm, prompts, output) -> float:
    """Seconds for all prompts with `output` new tokens each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(answer.outputs[0].token_ids) != output for answer in done):
        sys.exit(f"error: not every prompt was continued by {output} tokens")
    return seconds


if __name__ == "__main__":
    main()
