"""From logits to token ids.

    logits -> log-softmax (logprobs)
           -> penalties -> argmax | temperature -> min_p -> top_k -> top_p -> inverse CDF in vocabulary order

One uniform number a token, a function of (seed, index), picks from the cumulative distribution. Every operation works
on a row by itself and none sums across a row in an order that depends on the batch, so a row's token does not depend
on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.noise import uniform
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import Penalties, penalize
from engine.step import TokenLogprobs
from kernels import dispatch

NOT_FINITE = -1  # in place of a token: the row's logits are no finite numbers
NUCLEUS_GUESS = 1024  # most nuclei are smaller; finding this many is cheaper than sorting the vocabulary


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What to do with one row of logits."""

    params: SamplingParams
    seed: int
    index: int  # of the token in the output
    penalties: Penalties | None = None  # where params.penalized

    def __post_init__(self) -> None:
        if self.params.penalized and self.penalties is None:
            raise ValueError("a row with penalties needs the tokens it has seen")

    @property
    def plain(self) -> bool:
        """Its token is the argmax of its logits."""
        return self.params.greedy and self.penalties is None


class Kind(NamedTuple):
    """What rows need beyond their own argmax: rows of one kind are computed together."""

    sampled: bool  # else the argmax of penalized logits
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False


@dataclass(frozen=True, slots=True)
class SampleOutput:
    ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    def sample(
        self,
        logits: Tensor,
        rows: list[SampleRow],
        greedy: Callable[[list[int] | slice], Tensor] | None = None,
    ) -> SampleOutput:
        """One token for each row of logits [len(rows), vocab]; all but the argmax is computed in float32.

        `greedy` returns the likeliest tokens, int64, of some rows, where the model knows them better than by argmax.
        It is asked for greedy rows without penalties only; others take the argmax of their penalized logits.
        A row whose logits are not finite gets NOT_FINITE and no logprobs.
        """
        ids = [NOT_FINITE] * len(rows)
        plain = [i for i, row in enumerate(rows) if row.plain]
        if plain:
            some: list[int] | slice = slice(None) if len(plain) == len(rows) else plain  # all: nothing is copied
            likeliest = dispatch.argmax(logits[some]) if greedy is None else greedy(some)
            for i, token in zip(plain, likeliest.tolist(), strict=True):
                ids[i] = token
        for kind, members in _by_kind(rows, logits.shape[1]).items():
            chosen, group = logits[members].float(), [rows[i] for i in members]
            penalize(chosen, {i: row.penalties for i, row in enumerate(group) if row.penalties is not None})
            picked = _sample(chosen, group, kind) if kind.sampled else dispatch.argmax(chosen).tolist()
            for i, token in zip(members, picked, strict=True):
                ids[i] = token
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and ids[i] != NOT_FINITE]
        if wanted:
            counts = [rows[i].params.logprobs or 0 for i in wanted]
            for i, entry in zip(
                wanted, token_logprobs(logits[wanted].float(), [ids[i] for i in wanted], counts), strict=True
            ):
                logprobs[i] = entry
        return SampleOutput(ids, logprobs)


def _by_kind(rows: list[SampleRow], vocab: int) -> dict[Kind, list[int]]:
    """The rows whose token is not the argmax of their logits, by what they need."""
    kinds: dict[Kind, list[int]] = {}
    for i, row in enumerate(rows):
        params = row.params
        if row.plain:
            continue
        if not params.greedy:
            kind = Kind(True, params.min_p > 0.0, 0 < params.top_k < vocab, params.top_p < 1.0)
            kinds.setdefault(kind, []).append(i)
        else:
            kinds.setdefault(Kind(False), []).append(i)
    return kinds


def _sample(logits: Tensor, rows: list[SampleRow], kind: Kind) -> list[int]:
    device = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    if kind.min_p:
        # A token's share of the likeliest one's probability is exp(score): compared as logarithms, ties stay together
        floors = [math.log(row.params.min_p) for row in rows]
        scores.masked_fill_(scores < torch.tensor(floors, dtype=torch.float32, device=device)[:, None], -torch.inf)
    weights = scores.exp()
    if kind.top_k:
        counts = torch.tensor([row.params.top_k for row in rows], device=device)
        best = scores.topk(int(counts.max()), -1).values
        weights = weights * (scores >= best.gather(1, counts[:, None] - 1))  # tokens tied with the last one stay
        if kind.top_p:
            # The best of a row with fewer than the group's largest top_k are followed by ones it excludes
            best = best.masked_fill(torch.arange(best.shape[1], device=device) >= counts[:, None], -torch.inf)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    if kind.top_p:
        shares = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)
        wanted = shares * cumulative[:, -1]
        threshold = _nucleus(best, wanted) if kind.top_k else _open_nucleus(scores, wanted)
        weights = weights * (scores >= threshold)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
    return _inverse_cdf(cumulative, rows)


def _nucleus(best: Tensor, wanted: Tensor) -> Tensor:
    """The score of the last token of each nucleus [S, 1]: the fewest best tokens whose weights reach `wanted`.

    `best` holds scores in falling order, `wanted` is float64 [S].
    """
    reached = best.exp().cumsum(-1, dtype=torch.float64)
    size = (reached < wanted[:, None]).sum(-1, keepdim=True).clamp(max=best.shape[1] - 1)
    return best.gather(1, size)


def _open_nucleus(scores: Tensor, wanted: Tensor) -> Tensor:
    """_nucleus over the whole vocabulary, sorting it only for rows whose nucleus is large."""
    guess = min(NUCLEUS_GUESS, scores.shape[1])
    best = scores.topk(guess, -1).values
    threshold = _nucleus(best, wanted)
    wide = best.exp().cumsum(-1, dtype=torch.float64)[:, -1] < wanted
    if wide.any():
        threshold[wide] = _nucleus(scores[wide].sort(-1, descending=True).values, wanted[wide])
    return threshold


def _inverse_cdf(cumulative: Tensor, rows: list[SampleRow]) -> list[int]:
    """The first token of each row whose cumulative weight exceeds the row's uniform share of the total.

    NOT_FINITE for a row without a finite total: its logits hold an infinity or no number.
    """
    totals = cumulative[:, -1].tolist()
    targets = [
        # u * total may round up to total, which no cumulative weight exceeds
        min(uniform(row.seed, row.index) * total, math.nextafter(total, 0.0)) if math.isfinite(total) else 0.0
        for row, total in zip(rows, totals, strict=True)
    ]
    found = torch.tensor(targets, dtype=torch.float64, device=cumulative.device)[:, None]
    picked = torch.searchsorted(cumulative, found, right=True).squeeze(1).tolist()
    return [token if math.isfinite(total) else NOT_FINITE for token, total in zip(picked, totals, strict=True)]


def token_logprobs(logits: Tensor, ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Logprob and rank of one token of each row of logits [S, vocab], and the `counts[i]` likeliest tokens."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    most = min(max(counts), logits.shape[1])
    best = logprobs.topk(most, -1).values if most else logprobs[:, :0]
    entries = []
    for row, (count, logprob, rank) in enumerate(zip(counts, chosen.squeeze(1).tolist(), ranks.tolist(), strict=True)):
        top: list[tuple[int, float]] = []
        if count:
            # topk leaves open which of several tied tokens it returns: take all down to the last value, by id
            tied = (logprobs[row] >= best[row, min(count, most) - 1]).nonzero().squeeze(1)
            values, order = logprobs[row, tied].sort(descending=True, stable=True)
            top = list(zip(tied[order].tolist(), values.tolist(), strict=True))[:count]
        entries.append(TokenLogprobs(logprob, rank, top))
    return entries
