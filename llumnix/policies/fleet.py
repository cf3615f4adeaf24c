"""Load reports as columns: a decision over a thousand engines is then a few vector operations.

One row an engine, updated when its report or a booking changes. A booking is what this process has just sent to an
engine and no report of that engine shows yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from llumnix.load import DECODE, READY, LoadReport

_FIELDS = (
    *("running", "waiting", "free_blocks", "waiting_blocks", "total_blocks", "block_size", "max_model_len"),
    *("stalled_s", "queued_prefill_tokens", "high_running"),
)
_READY, _DECODES = len(_FIELDS), len(_FIELDS) + 1
_BOOKED, _BOOKED_BLOCKS, _BOOKED_TOKENS = len(_FIELDS) + 2, len(_FIELDS) + 3, len(_FIELDS) + 4
_COLUMNS = len(_FIELDS) + 5
_INDEX = {name: i for i, name in enumerate(_FIELDS)}


class Fleet:
    """`column(name)` is a float64 view [number of engines] in the order of `names`."""

    def __init__(self, reports: Iterable[LoadReport] = ()):
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        self._table = np.zeros((_COLUMNS, 16))
        self._prefixes: dict[str, tuple[str, frozenset[int]]] = {}  # engine -> its summary
        self._holders: dict[int, set[str]] = {}  # truncated block hash -> engines that have it
        self._ranks: np.ndarray | None = None
        for report in reports:
            self.put(report)

    def __len__(self) -> int:
        return len(self.names)

    def put(self, report: LoadReport) -> None:
        """Take an engine's newest report; bookings stay."""
        row = self.rows.get(report.engine)
        if row is None:
            row = self.rows[report.engine] = len(self.names)
            self.names.append(report.engine)
            self._ranks = None
            if len(self.names) > self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        values = [getattr(report, name) for name in _FIELDS]
        self._table[:_BOOKED, row] = (*values, report.state == READY, report.role == DECODE)
        if report.prefix or report.engine in self._prefixes:
            self._index_prefix(report.engine, report.prefix, report)

    def remove(self, engine: str) -> None:
        row = self.rows.pop(engine)
        last = self.names.pop()
        if last != engine:
            self.names[row], self.rows[last] = last, row
            self._table[:, row] = self._table[:, len(self.names)]
        self._table[:, len(self.names)] = 0.0
        self._index_prefix(engine, "", None)
        self._ranks = None

    def book(self, engine: str, blocks: int, tokens: int, requests: int = 1) -> None:
        """Count a request that was just sent there; negative numbers take it back once a report shows it."""
        row = self.rows.get(engine)
        if row is not None:
            self._table[_BOOKED:, row] += (requests, blocks, tokens)

    def column(self, name: str) -> np.ndarray:
        return self._table[_INDEX[name], : len(self.names)]

    @property
    def ready(self) -> np.ndarray:
        return self._table[_READY, : len(self.names)] != 0

    @property
    def decodes_only(self) -> np.ndarray:
        return self._table[_DECODES, : len(self.names)] != 0

    @property
    def batch(self) -> np.ndarray:
        """Requests of each engine: running, waiting and booked."""
        table = self._table[:, : len(self.names)]
        return table[0] + table[1] + table[_BOOKED]

    @property
    def owed_blocks(self) -> np.ndarray:
        """Demand of what waits or is booked."""
        return self.column("waiting_blocks") + self._table[_BOOKED_BLOCKS, : len(self.names)]

    @property
    def owed_tokens(self) -> np.ndarray:
        """Tokens still to be prefilled: queued or booked."""
        return self.column("queued_prefill_tokens") + self._table[_BOOKED_TOKENS, : len(self.names)]

    @property
    def ranks(self) -> np.ndarray:
        """The place of each engine in the order of names."""
        if self._ranks is None:
            self._ranks = np.empty(len(self.names))
            self._ranks[sorted(range(len(self.names)), key=self.names.__getitem__)] = np.arange(len(self.names))
        return self._ranks

    def cached_blocks(self, prefix: Sequence[int]) -> np.ndarray:
        """Leading blocks of a prompt that each engine has cached; `prefix` are its truncated hashes in order."""
        found = np.zeros(len(self.names))
        for i, digest in enumerate(prefix, 1):
            for engine in self._holders.get(digest, ()):
                found[self.rows[engine]] = i
        return found

    def _index_prefix(self, engine: str, summary: str, report: LoadReport | None) -> None:
        old, known = self._prefixes.get(engine, ("", frozenset()))
        if summary == old:
            return
        hashes = report.prefix_hashes if report is not None and summary else frozenset()
        for digest in known - hashes:
            holders = self._holders[digest]
            holders.discard(engine)
            if not holders:
                del self._holders[digest]
        for digest in hashes - known:
            self._holders.setdefault(digest, set()).add(engine)
        if hashes:
            self._prefixes[engine] = (summary, hashes)
        else:
            self._prefixes.pop(engine, None)
