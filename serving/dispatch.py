"""Where an ingress sends a request: the policies of llumnix, over what it knows of the engines and has just sent."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from itertools import pairwise

from engine.kv import block_hash, root_hash
from llumnix.load import LoadReport, truncated
from llumnix.policies.dispatch import CACHE_AWARE, Ask, choose
from llumnix.policies.fleet import Fleet
from llumnix.settings import DEFAULTS, LlumnixSettings

BOOKING_S = 0.3  # a report that comes this long after a request was sent shows it


class Dispatcher:
    """`put` and `remove` follow the engines; `choose` answers at once and books the request where it goes.

    A booking ends with a report that shows the request, never by the clock: while no reports come, because the manager
    is down or has many engines, requests still spread.
    """

    def __init__(self, block_size: int, prefix_caching: bool = True, step_timeout_s: float = 60.0):
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.step_timeout_s = step_timeout_s
        self.settings: LlumnixSettings = DEFAULTS
        self.fleet = Fleet()
        self.count = 0
        self.decisions: Counter[tuple[str, str]] = Counter()  # (engine, policy), of the engines that are here
        # Of each engine (when, blocks, tokens), oldest first.
        self._bookings: defaultdict[str, deque[tuple[float, int, int]]] = defaultdict(deque)

    def put(self, report: LoadReport, now: float) -> None:
        """A report newer than the last one of its engine."""
        self.fleet.put(report)
        booked = self._bookings[report.engine]
        while booked and now - booked[0][0] >= BOOKING_S:
            _, blocks, tokens = booked.popleft()
            self.fleet.book(report.engine, -blocks, -tokens, -1)

    def remove(self, engine: str) -> None:
        self.fleet.remove(engine)
        self._bookings.pop(engine, None)
        for key in [key for key in self.decisions if key[0] == engine]:
            del self.decisions[key]

    @property
    def ready(self) -> bool:
        """An engine takes requests and finishes its steps."""
        return bool((self.fleet.ready & (self.fleet.column("stalled_s") <= self.step_timeout_s)).any())

    @property
    def max_model_len(self) -> int | None:
        """Tokens the longest sequence may have on any ready engine; None without one."""
        ready = self.fleet.ready
        return int(self.fleet.column("max_model_len")[ready].max()) if ready.any() else None

    def choose(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        priority: int,
        exclude: Collection[str],
        now: float,
        home: str | None = None,
    ) -> str | None:
        """The engine for a request; None if there is none that could take it. `home`: take this one."""
        ask = Ask(len(prompt) + len(output), priority, self._prefix(prompt, output), exclude)
        chosen = home or choose(self.fleet, ask, self.settings, self.count, self.step_timeout_s)
        if chosen is not None:
            self._book(chosen, ask, now)
        return chosen

    def _book(self, engine: str, ask: Ask, now: float) -> None:
        """Count a request as being there until the engine's reports do."""
        blocks = -(-ask.tokens // self.block_size)
        tokens = ask.tokens
        if ask.prefix:
            tokens -= self.block_size * int(self.fleet.cached_blocks(ask.prefix)[self.fleet.rows[engine]])
        self.fleet.book(engine, blocks, tokens)
        self._bookings[engine].append((now, blocks, tokens))
        self.count += 1
        self.decisions[engine, self.settings.dispatch_policy] += 1

    def _prefix(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The blocks an engine would look up, as prefix summaries hold them; empty if the policy does not look."""
        if self.settings.dispatch_policy not in CACHE_AWARE or not self.prefix_caching:
            return []
        tokens, digest, hashes = [*prompt, *output], root_hash(), list[int]()
        for start, end in pairwise(range(0, len(tokens), self.block_size)):  # the last token is never looked up
            digest = block_hash(digest, tokens[start:end])
            hashes.append(truncated(digest))
        return hashes
