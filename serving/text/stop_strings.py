"""Stop strings found character by character, so that the cut does not depend on how text was split into tokens.

Each stop string is a Knuth-Morris-Pratt automaton. Its state is the length of the longest suffix of the text so far
that begins the stop string: when a state reaches the whole length the string is complete, and the largest state is
exactly the text that must be held back, because it may still turn out to be the start of a match.
"""

from __future__ import annotations


class StopStrings:
    """Searches one sequence's text for its stop strings; several completed by one character: the longest wins.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: list[str]) -> None:
        if "" in stops:
            raise ValueError("stop is an empty string, must have at least one character")
        self.stops = list(dict.fromkeys(stops))
        self._failures = [_failure(stop) for stop in self.stops]
        self._states = [0] * len(self.stops)
        self._first = frozenset(stop[0] for stop in self.stops)

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[str, int] | None:
        """Take the next characters. The first stop string they complete, and how many of them it took; else None."""
        if self._first.isdisjoint(text) and not any(self._states):
            return None  # the common case: nothing begun, nothing begins
        states = self._states
        for position, char in enumerate(text):
            found = ""
            for index, stop in enumerate(self.stops):
                state = states[index]
                while state and stop[state] != char:
                    state = self._failures[index][state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found = max(found, stop, key=len)
                    state = self._failures[index][state]
                states[index] = state
            if found:
                return found, position + 1
        return None


def _failure(stop: str) -> list[int]:
    """failure[n]: length of the longest proper border of the first n characters."""
    failure = [0] * (len(stop) + 1)
    border = 0
    for index in range(1, len(stop)):
        while border and stop[border] != stop[index]:
            border = failure[border]
        if stop[border] == stop[index]:
            border += 1
        failure[index + 1] = border
    return failure
