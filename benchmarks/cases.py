"""What the bare engine is measured with: prefill, and decode at several batch sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 40_000  # ids are below; a model with fewer takes them modulo its own


@dataclass(frozen=True)
class Case:
    """Prompts that are sent at once, each continued by `output` tokens. `tokens` is what its rate counts."""

    name: str
    prompts: list[list[int]]
    output: int
    tokens: int


def cases(quick: bool = False) -> list[Case]:
    """The same in every process. Quick: few tokens, to see whether it runs and not how fast."""
    output = 4 if quick else 128
    return [
        Case("prefill 512, batch 1", prompts(1, 512), 1, 512),
        Case(f"decode, batch 1 (16 in, {output} out)", prompts(1, 16), output, output),
        Case(f"batch 16, 128 in {output} out", prompts(16, 128), output, 16 * output),
        Case(f"batch 64, 128 in {output} out", prompts(64, 128), output, 64 * output),
    ]


def prompts(batch: int, length: int) -> list[list[int]]:
    """Different prompts of random token ids."""
    source = random.Random(length)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for _ in range(batch)]
