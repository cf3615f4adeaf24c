"""Traces: when requests come and how long they are."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from engine.options.option import ConfigError


@dataclass(frozen=True)
class Trace:
    """Columns of equal length, in the order of arrival."""

    name: str
    arrival: np.ndarray  # float64, seconds from the start
    prompt: np.ndarray  # int64, tokens
    output: np.ndarray  # int64, tokens, at least 1
    priority: np.ndarray  # int64, below 0 is the high class

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self) / float(self.arrival[-1]) if len(self) and self.arrival[-1] > 0 else 0.0

    def at_rate(self, rate: float) -> Trace:
        """The same requests, faster or slower: gaps keep their proportions."""
        return replace(self, arrival=self.arrival * (self.rate / rate))

    def fitting(self, capacity: int) -> Trace:
        """Without the requests that no engine of `capacity` tokens could ever hold."""
        fits = self.prompt + self.output <= capacity
        columns = {name: getattr(self, name)[fits] for name in ("arrival", "prompt", "output", "priority")}
        return replace(self, **columns)

    def window(self, first: int, count: int) -> Trace:
        """Requests [first, first + count), from time 0 on."""
        names = ("arrival", "prompt", "output", "priority")
        columns = {name: getattr(self, name)[first : first + count] for name in names}
        columns["arrival"] = columns["arrival"] - columns["arrival"][:1]
        return replace(self, **columns)

    def with_high(self, share: float, rng: np.random.Generator) -> Trace:
        """A random share of the requests gets priority -1."""
        return replace(self, priority=np.where(rng.random(len(self)) < share, -1, 0))


def make_trace(name: str, arrival: Any, prompt: Any, output: Any, priority: Any = None) -> Trace:
    """A trace from sequences, sorted by arrival, beginning at 0. Raises ConfigError for an empty or a wrong one."""
    when = np.asarray(arrival, dtype=np.float64)
    columns = [np.asarray(column, dtype=np.int64) for column in (prompt, output)]
    columns.append(np.zeros(len(when), np.int64) if priority is None else np.asarray(priority, np.int64))
    if not len(when):
        raise ConfigError(f"{name}: the trace is empty")
    if columns[0].min() < 1 or columns[1].min() < 1:
        raise ConfigError(f"{name}: prompt and output have at least one token each")
    order = np.argsort(when, kind="stable")
    return Trace(name, when[order] - when[order[0]], *(column[order] for column in columns))


def read_trace(path: Path) -> Trace:
    """A trace by its format: Mooncake's JSON lines, Azure's CSV, or a CSV of arrival, prompt, output[, priority].

    A name that ends in .gz is unpacked. Raises ConfigError, one line with the file, the line and what is wrong.
    """
    if not path.is_file():
        raise ConfigError(f"--trace is {str(path)!r}, must be a file or a family of lengths such as M-M")
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    read = _mooncake if kind == ".jsonl" else _comma_separated
    columns: tuple[list, ...] = ([], [], [], [])
    line = 0
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        try:
            for line, row in read(lines):  # noqa: B007 the message below needs it
                for column, value in zip(columns, row):
                    column.append(value)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(f"{path}, after line {line}: {type(error).__name__}: {error}") from None
    arrival, prompt, output, priority = columns
    # Production traces have requests that were cut before their first token.
    return make_trace(path.name.split(".")[0], arrival, np.maximum(prompt, 1), np.maximum(output, 1), priority)


Numbered = Iterator[tuple[int, tuple[float, int, int, int]]]  # line, (arrival, prompt, output, priority)


def _mooncake(lines: Iterable[str]) -> Numbered:
    """{"timestamp": ms, "input_length", "output_length", ...}."""
    for number, line in enumerate(lines, 1):
        row = json.loads(line)
        yield number, (row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), 0)


AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def _comma_separated(lines: Iterable[str]) -> Numbered:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    if header == AZURE:
        for row in reader:
            # Seven digits of a second are one more than Python reads.
            yield reader.line_num, (datetime.fromisoformat(row[0][:26]).timestamp(), int(row[1]), int(row[2]), 0)
        return
    place = {name: i for i, name in enumerate(header)}
    for name in ("arrival", "prompt", "output"):
        if name not in place:
            raise KeyError(f"the header has no column {name!r}; it needs arrival, prompt and output, or {AZURE}")
    for row in reader:
        urgency = int(row[place["priority"]]) if "priority" in place else 0
        tokens = int(row[place["prompt"]]), int(row[place["output"]])
        yield reader.line_num, (float(row[place["arrival"]]), *tokens, urgency)
