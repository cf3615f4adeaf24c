"""What copying KV costs a move, in multiples of one memcpy of the same bytes, by the CPU clocks of its threads.

    python -m benchmarks.copying [--mb 64] [--repeats 9]

Scattered blocks of one pool become scattered blocks of another, in transfers of the size that moves use: read by the
destination out of the source's process (one host), and through Ray's object store, with its `put` (which is what an
actor call does with its arguments) and the copy out of it. The store's memory is counted twice: as it comes, and the
best repeat, when its pages had been touched before. The memcpy is numpy's between two arrays that have been touched.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.machine import describe
from engine.kv_cache import KVCache, KVFormat
from llumnix.transfer import BATCH_BYTES
from serving.process_memory import ProcessMemory
from serving.transport import decode, encode_views

FORMAT = KVFormat(30, 3, 64, 16, torch.bfloat16)  # of the demo model
A_BATCH = BATCH_BYTES // FORMAT.block_bytes


def pool(blocks: int) -> tuple[KVCache, ProcessMemory]:
    kv = KVCache(FORMAT, blocks)
    kv.slabs.fill_(1)
    return kv, ProcessMemory(kv.slabs.data_ptr(), FORMAT.block_bytes)


def source(blocks: int) -> None:
    """The other process: tells where its batches are and waits."""
    _, memory = pool(blocks)
    print(repr([memory.pack(batch) for batch in batches_of(blocks, 1)]), flush=True)
    sys.stdin.read()


@contextmanager
def payloads(blocks: int) -> Iterator[list[dict[str, Any]]]:
    words = [sys.executable, "-c", f"from benchmarks import copying; copying.source({blocks})"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield ast.literal_eval(process.stdout.readline())
        process.stdin.close()


def batches_of(blocks: int, seed: int) -> list[list[int]]:
    """Half of a pool's blocks, scattered."""
    drawn = random.Random(seed).sample(range(blocks), blocks // 2)
    return [drawn[i : i + A_BATCH] for i in range(0, len(drawn), A_BATCH)]


def cpu_s(work: Callable[[], Any]) -> float:
    """Of this thread."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def through_store(ours: KVCache, theirs: KVCache, blocks: int) -> float:
    """Seconds of CPU; `put` with all threads of this process, as Ray copies large objects with several."""
    seconds = 0.0
    for mine, other in zip(batches_of(blocks, 1), batches_of(blocks, 2), strict=True):
        started = time.process_time()
        reference = ray.put(encode_views(ours.views(mine)))
        seconds += time.process_time() - started
        received = ray.get(reference)
        started = time.thread_time()
        theirs.write(other, decode(received))
        seconds += time.thread_time() - started
        del reference, received
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(describe())
    blocks = 2 * max(1, (options.mb << 20) // (A_BATCH * FORMAT.block_bytes)) * A_BATCH
    num_bytes = blocks // 2 * FORMAT.block_bytes
    (ours, _), (theirs, memory) = pool(blocks), pool(blocks)
    one, two = np.ones((2, num_bytes), dtype=np.uint8)
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    folder = tempfile.mkdtemp(prefix="fc-", dir="/tmp")  # short: Ray's sockets live below it
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=512 << 20, _temp_dir=folder, log_to_driver=False)
    times: dict[str, list[float]] = {"memcpy": [], "process memory": [], "object store": []}
    try:
        with payloads(blocks) as there:

            def fetch() -> None:
                for payload, batch in zip(there, batches_of(blocks, 2), strict=True):
                    memory.fetch(payload, batch)

            fetch()
            for _ in range(options.repeats):
                times["memcpy"].append(cpu_s(lambda: np.copyto(two, one)))
                times["process memory"].append(cpu_s(fetch))
                times["object store"].append(through_store(ours, theirs, blocks))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    copy = statistics.median(times["memcpy"])
    print(f"memcpy of {num_bytes / 1e6:.0f} MB: {1e3 * copy:.1f} ms, {num_bytes / copy / 1e9:.1f} GB/s")
    for name, values in times.items():
        if name != "memcpy":
            print(f"{name}: {statistics.median(values) / copy:.2f} memcpys, best {min(values) / copy:.2f}")


if __name__ == "__main__":
    main()
