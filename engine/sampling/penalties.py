"""Penalties on the tokens a sequence holds already, in float32 and before temperature.

    prompt and output   x = x / repetition_penalty if x > 0 else x * repetition_penalty
    output only         x = x - frequency_penalty * count - presence_penalty

The first is CTRL's (Keskar et al. 2019, arXiv 1909.05858), the others are OpenAI's; this is vLLM's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.params import SamplingParams


class Penalties:
    """What one sequence is penalized for: its distinct tokens, and how often its output holds each.

    Sparse: a few thousand entries where a vocabulary has 150,000. Counted once when the sequence is met, then kept by
    `add`. The order of the entries depends on when that was, so nothing may depend on it.
    """

    def __init__(self, tokens: Sequence[int], num_prompt: int, params: SamplingParams):
        self.params = params
        output = tokens[num_prompt:]
        # Only repetition_penalty looks at the prompt, which may be long
        known = np.unique(np.array(tokens if params.repetition_penalty != 1.0 else output, dtype=np.int64))
        distinct, times = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        self._ids = np.concatenate([known, np.zeros(256, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._counts[np.searchsorted(known, distinct)] = times
        self._entries = {token: entry for entry, token in enumerate(known.tolist())}

    def add(self, token: int) -> None:
        """One more token of the output."""
        entry = self._entries.setdefault(token, len(self._entries))
        if entry == len(self._ids):  # full: double
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[entry] = token
        self._counts[entry] += 1

    @property
    def ids(self) -> np.ndarray:
        """Distinct tokens, int64 [n], in no order; those of the prompt only under a repetition_penalty."""
        return self._ids[: len(self._entries)]

    @property
    def counts(self) -> np.ndarray:
        """How often the output holds each of `ids`, float32 [n]; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._entries)]


def penalize(logits: Tensor, rows: Mapping[int, Penalties]) -> None:
    """Edit some rows of contiguous float32 logits [S, vocab] in place.

    Elementwise on the tokens seen, so a row's result does not depend on the others.
    """
    if not rows:
        return
    device, vocab = logits.device, logits.shape[1]
    lengths = torch.tensor([len(row.ids) for row in rows.values()])

    def each(name: str) -> Tensor:
        """A parameter of a row beside each of its tokens."""
        values = [getattr(row.params, name) for row in rows.values()]
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths).to(device)

    at = torch.from_numpy(np.concatenate([i * vocab + row.ids for i, row in rows.items()])).to(device)
    counts = torch.from_numpy(np.concatenate([row.counts for row in rows.values()])).to(device)
    repetition = each("repetition_penalty")
    flat = logits.view(-1)
    x = flat[at]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= each("frequency_penalty") * counts
    x -= each("presence_penalty") * (counts > 0)
    flat[at] = x
